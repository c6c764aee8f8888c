"""Attention over pages.

    keys, values  [slots, kv_heads, dim]: token t of a part is in slot
                  table[t // page_tokens] * page_tokens + t % page_tokens
    program       a tile of a part's new tokens x one key head x one split of the tokens they see

A tile has the query heads of a group as rows, so that keys are read once for all of them. What a
tile sees may be divided into splits, each a program that reads only its own; `merge_splits` merges
what they found by their log-sum-exps.

*Source:* FlashAttention-2 (online softmax), Flash-Decoding (splits), PagedAttention (tables).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    return first


@triton.jit
def _with_sinks(most, total, sinks, heads, is_row):
    """Add each row's sink to its total weight; return the greatest score and the total."""
    sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    higher = tl.maximum(most, sink)
    return higher, total * tl.exp2(most - higher) + tl.exp2(sink - higher)


@triton.jit
def attend_tile(
    out,
    sums,
    query,
    keys,
    values,
    sinks,
    tables,
    table_stride,
    starts,
    lengths,
    tiles,
    num_tokens,
    num_heads,
    query_strides_token,
    query_strides_head,
    key_strides_slot,
    key_strides_head,
    value_strides_slot,
    value_strides_head,
    scale,
    softcap,
    page_tokens,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend a tile: write its answer, or with `IS_SPLIT` what one split adds to it."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    part = tl.load(tiles + 2 * tile)
    first_new = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + part)
    num_new = tl.load(starts + part + 1) - start
    length = tl.load(lengths + part)
    past = length - num_new

    rows = tl.arange(0, ROWS)
    new = first_new + rows // GROUP
    is_row = (rows < (ROWS // GROUP) * GROUP) & (new < num_new)
    positions = past + new
    first_seen = _first_seen(positions, WINDOW, CHUNK)
    heads = kv_head * GROUP + rows % GROUP

    begin = _first_seen(past + first_new, WINDOW, CHUNK)
    end = past + tl.minimum(first_new + ROWS // GROUP, num_new)
    if IS_SPLIT:
        begin = begin + split * SPLIT
        end = tl.minimum(end, begin + SPLIT)
        if begin >= end:
            return  # a longer part has as many splits

    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    tokens = (start + new).to(tl.int64)
    queries = tl.load(
        query
        + tokens[:, None] * query_strides_token
        + heads[:, None] * query_strides_head
        + dims[None, :],
        mask=is_row[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, BLOCK_VALUE_DIM], tl.float32)
    for first in range(begin, end, KEYS):
        seen = first + tl.arange(0, KEYS)
        is_seen = seen < end
        page = tl.load(
            tables + part.to(tl.int64) * table_stride + seen // page_tokens, mask=is_seen, other=0
        )
        slots = page.to(tl.int64) * page_tokens + seen % page_tokens
        key = tl.load(
            keys + slots[None, :] * key_strides_slot + kv_head * key_strides_head + dims[:, None],
            mask=is_seen[None, :] & (dims[:, None] < DIM),
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        visible = (seen[None, :] <= positions[:, None]) & (seen[None, :] >= first_seen[:, None])
        scores = tl.where(visible & is_seen[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # Rows that have seen nothing yet, and those that are none, have no greatest score.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        kept = tl.exp2(most - reference)
        value = tl.load(
            values
            + slots[:, None] * value_strides_slot
            + kv_head * value_strides_head
            + value_dims[None, :],
            mask=is_seen[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        summed = summed * kept[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision=PRECISION
        )
        most = higher

    if HAS_SINKS and not IS_SPLIT:
        before = most
        most, total = _with_sinks(before, total, sinks, heads, is_row)
        summed = summed * tl.exp2(before - most)[:, None]
    total = tl.where(is_row, total, 1.0)
    answer = summed / total[:, None]
    row_of = tokens * num_heads + heads
    if IS_SPLIT:
        row_of += split.to(tl.int64) * num_tokens * num_heads
        tl.store(sums + row_of, most + tl.log2(total), mask=is_row)
    tl.store(
        out + row_of[:, None] * VALUE_DIM + value_dims[None, :],
        answer.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit
def merge_splits(
    out,
    found,
    sums,
    sinks,
    starts,
    lengths,
    tiles,
    num_tokens,
    num_heads,
    SPLIT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge what the splits of one token and one head found."""
    part = tl.load(tiles + 2 * tl.program_id(0))
    head = tl.program_id(1)
    token = tl.load(starts + part).to(tl.int64)
    length = tl.load(lengths + part)
    first = _first_seen(length - 1, WINDOW, CHUNK)
    num_splits = (length - first + SPLIT - 1) // SPLIT

    dims = tl.arange(0, BLOCK_VALUE_DIM)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for split in range(num_splits):
        row = (split * num_tokens + token) * num_heads + head
        sum_here = tl.load(sums + row + tl.arange(0, 1))
        here = tl.load(found + row * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        higher = tl.maximum(most, sum_here)
        kept = tl.exp2(most - higher)
        weight = tl.exp2(sum_here - higher)
        total = total * kept + weight
        summed = summed * kept + here * weight
        most = higher
    if HAS_SINKS:
        before = most
        most, total = _with_sinks(before, total, sinks, head + tl.arange(0, 1), True)
        summed = summed * tl.exp2(before - most)
    tl.store(
        out + (token * num_heads + head) * VALUE_DIM + dims,
        (summed / total).to(out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )
