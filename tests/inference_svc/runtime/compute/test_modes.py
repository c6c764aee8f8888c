"""The other modes' own work: gathered rows, masks, one forward per sequence."""

from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.gathered_forward import (
    GatheredForward,
    attend_uneven,
    block_causal_mask,
)
from inference_svc.runtime.kv.layer_gate import StepClock

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def count_forwards(model, chunks, clock=None):
    """Run a step; return the sizes of its forwards and the logits."""
    sizes = []
    handle = model.loaded.model.register_forward_pre_hook(
        lambda _module, _args, options: sizes.append(options["input_ids"].shape[1]),
        with_kwargs=True,
    )
    try:
        return sizes, model.runner.step(chunks, clock)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", [9]),
        ("deepseek-v3", [9]),
        ("deepseek-v32", [9]),
        ("falcon", [9]),
        ("bloom", [4, 3, 2]),
        ("deepseek-v4", [4, 3, 2]),
        ("qwen3-next", [9]),
        ("qwen4-exp", [9]),
        ("mamba", [9]),
    ],
)
def test_a_step_needs_the_fewest_forwards_that_its_mode_allows(tiny, name, sizes):
    """All sequences in one; one at a time only if the model counts positions itself."""
    model = tiny(name)
    kvs = [model.new_kv(8) for _ in range(3)]
    chunks = [
        Chunk(kv, tokens(seed, size), want_logits=True)
        for seed, (kv, size) in enumerate(zip(kvs, (4, 3, 2), strict=True))
    ]
    forwards, logits = count_forwards(model, chunks)
    assert forwards == sizes
    for seed, (row, size) in enumerate(zip(logits, (4, 3, 2), strict=True)):
        torch.testing.assert_close(row, model.stock_logits(tokens(seed, size))[-1], **CLOSE)


def test_masked_forwards_hold_a_window_of_rows_at_most(tiny):
    """Masks and the model's tables are limited by the context window."""
    model = tiny("mpt")
    histories = [tokens(seed, 80) for seed in range(3)]  # 192 positions: two of three fit
    kvs = [model.new_kv(96) for _ in histories]
    chunks = [
        Chunk(kv, history, want_logits=True) for kv, history in zip(kvs, histories, strict=True)
    ]
    forwards, logits = count_forwards(model, chunks)
    assert forwards == [160, 80]
    for row, history in zip(logits, histories, strict=True):
        torch.testing.assert_close(row, model.stock_logits(history)[-1], **CLOSE)


def test_the_clock_follows_the_last_forward(tiny):
    """With one forward per sequence, the clock opens a layer after all sequences' rows."""
    model = tiny("bloom")
    kvs, buffers = ([make(8) for _ in range(2)] for make in (model.new_kv, model.new_buffer))
    for buffer in buffers:
        for tensor in (*buffer.keys.layers, *buffer.values.layers):
            tensor.fill_(float("nan"))
    seen = []

    class Watched(StepClock):
        def on_enqueued(self, num_layers):
            seen.append(
                [bool(b.keys[num_layers - 1][:3].isfinite().all()) for b in buffers] + [num_layers]
            )
            super().on_enqueued(num_layers)

    chunks = [
        Chunk(kv, [3, 4, 5], want_logits=False, write_buffer=buffer)
        for kv, buffer in zip(kvs, buffers, strict=True)
    ]
    model.runner.step(chunks, Watched(2, CPU))
    assert seen == [[True, True, 1], [True, True, 2]]
    assert [kv.num_tokens for kv in kvs] == [3, 3]


def test_a_failing_forward_undoes_earlier_ones(tiny):
    """If the second sequence's forward fails, the first one's counters have not moved."""
    model = tiny("bloom")
    kvs = [model.new_kv(8) for _ in range(2)]
    good, bad = Chunk(kvs[0], [3, 4], True), Chunk(kvs[1], [10_000], True)
    with pytest.raises(IndexError):
        model.runner.step([good, bad])
    assert [kv.num_tokens for kv in kvs] == [0, 0]
    torch.testing.assert_close(
        model.runner.step([good])[0], model.stock_logits([3, 4])[-1], **CLOSE
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "falcon", "bloom"])
def test_logits_of_all_tokens(tiny, name):
    """Each mode gives the logits of every token of a chunk that wants them."""
    model = tiny(name)
    token_ids, other = tokens(5, 12), tokens(6, 4)
    chunks = [
        Chunk(model.new_kv(12), token_ids, want_logits=True, want_all=True),
        Chunk(model.new_kv(12), other, want_logits=True),
    ]
    expected = torch.cat((model.stock_logits(token_ids), model.stock_logits(other)[-1:]))
    torch.testing.assert_close(model.runner.step(chunks), expected, **CLOSE)


@pytest.mark.parametrize("sizes", [[20], [9, 10, 1]])
def test_gathered_attention_gives_scores(tiny, sizes):
    """A keeper beside another sequence gets the sums of the eager model's weights."""
    model = tiny("deepseek-v3")
    token_ids = tokens(7, 20)
    keeper = ScoreKeeper("accumulated", 0, 20)
    kv, beside = model.new_kv(20), model.new_kv(40)
    for size in sizes:
        begin = kv.num_tokens
        own = Chunk(kv, token_ids[begin : begin + size], want_logits=True, scores=keeper)
        model.runner.step([Chunk(beside, tokens(size, 6), want_logits=False), own])
        keeper.commit()
    with torch.no_grad():
        weights = model.stock(
            input_ids=torch.tensor([token_ids]), use_cache=False, output_attentions=True
        ).attentions
    expected = sum(layer[0].sum(dim=(0, 1)) for layer in weights)
    torch.testing.assert_close(torch.tensor(keeper.scores()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value_dim", [3, 8, 13])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_keys_and_values_of_unequal_width(num_tokens, value_dim):
    """Padding for a kernel changes nothing."""
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, num_tokens, 8, generator=generator)
    keys = torch.randn(1, 2, 20, 8, generator=generator)
    values = torch.randn(1, 2, 20, value_dim, generator=generator)
    attended = attend_uneven(query, keys, values, AttentionOptions(), {})
    scores = query @ keys.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    position = torch.arange(20)
    scores = scores.masked_fill(position > position[-num_tokens:, None], float("-inf"))
    expected = scores.softmax(-1) @ values.repeat_interleave(2, 1)
    torch.testing.assert_close(attended, expected)


def test_a_mask_may_have_all_new_tokens_last(tiny):
    """It equals one with the keys in another order; each token sees as many."""
    model = tiny("qwen4-exp")
    assert model.calibration.is_new_last
    kvs = [model.new_kv(8) for _ in range(2)]
    kvs[0].num_tokens, kvs[1].num_tokens = 2, 1
    chunks = [Chunk(kvs[0], [1, 2], want_logits=True), Chunk(kvs[1], [3], want_logits=True)]
    mask = block_causal_mask(chunks, torch.float32, CPU, new_last=True)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ]


def test_positions_before_are_those_of_all_histories(tiny):
    """If these come before all new tokens; otherwise there are none."""
    kvs = [tiny("qwen4-exp").new_kv(8) for _ in range(3)]
    kvs[0].num_tokens, kvs[2].num_tokens = 2, 3
    chunks = [Chunk(kv, [5], want_logits=True) for kv in kvs]
    calibration = tiny("qwen4-exp").calibration
    assert GatheredForward(calibration, chunks, None).history_positions().tolist() == [
        0,
        1,
        0,
        1,
        2,
    ]
    assert GatheredForward(calibration, chunks[1:2], None).history_positions() is None
    apart = replace(calibration, is_new_last=False)
    assert GatheredForward(apart, chunks[2:], None).history_positions().tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="among those of other sequences"):
        GatheredForward(apart, chunks, None).history_positions()


def test_the_mask_keeps_sequences_apart(tiny):
    """Each new token sees the rows of its own sequence up to itself."""
    model = tiny("falcon")
    kvs = [model.new_kv(8) for _ in range(2)]
    kvs[0].num_tokens = 2
    mask = block_causal_mask(
        [Chunk(kvs[0], [1, 2], want_logits=True), Chunk(kvs[1], [3], want_logits=True)],
        torch.float32,
        CPU,
    )
    assert mask.shape == (1, 1, 3, 5)
    visible = (mask[0, 0] == 0).int().tolist()
    assert visible == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 1]]
