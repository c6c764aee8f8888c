"""Forwards over slabs give the stock model's logits, whatever the batch looks like."""

import pytest
import torch

from inference_svc.runtime.model_runner import Chunk

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
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def prefill(runner, slab, token_ids, sizes):
    """Feed token_ids in chunks of these sizes; return the logits after the last."""
    begin = 0
    for size in sizes:
        logits = runner.step([Chunk(slab, token_ids[begin : begin + size], want_logits=True)])
        begin += size
    assert begin == len(token_ids)
    return logits[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_and_decode_equal_stock(tiny, name):
    """Prefill in chunks and then decode gives the stock model's logits at every step."""
    model = tiny(name)
    token_ids = tokens(1, 60)
    expected = model.stock_logits(token_ids)
    slab = model.runner.new_slab(60, save=True)
    begin = 0
    for size in (20, 1, 13, 18, *[1] * 8):
        logits = model.runner.step([Chunk(slab, token_ids[begin : begin + size], want_logits=True)])
        begin += size
        torch.testing.assert_close(logits[0], expected[begin - 1], **CLOSE)
    assert slab.num_tokens == 60


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_batch_equals_stock(tiny, name):
    """Sequences in prefill and in decode, of different lengths, do not disturb each other."""
    model = tiny(name)
    runner = model.runner
    long, middle, fresh = tokens(2, 50), tokens(3, 21), tokens(4, 9)
    slabs = [runner.new_slab(64, save=save) for save in (True, False, True)]
    runner.step(
        [
            Chunk(slabs[0], long[:40], want_logits=False),
            Chunk(slabs[1], middle[:20], want_logits=True),
        ]
    )
    logits = runner.step(
        [
            Chunk(slabs[1], middle[20:], want_logits=True),
            Chunk(slabs[2], fresh, want_logits=True),
            Chunk(slabs[0], long[40:], want_logits=True),
        ]
    )
    for row, token_ids in zip(logits, (middle, fresh, long), strict=True):
        torch.testing.assert_close(row, model.stock_logits(token_ids)[-1], **CLOSE)


def test_only_wanted_logits_come_back(tiny):
    """Chunks that want no logits have none, down to an empty answer."""
    runner = tiny("llama").runner
    slabs = [runner.new_slab(8, save=False) for _ in range(2)]
    assert runner.step([Chunk(slab, [5, 6], want_logits=False) for slab in slabs]).shape == (0, 97)
    logits = runner.step(
        [Chunk(slabs[0], [7], want_logits=False), Chunk(slabs[1], [7], want_logits=True)]
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
        slab, beside = (model.runner.new_slab(40, save=False) for _ in range(2))
        prefill(model.runner, slab, token_ids, (30,))
        both = [Chunk(slab, [4], want_logits=True), Chunk(beside, other, want_logits=False)]
        answers.append(model.runner.step(both)[0])
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-6)


def test_failed_step_leaves_slabs_as_they_were(tiny):
    """A step that raises leaves no trace in the sequence."""
    model = tiny("llama")
    token_ids = tokens(6, 20)
    slab = model.runner.new_slab(32, save=True)
    prefill(model.runner, slab, token_ids[:19], (19,))
    with pytest.raises(IndexError):
        model.runner.step([Chunk(slab, [5, 10_000], want_logits=True)])
    assert slab.num_tokens == 19
    logits = model.runner.step([Chunk(slab, token_ids[19:], want_logits=True)])
    torch.testing.assert_close(logits[0], model.stock_logits(token_ids)[-1], **CLOSE)


def test_overfull_chunk_is_a_broken_invariant(tiny):
    """A chunk that does not fit its slab, or a slab used twice, is the caller's bug."""
    runner = tiny("llama").runner
    slab = runner.new_slab(4, save=False)
    with pytest.raises(AssertionError, match="room for 4"):
        runner.step([Chunk(slab, [1] * 5, want_logits=True)])
    with pytest.raises(AssertionError, match="twice"):
        runner.step([Chunk(slab, [1], want_logits=True), Chunk(slab, [2], want_logits=True)])


def test_bfloat16_stays_close_to_stock(build):
    """In bfloat16 chunked logits stay within the distance that its rounding makes."""
    from inference_svc.runtime.calibration import calibrate
    from inference_svc.runtime.model_loader import describe_model
    from inference_svc.runtime.model_runner import ModelRunner

    loaded = describe_model(
        build("cohere2").to(torch.bfloat16), tokenizer=None, name="half", fingerprint="0"
    )
    runner = ModelRunner(loaded, calibrate(loaded))
    token_ids = tokens(8, 40)
    whole, parts = (runner.new_slab(40, save=False) for _ in range(2))
    one = prefill(runner, whole, token_ids, (40,))
    many = prefill(runner, parts, token_ids, (17, 22, 1))
    assert (one - many).norm() <= 0.05 * one.norm()
