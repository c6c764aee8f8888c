"""The speed of an engine's stores to and loads from the arena, against memcpy.

One half of a pair is an engine's work: prepare, copy every slice between its own memory and the
leased slots, complete. The other half is the same copy between two pieces of private memory. The
copy alone is measured, too: it separates the cost of the memory from the cost of the calls.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from kvd.bench.figures import Comparison
from kvd.bench.filled_index import bench_key, token_ids_of
from kvd.bench.floor import BlockAt, Buffer, Copier
from kvd.bench.options import BenchOptions
from kvd.bench.workspace import KvdSizes, Workspace, attached_client, of_layouts, running_kvd
from shared.children.child_kvd import CALL_S, ChildKvd
from shared.children.child_process import ChildFailedError
from shared.kvd_client.arena_map import ArenaMap
from shared.kvd_client.client import KvdClient
from shared.measuring.statistics import Pair, Sample
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES

SPARE = 1.25  # size of the arena, relative to the session: no store waits for room

Half = Callable[[], Awaitable[None]]


async def measure_arena(options: BenchOptions, work: Workspace) -> tuple[Comparison, ...]:
    """Measure store and load, for each layout."""
    return await of_layouts(
        "arena", options, work, _measure_arena, num_threads=options.copy_threads
    )


async def _measure_arena(
    options: BenchOptions, work: Workspace, layout: KVLayout
) -> dict[str, list[Pair]]:
    num_blocks = max(1, options.scale.arena_bytes // layout.block_bytes)
    name = f"arena-{layout.slice_bytes(0)}"
    sizes = KvdSizes(
        dram_bytes=int(num_blocks * SPARE + 2) * layout.block_bytes,
        ssd_bytes=0,
        segment_bytes=256 << 20,
        io_threads=options.io_threads,
    )
    copier = Copier(options.copy_threads, layout.block_bytes, layout.slice_bytes(0))
    try:
        async with (
            running_kvd(work, name, sizes) as kvd,
            attached_client(kvd, layout) as client,
        ):
            engine = _CopyingEngine(kvd, client, copier, layout, num_blocks)
            return await _take_turns(engine, options.scale.arena_pairs)
    finally:
        copier.close()


async def _take_turns(engine: "_CopyingEngine", num_pairs: int) -> dict[str, list[Pair]]:
    pairs: dict[str, list[Pair]] = {}
    for turn in range(num_pairs + 1):
        kvd_first = turn % 2 == 0
        async with engine.new_session():
            store = await _pair(engine, engine.store, engine.floor_store, kvd_first=kvd_first)
            load = await _pair(engine, engine.load, engine.floor_load, kvd_first=kvd_first)
        if turn:  # the first one only warms up: it maps the arena's pages
            for name, (whole, copy_only) in (("store", store), ("load", load)):
                pairs.setdefault(name, []).append(whole)
                pairs.setdefault(f"{name}_copy", []).append(copy_only)
    return pairs


async def _pair(
    engine: "_CopyingEngine", with_kvd: Half, floor: Half, *, kvd_first: bool
) -> tuple[Pair, Pair]:
    """Time both halves of a pair: as a whole, and the copies in them."""
    halves = [with_kvd, floor] if kvd_first else [floor, with_kvd]
    timings = [await engine.timed(half) for half in halves]
    kvd, floor_timing = timings if kvd_first else reversed(timings)
    return Pair(kvd.whole, floor_timing.whole), Pair(kvd.copy, floor_timing.whole)


@dataclass(frozen=True)
class _Timing:
    """The times of one half of a pair, and of the copy in it."""

    whole: Sample
    copy: Sample


class _CopyingEngine:
    """Copies one session's blocks between its own memory and the arena, or other memory."""

    def __init__(
        self,
        kvd: ChildKvd,
        client: KvdClient,
        copier: Copier,
        layout: KVLayout,
        num_blocks: int,
    ) -> None:
        self._kvd = kvd
        self._client = client
        self._copier = copier
        self._layout = layout
        self._num_blocks = num_blocks
        self._own = Buffer(num_blocks, layout.block_bytes)
        self._other = Buffer(num_blocks, layout.block_bytes)
        self._seed = 0
        self._token_ids = b""
        self._touched: ArenaMap | None = None
        self._copy_s = 0.0

    @asynccontextmanager
    async def new_session(self) -> AsyncIterator[None]:
        """Begin a new session for store and load; drop it at the end."""
        self._seed += 1
        self._token_ids = token_ids_of(self._seed, self._num_blocks * self._layout.block_tokens)
        yield
        await self._kvd.flush(None)

    async def timed(self, half: Half) -> _Timing:
        """Time one half of a pair, once kvd is idle."""
        await self._kvd.until_quiet()
        started = time.perf_counter()
        await half()
        seconds = time.perf_counter() - started
        num_bytes = self._num_blocks * self._layout.block_bytes
        return _Timing(Sample(num_bytes, seconds), Sample(num_bytes, self._copy_s))

    async def store(self) -> None:
        """Store the session: prepare, copy, complete."""
        grant = await self._client.prepare_store(bench_key("arena"), self._token_ids, 0, CALL_S)
        self._expect(len(grant.blocks))
        slots = [block.slot_id for block in grant.blocks]
        self._touch(grant.arena)
        await self._copy(_slots_of(grant.arena, slots), self._own.block)
        await self._client.complete_store(grant, success=True)

    async def load(self) -> None:
        """Load the session: prepare, copy, complete."""
        grant = await self._client.prepare_load(bench_key("arena"), self._token_ids, 0, CALL_S)
        self._expect(len(grant.spans))
        slots = [span.slot_id for span in grant.spans]
        await self._copy(self._own.block, _slots_of(grant.arena, slots))
        await self._client.complete_load(grant)

    async def floor_store(self) -> None:
        """Copy as many bytes as a store."""
        await self._copy(self._other.block, self._own.block)

    async def floor_load(self) -> None:
        """Copy as many bytes as a load."""
        await self._copy(self._own.block, self._other.block)

    async def _copy(self, target: BlockAt, source: BlockAt) -> None:
        started = time.perf_counter()
        await self._copier.copy(target, source, self._num_blocks)
        self._copy_s = time.perf_counter() - started

    def _touch(self, arena: ArenaMap) -> None:
        """Map every page of the arena, once, as an engine does before it serves."""
        if self._touched is not arena:
            self._touched = arena
            for slot_id in range(arena.num_slots):
                np.frombuffer(arena.slot(slot_id), np.uint8)[::SECTOR_BYTES].max()

    def _expect(self, num_granted: int) -> None:
        if num_granted != self._num_blocks:
            raise ChildFailedError(
                f"kvd granted {num_granted} of {self._num_blocks} blocks",
                "this is a bug: report it",
            )


def _slots_of(arena: ArenaMap, slots: list[int]) -> BlockAt:
    return lambda index: arena.slot(slots[index])
