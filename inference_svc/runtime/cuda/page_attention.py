"""Page attention: attention over pages by Triton kernels, which support every kind of call.

torch's own kernels do not read pages, or only with a library that is built for one kind of GPU, and
none of them supports softcaps and sinks.

The sizes of tiles and splits depend on a part alone, never on the other parts: its result is the
same alone and in a batch, to the bit.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from inference_svc.runtime.attention.paged_attention import PageCall, PageStep
from inference_svc.runtime.cuda.kernels.page_attention import attend_tile, merge_splits

# Keys of a split for a part with one new token: 28K keys are 112 programs per key head.
SPLIT_TOKENS = 256
# Other parts are divided into splits until they make this many programs (a GPU has 100 to 160
# multiprocessors), or until a split has fewer than 512 keys.
PART_PROGRAMS = 256
FEWEST_SPLIT_TOKENS = 512
FOUND_BYTES = 64 << 20  # most bytes of the splits' results in one launch
MIN_ROWS = 16  # fewest rows of a matrix product
TILE_BYTES = 32 << 10  # bytes of the keys and values of one round


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
) -> Tensor:
    """Attend each part's new tokens to their own part up to themselves; see `PageKernel`."""
    # Triton launches kernels on the thread's current device.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        return _attend_pages(query, keys, values, step, call)


def _attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
) -> Tensor:
    """Launch once for all parts that are divided alike, and once for those with one new token."""
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
    """The size of a program's tile.

    Attributes:
        rows: number of query rows: all heads of a group for each of some tokens.
        keys: number of keys that are read in one round.
        warps: number of warps, of 32 threads each.
        stages: number of rounds whose keys and values are in shared memory or being copied there.
    """

    rows: int
    keys: int
    warps: int
    stages: int


class _Launch(NamedTuple):
    """The parameters of one launch.

    Attributes:
        shape: the size of each tile.
        tokens: most new tokens of a tile.
        num_splits: most splits of the tokens that a tile sees; their results are merged.
        split_tokens: number of tokens of a split; 0: as many as give `num_splits` splits.
    """

    shape: TileShape
    tokens: int
    num_splits: int
    split_tokens: int


def tile_shape(
    group: int, dim: int, value_dim: int, item_bytes: int, *, is_wide: bool
) -> TileShape:
    """Choose the tiles of parts with several new tokens: the largest that spill no registers.

    Args:
        group: number of query heads per key head.
        dim: number of elements of a key.
        value_dim: number of elements of a value.
        item_bytes: bytes of an element.
        is_wide: whether the GPU multiplies operands in shared memory, of which it has 227 KiB, so
            that they take no registers.
    """
    width = _padded_dim(dim) + _padded_dim(value_dim)
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
    """Return the tile of a part: half the rows and warps, if its new tokens fit into these."""
    rows = shape.rows // 2
    if rows < 64 or num_new * group > rows:
        return shape
    return shape._replace(rows=rows, warps=shape.warps // 2)


def num_part_splits(num_programs: int, seen: int) -> int:
    """Choose the number of splits of a part with several new tokens: 1, 2, 4, ...

    Args:
        num_programs: number of the part's programs without splits.
        seen: number of tokens that its new tokens see.
    """
    num_splits = 1
    while (
        num_programs * num_splits < PART_PROGRAMS and seen >= 2 * num_splits * FEWEST_SPLIT_TOKENS
    ):
        num_splits *= 2
    return num_splits


def _takes_wide_tiles(device: torch.device) -> bool:
    """Whether the GPU is of the generation of H100 or B200; the interpreter counts as one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in {9, 10}


def _padded_dim(dim: int) -> int:
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
    """Attend tiles and merge their splits; for as many at once as have room for the results."""
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
    """Launch `attend_tile` over all tokens that tiles see, or with `sums` over each split."""
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
        BLOCK_DIM=_padded_dim(dim),
        VALUE_DIM=value_dim,
        BLOCK_VALUE_DIM=_padded_dim(value_dim),
        WINDOW=call.window,
        CHUNK=call.chunk,
        HAS_SOFTCAP=call.softcap > 0,
        HAS_SINKS=call.sinks is not None,
        IS_SPLIT=sums is not None,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_warps=launch.shape.warps,
        num_stages=launch.shape.stages,
    )
