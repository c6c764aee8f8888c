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
# Other parts are divided into as many splits as make this many programs (a GPU has 100 to 160
# multiprocessors), each of 512 keys at least.
PART_PROGRAMS = 256
FEWEST_SPLIT_TOKENS = 512
FOUND_BYTES = 64 << 20  # what splits of one launch find, at most
MIN_ROWS = 16  # fewest rows of a matrix product
TILE_BYTES = 32 << 10  # keys and values of one round


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
    """Attend parts that are divided alike in one launch, and those of one token in another."""
    num_tokens, num_heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    group = num_heads // kv_heads
    query = query if query.stride(2) == 1 else query.contiguous()
    out = query.new_empty(num_tokens, num_heads, value_dim)
    shape = tile_shape(
        group, dim, value_dim, query.element_size(), is_wide=_takes_wide_tiles(query.device)
    )
    bounds = [bound for bound in (call.window, call.chunk) if bound]
    alike: dict[tuple[TileShape, int], list[int]] = {}
    for part, num_new, length in step.several_tokens():
        part_shape = shape_of_part(shape, group, num_new)
        num_tiles = triton.cdiv(num_new, part_shape.rows // group)
        seen = min([length, *(bound + num_new for bound in bounds)])
        alike.setdefault((part_shape, num_part_splits(num_tiles * kv_heads, seen)), []).append(part)
    for (part_shape, num_splits), parts in alike.items():
        tokens = part_shape.rows // group
        tiles = step.tiles(tokens, tuple(parts))
        assert tiles is not None  # noqa: S101 - each has several tokens
        launch = _Launch(part_shape, tokens, num_splits, 0)
        _attend_tiles(out, query, keys, values, step, call, tiles, launch)
    single = step.single_tokens()
    if single is not None:
        num_splits = triton.cdiv(min([step.most_length, *bounds]), SPLIT_TOKENS)
        rows = max(MIN_ROWS, triton.next_power_of_2(group))
        launch = _Launch(shape._replace(rows=rows, warps=4, stages=2), 1, num_splits, SPLIT_TOKENS)
        _attend_tiles(out, query, keys, values, step, call, single, launch)
    return out


class TileShape(NamedTuple):
    """How much one program holds.

    Attributes:
        rows: query rows: the heads of a group for each of some tokens.
        keys: tokens that are read in one round.
        warps: of 32 threads.
        stages: rounds whose keys and values are in shared memory or on their way there.
    """

    rows: int
    keys: int
    warps: int
    stages: int


class _Launch(NamedTuple):
    """How tiles are computed.

    Attributes:
        shape: of each tile.
        tokens: most new tokens of a tile.
        num_splits: of what a tile sees, at most; what they find is merged.
        split_tokens: of each split; 0: what makes so many splits; see the kernel.
    """

    shape: TileShape
    tokens: int
    num_splits: int
    split_tokens: int


def tile_shape(
    group: int, dim: int, value_dim: int, item_bytes: int, *, is_wide: bool
) -> TileShape:
    """Choose the tiles of parts of several tokens: the largest that spill no registers.

    Args:
        group: query heads of a key head.
        dim: elements of a key.
        value_dim: elements of a value.
        item_bytes: of an element.
        is_wide: whether the GPU multiplies what is in shared memory, of which it has 227 KiB:
            operands take no registers then.
    """
    width = _padded(dim) + _padded(value_dim)
    fitting = TILE_BYTES // (width * item_bytes)
    keys = next((keys for keys in (64, 32) if keys <= fitting), 16)
    if item_bytes > 2:
        rows, warps, stages = 32 if width <= 256 else 16, 4 if width <= 64 else 8, 2
    elif width <= 256:
        rows, warps, stages = 128, 8, 3
        keys = keys if is_wide or width <= 128 else 32
    else:
        rows, warps, stages = 128 if is_wide and width <= 512 else 64, 8, 2
    return TileShape(max(rows, triton.next_power_of_2(group)), keys, warps, stages)


def shape_of_part(shape: TileShape, group: int, num_new: int) -> TileShape:
    """Take half a tile, and half the warps, where a part's new tokens fill no more than that."""
    rows = shape.rows // 2
    if rows < 64 or num_new * group > rows:
        return shape
    return shape._replace(rows=rows, warps=shape.warps // 2)


def num_part_splits(num_programs: int, seen: int) -> int:
    """Choose how many splits a part of several tokens is divided into: 1, 2, 4, ...

    Args:
        num_programs: of the part, were it not divided.
        seen: tokens that its new tokens see.
    """
    num_splits = 1
    while (
        num_programs * num_splits < PART_PROGRAMS and seen >= 2 * num_splits * FEWEST_SPLIT_TOKENS
    ):
        num_splits *= 2
    return num_splits


def _takes_wide_tiles(device: torch.device) -> bool:
    """Tell whether it is H100, B200 or their like; the interpreter takes what these take."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in {9, 10}


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _attend_tiles(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PageStep,
    call: PageCall,
    tiles: Tensor,
    launch: _Launch,
) -> None:
    """Attend some tiles; those in splits for as many at once as have room for what is found."""
    num_heads, value_dim = out.shape[1:]
    if launch.num_splits == 1 and launch.split_tokens == 0:
        _launch_tiles(out, None, query, keys, values, step, call, tiles, launch)
        return
    found_bytes = launch.num_splits * launch.tokens * num_heads * value_dim * 4
    for some in torch.split(tiles, max(1, FOUND_BYTES // found_bytes)):
        sizes = (len(some), launch.num_splits, launch.tokens, num_heads)
        found = query.new_empty(*sizes, value_dim, dtype=torch.float32)
        sums = query.new_empty(sizes, dtype=torch.float32)
        _launch_tiles(found, sums, query, keys, values, step, call, some, launch)
        merge_splits[(len(some), launch.tokens, num_heads)](
            out,
            found,
            sums,
            call.sinks,
            step.starts,
            step.lengths,
            some,
            launch.num_splits,
            num_heads,
            TOKENS=launch.tokens,
            KEYS=launch.shape.keys,
            SPLIT=launch.split_tokens,
            VALUE_DIM=value_dim,
            BLOCK_VALUE_DIM=triton.next_power_of_2(value_dim),
            WINDOW=call.window,
            CHUNK=call.chunk,
            HAS_SINKS=call.sinks is not None,
            num_warps=1,
        )


def _launch_tiles(
    out: Tensor,
    sums: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PageStep,
    call: PageCall,
    tiles: Tensor,
    launch: _Launch,
) -> None:
    """Attend some tiles to all they see, or with `sums` to each split of it; see the kernel."""
    _, num_heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    attend_tile[(len(tiles), kv_heads, launch.num_splits)](
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
        num_heads,
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        call.scale,
        call.softcap,
        PAGE_TOKENS=step.page_tokens,
        GROUP=num_heads // kv_heads,
        TOKENS=launch.tokens,
        ROWS=launch.shape.rows,
        KEYS=launch.shape.keys,
        SPLIT=launch.split_tokens,
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
        num_warps=launch.shape.warps,
        num_stages=launch.shape.stages,
    )
