"""Attention over pages by kernels of Triton, which take every kind of call.

torch's own kernels read no pages, or only with a library that is built for one kind of GPU, and
none of them takes softcaps and sinks.

Sizes of tiles and splits follow from a part alone, never from those beside it: an answer is the
same alone and in a batch, to the bit.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from inference_svc.runtime.attention.paged_attention import PageCall, PageStep
from inference_svc.runtime.cuda.kernels.page_attention import attend_tile, merge_splits

# Keys of a split when one token attends: 28K of them are 112 programs for each key head.
SPLIT_TOKENS = 256
MIN_ROWS = 16  # fewest rows of a matrix product
TILE_BYTES = 32 << 10  # keys and values of one round: two rounds are in flight, in shared memory


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
) -> Tensor:
    """Let each part's new tokens see their part up to themselves; see `PageKernel`."""
    # Kernels are launched on the thread's current device.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        return _attend_pages(query, keys, values, step, call)


def _attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
) -> Tensor:
    """Attend parts of several tokens in one launch, and those of one in another."""
    num_tokens, num_heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    group = num_heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    out = query.new_empty(num_tokens, num_heads, value_dim)
    shape = tile_shape(group, dim, value_dim, query.element_size())
    tiles = step.tiles(shape.rows // group)
    if tiles is not None:
        _attend_tiles(out, None, query, keys, values, step, call, tiles, shape, 1)
    single = step.single_tokens()
    if single is not None:
        seen = min([step.most_length, *(bound for bound in (call.window, call.chunk) if bound)])
        sizes = (triton.cdiv(seen, SPLIT_TOKENS), num_tokens, num_heads)
        found = query.new_empty(*sizes, value_dim, dtype=torch.float32)
        sums = query.new_empty(sizes, dtype=torch.float32)
        rows = max(MIN_ROWS, triton.next_power_of_2(group))
        shape = shape._replace(rows=rows, warps=4)
        _attend_tiles(found, sums, query, keys, values, step, call, single, shape, sizes[0])
        merge_splits[(len(single), num_heads)](
            out,
            found,
            sums,
            call.sinks,
            step.starts,
            step.lengths,
            single,
            num_tokens,
            num_heads,
            SPLIT=SPLIT_TOKENS,
            VALUE_DIM=value_dim,
            BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
            WINDOW=call.window,
            CHUNK=call.chunk,
            HAS_SINKS=call.sinks is not None,
            num_warps=1,
        )
    return out


class TileShape(NamedTuple):
    """How much one program holds.

    Attributes:
        rows: query rows: the heads of a group for each of some tokens.
        keys: tokens that are read in one round.
        warps: of 32 threads.
    """

    rows: int
    keys: int
    warps: int


def tile_shape(group: int, dim: int, value_dim: int, item_bytes: int) -> TileShape:
    """Choose the tiles of parts of several tokens: the largest that spill no registers.

    Args:
        group: query heads of a key head.
        dim: elements of a key.
        value_dim: elements of a value.
        item_bytes: of an element.
    """
    width = _padded(dim) + _padded(value_dim)
    rows = 64 if item_bytes == 2 else 32 if width <= 256 else 16
    fitting = TILE_BYTES // (width * item_bytes)
    keys = next((keys for keys in (64, 32) if keys <= fitting), 16)
    warps = 4 if width * item_bytes <= 256 else 8
    return TileShape(max(rows, triton.next_power_of_2(group)), keys, warps)


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _attend_tiles(
    out: Tensor,
    sums: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PageStep,
    call: PageCall,
    tiles: Tensor,
    shape: TileShape,
    num_splits: int,
) -> None:
    """Attend some tiles to all they see, or with `sums` to each split of it; see the kernel."""
    num_tokens, num_heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    attend_tile[(len(tiles), kv_heads, num_splits)](
        out,
        sums,
        query,
        keys,
        values,
        call.sinks,
        step.tables,
        step.tables.stride(0),
        step.starts,
        step.lengths,
        tiles,
        num_tokens,
        num_heads,
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        call.scale,
        call.softcap,
        step.page_tokens,
        GROUP=num_heads // kv_heads,
        ROWS=shape.rows,
        KEYS=shape.keys,
        SPLIT=SPLIT_TOKENS,
        DIM=dim,
        BLOCK_DIM=_padded(dim),
        VALUE_DIM=value_dim,
        BLOCK_VALUE_DIM=_padded(value_dim),
        WINDOW=call.window,
        CHUNK=call.chunk,
        HAS_SOFTCAP=call.softcap > 0,
        HAS_SINKS=call.sinks is not None,
        IS_SPLIT=sums is not None,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_warps=shape.warps,
        num_stages=2,
    )
