"""Forwards over sequences' KV give the stock model's logits, for any batch."""

import random

import pytest
import torch

from inference_svc.runtime.compute.chunk import Chunk, retract
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from shared.types.errors import LoadFailedError
from tests.sampled import sampled, sampled_cases

ARCHITECTURES = (
    "llama",
    "llama3",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt-neox",
    "phi",
    "phi3",
    "phimoe",
    "stablelm",
    "glm",
    "cohere",
    "cohere2",
    "smollm3",
    "mixtral",
    "gpt-oss",
    "gpt2",
    "deepseek-v3",
    "deepseek-v32",
    "diffllama",
    "falcon",
    "gptj",
    "mpt",
    "bloom",
    "gpt-neo",
    "llama4",
    "lfm2",
    "mamba",
    "qwen3-next",
    "qwen4-exp",
    "recurrent-gemma",
    "deepseek-v4",
)
WITH_STATES = ("lfm2", "mamba", "qwen3-next", "qwen4-exp", "recurrent-gemma", "deepseek-v4")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Their scans and their decoding round differently: so do the stock models' own.
CLOSE_OF = {"mamba": {"rtol": 1e-3, "atol": 1e-4}, "recurrent-gemma": {"rtol": 1e-5, "atol": 3e-5}}


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def store_and_load(model, make_arena, rows, buffer, num_tokens):
    """Return a new sequence KV that was loaded from what the write buffer holds."""
    block_tokens = model.calibration.layout.block_tokens
    blocks = [
        rows(slot_id, begin, min(block_tokens, num_tokens - begin))
        for slot_id, begin in enumerate(range(0, num_tokens, block_tokens))
    ]
    _, arena_kv = make_arena(model.calibration.layout)
    store_blocks(buffer, arena_kv, blocks, model.calibration)
    kv = model.new_kv(num_tokens)
    for layer_index in range(len(model.calibration.layers)):
        LayerLoader(kv, arena_kv, blocks, model.calibration).load(layer_index)
    return kv


def prefill(runner, kv, token_ids, sizes):
    """Feed token_ids in chunks of these sizes; return the logits after the last."""
    begin = 0
    for size in sizes:
        logits = runner.step([Chunk(kv, token_ids[begin : begin + size], want_logits=True)])
        begin += size
    assert begin == len(token_ids)
    return logits[0]


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, 12, seed=1))
def test_chunks_and_decode_equal_stock(tiny, name):
    """Prefill in chunks and then decode gives the stock model's logits at every step."""
    model = tiny(name)
    token_ids = tokens(1, 60)
    expected = model.stock_logits(token_ids)
    kv = model.new_kv(60)
    begin = 0
    for size in (20, 1, 13, 18, *[1] * 8):
        logits = model.runner.step([Chunk(kv, token_ids[begin : begin + size], want_logits=True)])
        begin += size
        torch.testing.assert_close(logits[0], expected[begin - 1], **CLOSE_OF.get(name, CLOSE))
    assert kv.num_tokens == 60


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, 12, seed=2))
def test_ragged_batch_equals_stock(tiny, name):
    """Sequences in prefill and in decode, of different lengths, do not affect each other."""
    model = tiny(name)
    runner = model.runner
    long, middle, fresh = tokens(2, 50), tokens(3, 21), tokens(4, 9)
    kvs = [model.new_kv(64) for _ in range(3)]
    runner.step(
        [
            Chunk(kvs[0], long[:40], want_logits=False),
            Chunk(kvs[1], middle[:20], want_logits=True),
        ]
    )
    logits = runner.step(
        [
            Chunk(kvs[1], middle[20:], want_logits=True),
            Chunk(kvs[2], fresh, want_logits=True),
            Chunk(kvs[0], long[40:], want_logits=True),
        ]
    )
    for row, token_ids in zip(logits, (middle, fresh, long), strict=True):
        torch.testing.assert_close(
            row, model.stock_logits(token_ids)[-1], **CLOSE_OF.get(name, CLOSE)
        )


def test_only_requested_logits_are_returned(tiny):
    """Chunks that want none have none; the result may be empty."""
    model = tiny("llama")
    runner, kvs = model.runner, [model.new_kv(8) for _ in range(2)]
    assert runner.step([Chunk(kv, [5, 6], want_logits=False) for kv in kvs]).shape == (0, 97)
    logits = runner.step(
        [Chunk(kvs[0], [7], want_logits=False), Chunk(kvs[1], [7], want_logits=True)]
    )
    assert logits.shape == (1, 97)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_decode_does_not_depend_on_the_attention_of_others(tiny, name):
    """A token's logits are the same beside a decode as beside a prefill, to rounding."""
    model = tiny(name)
    token_ids = tokens(5, 30)
    answers = []
    for other in ([9], [9] * 17):
        kv, beside = (model.new_kv(40) for _ in range(2))
        prefill(model.runner, kv, token_ids, (30,))
        both = [Chunk(kv, [4], want_logits=True), Chunk(beside, other, want_logits=False)]
        answers.append(model.runner.step(both)[0])
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-6)


def test_failed_step_leaves_sequence_kvs_as_they_were(tiny):
    """A step that raises leaves no trace in the sequence."""
    model = tiny("llama")
    token_ids = tokens(6, 20)
    kv, buffer = model.new_kv(32), model.new_buffer(32)
    model.runner.step([Chunk(kv, token_ids[:19], want_logits=False, write_buffer=buffer)])
    with pytest.raises(IndexError):
        model.runner.step([Chunk(kv, [5, 10_000], want_logits=True, write_buffer=buffer)])
    assert (kv.num_tokens, buffer.end_token) == (19, 19)
    logits = model.runner.step([Chunk(kv, token_ids[19:], want_logits=True)])
    torch.testing.assert_close(logits[0], model.stock_logits(token_ids)[-1], **CLOSE)


def test_an_overfull_chunk_violates_an_invariant(tiny):
    """A chunk that does not fit its KV or buffer, or KV used twice, is the caller's bug."""
    model = tiny("llama")
    runner, kv = model.runner, model.new_kv(4)
    with pytest.raises(AssertionError, match="room for 4"):
        runner.step([Chunk(kv, [1] * 5, want_logits=True)])
    with pytest.raises(AssertionError, match="twice"):
        runner.step([Chunk(kv, [1], want_logits=True), Chunk(kv, [2], want_logits=True)])
    buffer = model.new_buffer(2)
    with pytest.raises(AssertionError, match="slots for those from 0 to 2"):
        runner.step([Chunk(kv, [1, 2, 3], want_logits=True, write_buffer=buffer)])
    runner.step([Chunk(kv, [1], want_logits=True)])
    with pytest.raises(AssertionError, match="up to token 0 beside KV up to token 1"):
        runner.step([Chunk(kv, [1], want_logits=True, write_buffer=buffer)])


def test_bfloat16_stays_close_to_stock(tiny):
    """In bfloat16 chunked logits stay within the distance that its rounding makes."""
    model = tiny("cohere2", torch.bfloat16)
    token_ids = tokens(8, 40)
    one = prefill(model.runner, model.new_kv(40), token_ids, (40,))
    many = prefill(model.runner, model.new_kv(40), token_ids, (17, 22, 1))
    assert (one - many).norm() <= 0.05 * one.norm()


OF_EACH_KIND = [
    "llama",
    "phi",
    "cohere2",
    "gemma2",
    "gpt-oss",
    "gpt2",
    "deepseek-v3",
    "deepseek-v32",
    "falcon",
    "bloom",
]


@pytest.mark.parametrize(
    ("name", "positions"), sampled_cases(OF_EACH_KIND, ["auto", "coupled"], count=10, seed=1)
)
def test_write_buffer_holds_keys_before_rope(tiny, make_arena, rows, name, positions):
    """Rows of a write buffer, stored and loaded, are bit by bit the KV that attention reads."""
    model = tiny(name, positions=positions)
    token_ids = tokens(9, 30)
    kv, buffer = model.new_kv(30), model.new_buffer(30)
    begin = 0
    for size in (12, 1, 1, 16):
        new = token_ids[begin : begin + size]
        model.runner.step([Chunk(kv, new, want_logits=False, write_buffer=buffer)])
        begin += size
    assert buffer.end_token == 30
    again = store_and_load(model, make_arena, rows, buffer, 30)
    for layer_index, recipe in enumerate(model.calibration.layers):
        for ours, theirs in zip(kv.components, again.components, strict=True):
            assert torch.equal(ours[layer_index][:, :, :30], theirs[layer_index][:, :, :30])
        for stored, cached, component in zip(
            buffer.components, kv.components, recipe.components, strict=True
        ):
            unturned = stored[layer_index][:30].transpose(0, 1)[None]
            is_turned = not torch.equal(unturned, cached[layer_index][:, :, :30])
            assert is_turned == (component.rotary is not None)
            assert not is_turned or positions == "auto"


def test_write_buffer_takes_tokens_from_its_first_on(tiny):
    """Earlier tokens are not written; other sequences of the batch write all or nothing."""
    model = tiny("llama")
    token_ids = tokens(10, 20)
    kvs = [model.new_kv(20) for _ in range(3)]
    whole, late = model.new_buffer(20), model.new_buffer(12, first_token=8)
    for begin, end in ((0, 5), (5, 11), (11, 12), (12, 20)):
        new = token_ids[begin:end]
        model.runner.step(
            [
                Chunk(kv, new, want_logits=False, write_buffer=buffer)
                for kv, buffer in zip(kvs, (late, None, whole), strict=True)
            ]
        )
        assert late.end_token == max(8, end)
        assert whole.end_token == end
    for layer_index in range(2):
        assert torch.equal(late.keys[layer_index][:12], whole.keys[layer_index][8:20])
        assert torch.equal(late.values[layer_index][:12], whole.values[layer_index][8:20])


@pytest.mark.parametrize("name", WITH_STATES)
def test_sequences_with_states_do_not_mix(tiny, name):
    """In batches of chunks of any sizes and order."""
    model, draw = tiny(name), random.Random(7)  # noqa: S311
    given = {model.new_kv(40): tokens(seed, draw.randint(9, 40)) for seed in range(5)}
    logits = {kv: [] for kv in given}
    while left := [kv for kv in given if kv.num_tokens < len(given[kv])]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        sizes = [draw.choice([1, 1, 2, 7]) for _ in chosen]
        pieces = [given[kv][kv.num_tokens :][:size] for kv, size in zip(chosen, sizes, strict=True)]
        chunks = [
            Chunk(kv, piece, True, want_all=True) for kv, piece in zip(chosen, pieces, strict=True)
        ]
        found = model.runner.step(chunks).split_with_sizes([len(piece) for piece in pieces])
        for kv, rows in zip(chosen, found, strict=True):
            logits[kv].append(rows)
    for kv, token_ids in given.items():
        expected = model.stock_logits(token_ids)
        torch.testing.assert_close(torch.cat(logits[kv]), expected, **CLOSE_OF.get(name, CLOSE))


@pytest.mark.parametrize("sizes", [[24], [7, 1, 1, 15], [1] * 24])
def test_functions_of_the_last_tokens_continue_behind_a_chunk(tiny, sizes):
    """N-grams start over behind an end of text, wherever chunks end."""
    model = tiny("qwen4-exp")
    end_of_text = model.loaded.model.config.eos_token_id
    given = [tokens(8, 24), tokens(9, 24)]
    given[0][6] = given[0][8] = given[1][7] = end_of_text
    kvs, begin = [model.new_kv(24) for _ in given], 0
    for size in sizes:
        pieces = [token_ids[begin : begin + size] for token_ids in given]
        begin += size
        logits = model.runner.step(
            [Chunk(kv, piece, want_logits=True) for kv, piece in zip(kvs, pieces, strict=True)]
        )
        expected = [model.stock_logits(token_ids[:begin])[-1] for token_ids in given]
        torch.testing.assert_close(logits, torch.stack(expected), **CLOSE)


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_failed_step_leaves_states_as_they_were(tiny, monkeypatch, name):
    """Of every sequence, whichever caused the failure."""
    model = tiny(name)
    first, second = model.new_kv(40), model.new_kv(40)
    given = {first: tokens(3, 30), second: tokens(4, 20)}
    pieces = [Chunk(kv, given[kv][:end], True) for kv, end in ((first, 12), (second, 9))]
    model.runner.step(pieces)
    before = [kv.states.snapshot() for kv in given]
    again = [Chunk(kv, given[kv][kv.num_tokens :][:3], True) for kv in given]

    def fail():
        raise RuntimeError("the second sequence fails")

    with monkeypatch.context() as patch:
        patch.setattr(second.states, "check_pending", fail)
        with pytest.raises(RuntimeError, match="the second sequence"):
            model.runner.step(again)
    assert [kv.num_tokens for kv in given] == [12, 9]
    assert all(kv.states.snapshot().equal(was) for kv, was in zip(given, before, strict=True))
    logits = model.runner.step([Chunk(kv, given[kv][kv.num_tokens :], True) for kv in given])
    for token_ids, found in zip(given.values(), logits, strict=True):
        expected = model.stock_logits(token_ids)[-1]
        torch.testing.assert_close(found, expected, **CLOSE_OF.get(name, CLOSE))


def test_a_state_is_read_after_its_gate_has_opened(tiny):
    """A forward over a sequence with a failed load raises the load's error."""
    model = tiny("qwen3-next")
    kv, token_ids = model.new_kv(40), tokens(3, 12)
    model.runner.step([Chunk(kv, token_ids, True)])
    kv.gate = LayerGate(len(model.calibration.layers))
    kv.gate.fail(LoadFailedError("no state came", "load again"))
    with pytest.raises(LoadFailedError, match="no state came"):
        model.runner.step([Chunk(kv, token_ids, True)])


def test_a_state_of_another_position_is_not_used(tiny):
    """The KV was cut without the state, or its load brought none."""
    model = tiny("lfm2")
    kv, token_ids = model.new_kv(40), tokens(3, 12)
    model.runner.step([Chunk(kv, token_ids, True)])
    kv.num_tokens = 8
    with pytest.raises(AssertionError, match="the state of 12 tokens beside KV of 8"):
        model.runner.step([Chunk(kv, token_ids, True)])
    with pytest.raises(AssertionError, match="taken back"):
        retract(Chunk(kv, token_ids, True), 1)
