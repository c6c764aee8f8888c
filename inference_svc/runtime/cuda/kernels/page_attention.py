"""Page attention kernels: attention of a step's new tokens over pages of KV.

    keys, values  [slots, kv_heads, dim]: token t of a part is in slot
                  table[t // page_tokens] * page_tokens + t % page_tokens
    program       a tile of a part's new tokens x one key head x one split of the tokens they see

The rows of a tile are the query heads of a group, for each of its tokens, so that keys are read
once for all of them. The tokens that a tile sees may be divided into splits, each read by a program
of its own; `merge_splits` merges the splits' results by their log-sum-exps.

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
def _split_tokens(begin, end, num_splits, SPLIT: tl.constexpr, KEYS: tl.constexpr):
    """Return the number of tokens of a split: `SPLIT`, or if that is 0, by the number of splits."""
    if SPLIT > 0:
        return SPLIT
    return tl.cdiv(tl.cdiv(end - begin, num_splits), KEYS) * KEYS


@triton.jit
def _with_sinks(most, total, sinks, heads, is_row):
    """Add each row's sink to its total weight; return the new greatest score and total."""
    sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    higher = tl.maximum(most, sink)
    return higher, total * tl.exp2(most - higher) + tl.exp2(sink - higher)


@triton.jit
def _read(addresses, is_seen, is_dim, IS_WHOLE: tl.constexpr, IS_PADDED: tl.constexpr):
    """Read keys or values; unseen tokens are read as 0; with `IS_WHOLE` there are none."""
    if IS_WHOLE and not IS_PADDED:
        return tl.load(addresses)
    if IS_WHOLE:
        return tl.load(addresses, mask=is_dim, other=0.0)
    return tl.load(addresses, mask=is_seen & is_dim, other=0.0)


@triton.jit
def _pages(table, first, end, KEYS: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """Read the page of each token of a round."""
    seen = first + tl.arange(0, KEYS)
    return tl.load(table + seen // PAGE_TOKENS, mask=seen < end, other=0)


@triton.jit
def _attend_round(
    most,
    total,
    summed,
    queries,
    pages,
    first,
    end,
    positions,
    first_seen,
    keys,
    values,
    key_strides_slot,
    value_strides_slot,
    scale,
    softcap,
    IS_WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the KEYS tokens from `first` on; with `IS_WHOLE` every row sees all of them."""
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    seen = first + tl.arange(0, KEYS)
    is_seen = seen < end
    slots = pages.to(tl.int64) * PAGE_TOKENS + seen % PAGE_TOKENS
    key = _read(
        keys + slots[None, :] * key_strides_slot + dims[:, None],
        is_seen[None, :],
        dims[:, None] < DIM,
        IS_WHOLE,
        DIM < BLOCK_DIM,
    )
    scores = tl.dot(queries, key, input_precision=PRECISION)
    # Scores are scaled by one factor only, together with the subtraction before exp2.
    factor = scale * LOG2E
    if HAS_SOFTCAP:
        scores = 2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0
        factor = softcap * LOG2E
    if not IS_WHOLE:
        visible = (seen[None, :] <= positions[:, None]) & (seen[None, :] >= first_seen[:, None])
        scores = tl.where(visible & is_seen[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * factor)
    reference = higher
    if not IS_WHOLE:
        # Rows that have seen no key yet, and padding rows, have no greatest score.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * factor - reference[:, None])
    kept = tl.exp2(most - reference)
    value = _read(
        values + slots[:, None] * value_strides_slot + value_dims[None, :],
        is_seen[:, None],
        value_dims[None, :] < VALUE_DIM,
        IS_WHOLE,
        VALUE_DIM < BLOCK_VALUE_DIM,
    )
    total = total * kept + tl.sum(weights, 1)
    summed = tl.dot(
        weights.to(value.dtype), value, summed * kept[:, None], input_precision=PRECISION
    )
    return higher, total, summed


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
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
    num_heads,
    query_strides_token,
    query_strides_head,
    key_strides_slot,
    key_strides_head,
    value_strides_slot,
    value_strides_head,
    scale,
    softcap,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
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
    """Attend a tile; write its result, or with `IS_SPLIT` the partial result of one split."""
    # The last tiles of a prompt see most keys: they start first, so that the launch does not end
    # with a few long programs.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
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
    is_row = (rows < TOKENS * GROUP) & (new < num_new)
    positions = past + new
    first_seen = _first_seen(positions, WINDOW, CHUNK)
    heads = kv_head * GROUP + rows % GROUP

    begin = _first_seen(past + first_new, WINDOW, CHUNK)
    end = past + tl.minimum(first_new + TOKENS, num_new)
    seen_by_all = _first_seen(end - 1, WINDOW, CHUNK)
    if IS_SPLIT:
        split_tokens = _split_tokens(begin, end, tl.num_programs(2), SPLIT, KEYS)
        begin = begin + split * split_tokens
        end = tl.minimum(end, begin + split_tokens)
        if begin >= end:
            return  # only longer parts of the launch have this split

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
    keys += kv_head * key_strides_head
    values += kv_head * value_strides_head
    table = tables + part.to(tl.int64) * table_stride
    # Rounds: first those whose keys every row sees, then those before and after them.
    num_rounds = tl.cdiv(end - begin, KEYS)
    before = tl.minimum(tl.cdiv(tl.maximum(seen_by_all - begin, 0), KEYS), num_rounds)
    whole = tl.maximum((tl.minimum(past + first_new + 1, end) - begin) // KEYS - before, 0)
    # Pages are read one round ahead, so that the loads of keys and values can start early.
    pages = _pages(table, begin + before * KEYS, end, KEYS, PAGE_TOKENS)
    for first in range(begin + before * KEYS, begin + (before + whole) * KEYS, KEYS):
        next_pages = _pages(table, first + KEYS, end, KEYS, PAGE_TOKENS)
        most, total, summed = _attend_round(
            most,
            total,
            summed,
            queries,
            pages,
            first,
            end,
            positions,
            first_seen,
            keys,
            values,
            key_strides_slot,
            value_strides_slot,
            scale,
            softcap,
            True,
            KEYS,
            DIM,
            BLOCK_DIM,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
            PAGE_TOKENS,
            HAS_SOFTCAP,
            PRECISION,
        )
        pages = next_pages
    for index in range(num_rounds - whole):
        first = begin + tl.where(index < before, index, index + whole) * KEYS
        most, total, summed = _attend_round(
            most,
            total,
            summed,
            queries,
            _pages(table, first, end, KEYS, PAGE_TOKENS),
            first,
            end,
            positions,
            first_seen,
            keys,
            values,
            key_strides_slot,
            value_strides_slot,
            scale,
            softcap,
            False,
            KEYS,
            DIM,
            BLOCK_DIM,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
            PAGE_TOKENS,
            HAS_SOFTCAP,
            PRECISION,
        )

    if HAS_SINKS and not IS_SPLIT:
        before = most
        most, total = _with_sinks(before, total, sinks, heads, is_row)
        summed = summed * tl.exp2(before - most)[:, None]
    # Padding rows, and rows that see no key of a split, have a total of 0.
    total = tl.where(total == 0.0, 1.0, total)
    answer = summed / total[:, None]
    row_of = tokens * num_heads + heads
    if IS_SPLIT:
        place = (tile * tl.num_programs(2) + split) * TOKENS
        row_of = (place + rows // GROUP).to(tl.int64) * num_heads + heads
        tl.store(sums + row_of, most + tl.log2(total), mask=is_row)
    tl.store(
        out + row_of[:, None] * VALUE_DIM + value_dims[None, :],
        answer.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def merge_splits(
    out,
    found,
    sums,
    sinks,
    starts,
    lengths,
    tiles,
    most_splits,
    num_heads,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the results of a tile's splits, for one of its tokens and one head."""
    tile = tl.program_id(0)
    place = tl.program_id(1)
    head = tl.program_id(2)
    part = tl.load(tiles + 2 * tile)
    first_new = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + part)
    num_new = tl.load(starts + part + 1) - start
    if first_new + place >= num_new:
        return  # the last tile has fewer tokens
    past = tl.load(lengths + part) - num_new
    begin = _first_seen(past + first_new, WINDOW, CHUNK)
    end = past + tl.minimum(first_new + TOKENS, num_new)
    num_splits = tl.cdiv(end - begin, _split_tokens(begin, end, most_splits, SPLIT, KEYS))

    dims = tl.arange(0, BLOCK_VALUE_DIM)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for split in range(num_splits):
        row = ((tile * most_splits + split) * TOKENS + place).to(tl.int64) * num_heads + head
        sum_here = tl.load(sums + row + tl.arange(0, 1))
        here = tl.load(found + row * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        higher = tl.maximum(most, sum_here)
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # no key was seen yet
        kept = tl.exp2(most - reference)
        weight = tl.exp2(sum_here - reference)
        total = total * kept + weight
        summed = summed * kept + here * weight
        most = higher
    if HAS_SINKS:
        before = most
        most, total = _with_sinks(before, total, sinks, head + tl.arange(0, 1), True)
        summed = summed * tl.exp2(before - most)
    token = (start + first_new + place).to(tl.int64)
    tl.store(
        out + (token * num_heads + head) * VALUE_DIM + dims,
        (summed / total).to(out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )
