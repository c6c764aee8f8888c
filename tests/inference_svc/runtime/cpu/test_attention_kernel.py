"""The kernel computes plain softmax attention, for all shapes, pages, batches and threads."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.runtime.attention.attention import NewKv
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.cpu.attention_kernel import (
    FIRSTS,
    KEY_ROW,
    VALUE_ROW,
    AttendedLayer,
    AttentionKernel,
    why_unsupported,
    why_wrong,
)
from inference_svc.runtime.kv.layer_tensors import LayerShape

LAYERS = {
    "narrow": LayerShape((1, 16), (1, 16)),
    "smollm": LayerShape((3, 64), (3, 64)),
    "unequal": LayerShape((2, 48), (2, 112)),
    "wide": LayerShape((2, 256), (2, 256)),
}


@pytest.fixture(scope="module")
def kernel():
    return AttentionKernel.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_plain_softmax(kernel, name, dtype):
    """One split and several, few query heads and many, softcap and sinks; see `why_wrong`.

    Both kernels; bfloat16 in prefill only where the processor multiplies it.
    """
    assert kernel.can_prefill(torch.float32)
    assert why_wrong(kernel, [LAYERS[name]], dtype) == ""


@pytest.mark.parametrize("factor", [1.001, float("nan")])
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_wrong_kernel_is_found(kernel, monkeypatch, name, factor):
    """A deviation of a thousandth is enough, and so is NaN."""
    right = getattr(kernel, name)
    monkeypatch.setattr(kernel, name, lambda *args: right(*args) * factor)
    reason = why_wrong(kernel, [LAYERS["smollm"]], torch.float32)
    assert f"the kernel of {name} is" in reason


@pytest.mark.parametrize("fault", ["writes nothing", "swaps keys and values"])
def test_a_kernel_that_writes_wrong_tokens_is_found(kernel, monkeypatch, fault):
    """Although the answers of those that it was given may be right."""
    right, decode = kernel.write_and_decode, kernel.decode

    def wrong(query, new, parts, layer_index, options):
        if fault == "writes nothing":
            layer = AttendedLayer(layer_index, new.key.shape[1], new.value.shape[3])
            return decode(query, parts, layer, options)
        swapped = NewKv(new.key, new.value, new.unrotated_value, new.unrotated_key)
        return right(query, swapped, parts, layer_index, options)

    monkeypatch.setattr(kernel, "write_and_decode", wrong)
    reason = why_wrong(kernel, [LAYERS["smollm"]], torch.float32)
    assert reason == "the kernel of decode writes other tokens than it is given"


def test_what_it_cannot_compute():
    """Head sizes that are no multiple of 16, other dtypes, fewer value heads than key heads."""
    assert why_unsupported(list(LAYERS.values()), torch.bfloat16) == ""
    assert "float16" in why_unsupported([LAYERS["wide"]], torch.float16)
    assert "72 elements" in why_unsupported([LayerShape((2, 72), (2, 64))], torch.float32)
    assert "other heads" in why_unsupported([LayerShape((2, 64), (1, 64))], torch.float32)


class Sequence:
    """Random KV of a sequence, side by side and on pages, and queries of its last tokens."""

    def __init__(self, length, page_tokens, seed, num_tokens=1):
        random = torch.Generator().manual_seed(seed)
        self.keys, self.values = (torch.randn(2, length, 32, generator=random) for _ in "kv")
        self.query = torch.randn(num_tokens, 6, 32, generator=random)
        self.num_tokens = num_tokens
        num_pages = -(-length // page_tokens)
        self.table = torch.randperm(num_pages, generator=random).to(torch.int32)
        self.page_tokens, self.length = page_tokens, length
        slots = [
            int(self.table[token // page_tokens]) * page_tokens + token % page_tokens
            for token in range(length)
        ]
        self.paged = []
        for tokens in (self.keys, self.values):
            region = torch.full((num_pages * page_tokens, 2, 32), float("nan"))
            region[slots] = tokens.transpose(0, 1)
            self.paged.append(region)

    def contiguous(self, first):
        strides = (*self.keys.stride()[:2], *self.values.stride()[:2])
        place = [self.keys.data_ptr(), self.values.data_ptr(), 0, 0]
        return [*place, first, self.length, *strides, self.num_tokens, 0, 0, 0]

    def on_pages(self, first):
        keys, values = self.paged
        place = [keys.data_ptr(), values.data_ptr(), self.table.data_ptr(), self.page_tokens]
        strides = (keys.stride(1), keys.stride(0), values.stride(1), values.stride(0))
        return [*place, first, self.length, *strides, self.num_tokens, 0, 0, 0]


def attend(kernel, sequences, parts, threads=1):
    """Attend these sequences' queries in one call."""
    query = torch.cat([sequence.query for sequence in sequences]).transpose(0, 1).unsqueeze(0)
    numbers = torch.tensor([parts])
    is_decode = all(sequence.num_tokens == 1 for sequence in sequences)
    by = kernel.decode if is_decode else kernel.prefill
    torch.set_num_threads(threads)
    try:
        return by(query, numbers, AttendedLayer(0, 2, 32), AttentionOptions())[0]
    finally:
        torch.set_num_threads(1)


LENGTHS = st.integers(1, 3000)  # up to three of the kernel's splits


@given(st.lists(st.tuples(LENGTHS, st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=4))
def test_pages_batch_and_threads_do_not_change_a_bit(sizes):
    """A sequence's result depends on its own tokens alone."""
    kernel = AttentionKernel.load()
    sequences = [Sequence(length, page, seed) for seed, (length, page, _) in enumerate(sizes)]
    firsts = [int(share * (length - 1)) for length, _, share in sizes]
    alone = [
        attend(kernel, [sequence], [sequence.contiguous(first)])[0]
        for sequence, first in zip(sequences, firsts, strict=True)
    ]
    for threads in (1, 2):
        parts = [seq.on_pages(first) for seq, first in zip(sequences, firsts, strict=True)]
        together = attend(kernel, sequences, parts, threads)
        assert torch.equal(together, torch.stack(alone))


@given(st.lists(st.tuples(LENGTHS, st.integers(1, 200), st.booleans()), min_size=1, max_size=4))
def test_written_tokens_are_attended_to(sizes):
    """On pages and side by side, whatever the strides are; only a part's own places change."""
    kernel = AttentionKernel.load()
    sequences = [Sequence(length, page, seed) for seed, (length, page, _) in enumerate(sizes)]
    places = [
        seq.on_pages(0) if is_paged else seq.contiguous(0)
        for seq, (*_, is_paged) in zip(sequences, sizes, strict=True)
    ]
    expected = attend(kernel, sequences, places)
    whole = copy.deepcopy(sequences)
    last = [
        torch.stack([each[:, -1] for each in kv]) for kv in zip(*map(kv_of, sequences), strict=True)
    ]
    random = torch.Generator().manual_seed(1)
    unrotated = [torch.randn(len(sizes), 2, 70, generator=random)[..., 3:35] for _ in "kv"]
    buffer = torch.zeros(2, 2 * len(sizes), 2, 32)  # every second row is another's
    for index, sequence in enumerate(sequences):
        page, offset = divmod(sequence.length - 1, sequence.page_tokens)
        slot = int(sequence.table[page]) * sequence.page_tokens + offset
        for tokens, paged in zip(kv_of(sequence), sequence.paged, strict=True):
            tokens[:, -1] = paged[slot] = float("nan")
        places[index][KEY_ROW] = buffer[0, 2 * index].data_ptr()
        places[index][VALUE_ROW] = buffer[1, 2 * index].data_ptr()
    query = torch.cat([sequence.query for sequence in sequences]).transpose(0, 1).unsqueeze(0)
    new = NewKv(*[tokens.transpose(0, 1).unsqueeze(0) for tokens in last], *unrotated)
    parts = torch.tensor([places])
    found = kernel.write_and_decode(query, new, parts, 0, AttentionOptions())[0]
    assert torch.equal(found, expected)
    assert torch.equal(buffer[:, ::2], torch.stack(unrotated))
    assert not buffer[:, 1::2].any()
    for sequence, before, (*_, is_paged) in zip(sequences, whole, sizes, strict=True):
        pairs = (sequence.paged, before.paged) if is_paged else (kv_of(sequence), kv_of(before))
        for tokens, unchanged in zip(*pairs, strict=True):
            assert torch.equal(tokens.nan_to_num(), unchanged.nan_to_num())


def kv_of(sequence):
    return sequence.keys, sequence.values


def test_tokens_of_another_dtype_are_not_written(kernel):
    """Their bytes would be taken for others'."""
    sequence = Sequence(20, 16, 3)
    query = sequence.query.transpose(0, 1).unsqueeze(0)
    rotated = [tokens[None, :, -1:] for tokens in kv_of(sequence)]
    new = NewKv(*rotated, *[tokens[0].transpose(0, 1).bfloat16() for tokens in rotated])
    parts = torch.tensor([[sequence.contiguous(0)]])
    with pytest.raises(RuntimeError, match="keys or values of BFloat16 beside queries of Float"):
        kernel.write_and_decode(query, new, parts, 0, AttentionOptions())


COUNTS = st.integers(2, 200)  # new tokens: up to three blocks of rows


@given(
    st.lists(st.tuples(st.integers(0, 600), COUNTS, st.integers(1, 200)), min_size=1, max_size=3)
)
def test_pages_batch_and_threads_do_not_change_a_bit_of_a_prefill(sizes):
    """As in decode steps."""
    kernel = AttentionKernel.load()
    sequences = [
        Sequence(past + count, page, seed, count) for seed, (past, count, page) in enumerate(sizes)
    ]
    alone = [attend(kernel, [sequence], [sequence.contiguous(0)]) for sequence in sequences]
    for threads in (1, 2):
        together = attend(kernel, sequences, [seq.on_pages(0) for seq in sequences], threads)
        assert torch.equal(together, torch.cat(alone))


@given(st.integers(0, 400), st.lists(COUNTS, min_size=2, max_size=4))
def test_how_a_prompt_is_divided_does_not_change_a_bit(past, counts):
    """Into the chunks of several steps."""
    kernel = AttentionKernel.load()
    whole = Sequence(past + sum(counts), 16, 5, sum(counts))
    expected, begin = attend(kernel, [whole], [whole.contiguous(0)]), 0
    for count in counts:
        piece = copy.copy(whole)
        piece.length, piece.num_tokens = past + begin + count, count
        piece.query = whole.query[begin : begin + count]
        found = attend(kernel, [piece], [piece.contiguous(0)])
        assert torch.equal(found, expected[begin : begin + count])
        begin += count


def test_each_new_token_sees_its_own_window(kernel):
    """And tokens before that of the first one are not read; here they are NaN."""
    sequence = Sequence(300, 16, 6, 150)
    whole = copy.deepcopy((sequence.keys, sequence.values))
    firsts = np.array([max(0, position - 20) for position in range(150, 300)], np.int64)
    for tokens in (sequence.keys, sequence.values):
        tokens[:, : firsts[0]] = float("nan")
    part = sequence.contiguous(int(firsts[0]))
    part[FIRSTS] = firsts.ctypes.data
    found = attend(kernel, [sequence], [part])
    hidden = torch.ones(150, 300, dtype=torch.bool).triu(151)
    hidden |= torch.arange(300) < torch.from_numpy(firsts)[:, None]
    keys, values = (tokens[None].repeat_interleave(3, 1) for tokens in whole)
    expected = torch.nn.functional.scaled_dot_product_attention(
        sequence.query.transpose(0, 1)[None], keys, values, attn_mask=~hidden
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_only_visible_tokens_count(kernel):
    """The kernel does not read tokens before the first visible one; here they are NaN."""
    sequence = Sequence(300, 16, seed=3)
    whole = Sequence(300, 16, seed=3)
    for tokens in (sequence.keys, sequence.values):
        tokens[:, :120] = float("nan")
    found = attend(kernel, [sequence], [sequence.contiguous(120)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        whole.query.view(1, 2, 3, 32), whole.keys[None, :, 120:], whole.values[None, :, 120:]
    )
    torch.testing.assert_close(found.view(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_any_size(kernel):
    """Where one token has all the weight and the others none, the result is not NaN."""
    sequence = Sequence(200, 16, seed=4)
    sequence.query *= 1e4
    found = attend(kernel, [sequence], [sequence.contiguous(0)])
    best = (sequence.query.view(2, 3, 32) @ sequence.keys.transpose(1, 2)).argmax(dim=2)
    expected = torch.stack([sequence.values[head][best[head]] for head in range(2)])
    torch.testing.assert_close(found.view(2, 3, 32), expected)
