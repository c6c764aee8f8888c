"""The speed of kvd's writes to and reads from SSD, against the same I/O without kvd.

A pass moves one session. *Write*: the session is in the arena already. The time is measured from
`complete_store` until kvd reports nothing dirty: hashed, written, synced, and in the index. *Read*:
two sessions take turns in an arena that has room for one, so that each load finds its blocks on SSD
only. The time is that of `prepare_load`: read, verified, in the arena. The floor is
kvd/bench/floor.py, with memory of the arena's kind, and again with private huge pages: this shows
what reserved huge pages would give kvd. All extents are written once before anything is timed,
because new files are slow.

The cost of encryption is measured with two kvds with equal settings, one of them with a key, that
take turns on the same disk. The ratio is the encrypted kvd's speed divided by the plain one's:
below 1 where the disk is faster than the ciphers of all threads together.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from kvd.bench.figures import Comparison
from kvd.bench.filled_index import bench_key, token_ids_of
from kvd.bench.floor import BlockAt, Buffer, Copier, DirectFloor
from kvd.bench.options import BenchOptions
from kvd.bench.workspace import KvdSizes, Workspace, attached_client, of_layouts, running_kvd
from kvd.core.records.extent_shape import ExtentShape
from shared.children.child_kvd import CALL_S, ChildKvd
from shared.children.child_process import ChildFailedError
from shared.encryption.key_file import new_key, write_key
from shared.kvd_client.client import KvdClient
from shared.measuring.statistics import Pair, Sample
from shared.types.kv_layout import KVLayout

SEGMENT_BYTES = 256 << 20  # kvd's default
PROBE_BYTES = 64 << 20  # written to estimate the disk's speed
MIN_BLOCKS = 4
SPARE_BLOCKS = 2  # of the arena, beside one session
SESSIONS_KEPT = 3  # on SSD: two that are read in turn, and one that is written


async def measure_ssd(options: BenchOptions, work: Workspace) -> tuple[Comparison, ...]:
    """Measure writes and reads, for each layout."""
    return await of_layouts("ssd", options, work, _measure_ssd)


async def measure_encryption(options: BenchOptions, work: Workspace) -> tuple[Comparison, ...]:
    """Measure writes and reads with a key against a kvd without one, for each layout."""
    return await of_layouts("encryption", options, work, _measure_encryption)


def needed_bytes(options: BenchOptions) -> int:
    """Return the disk space of kvd's sessions and the floor's."""
    return (SESSIONS_KEPT + 1) * options.scale.ssd_max_bytes + 2 * SEGMENT_BYTES


def encryption_bytes(options: BenchOptions) -> int:
    """Return the disk space of two kvds' sessions."""
    return (2 * SESSIONS_KEPT + 1) * options.scale.ssd_max_bytes + (1 << 30)


async def _measure_ssd(
    options: BenchOptions, work: Workspace, layout: KVLayout
) -> dict[str, list[Pair]]:
    name = f"ssd-{layout.slice_bytes(0)}"
    floor_dir = work.state / f"{name}-floor"
    num_blocks = await asyncio.to_thread(blocks_per_pass, options, layout, floor_dir)
    shape = ExtentShape(layout)
    sizes = sizes_of(options, layout, num_blocks)
    memory = Buffer(num_blocks, layout.block_bytes, "shared")
    huge = Buffer(num_blocks, layout.block_bytes, "huge")
    floor = _floor_of(floor_dir, layout, num_blocks, options.io_threads)
    copier = Copier(options.copy_threads, layout.block_bytes, layout.block_bytes)
    try:
        await asyncio.to_thread(floor.open)
        async with (
            running_kvd(work, name, sizes) as kvd,
            attached_client(kvd, layout) as client,
        ):
            disk = KvdDisk(kvd, client, copier, memory, layout, num_blocks)
            turns = _Turns(disk, floor, memory, huge, num_blocks * shape.full_bytes)
            await turns.take(options.scale.ssd_pairs)
    finally:
        copier.close()
        await asyncio.to_thread(floor.close)
    return turns.pairs


async def _measure_encryption(
    options: BenchOptions, work: Workspace, layout: KVLayout
) -> dict[str, list[Pair]]:
    name = f"enc-{layout.slice_bytes(0)}"
    key_file = work.state / f"{name}.key"
    write_key(key_file, new_key())
    num_blocks = await asyncio.to_thread(
        blocks_per_pass, options, layout, work.state / f"{name}-probe"
    )
    plain = sizes_of(options, layout, num_blocks)
    memory = Buffer(num_blocks, layout.block_bytes, "shared")
    copier = Copier(options.copy_threads, layout.block_bytes, layout.block_bytes)
    pairs: dict[str, list[Pair]] = {"write": [], "read": []}
    try:
        async with AsyncExitStack() as stack:
            disks = []
            for kind, sizes in (("sealed", replace(plain, key_file=key_file)), ("plain", plain)):
                kvd = await stack.enter_async_context(running_kvd(work, f"{name}-{kind}", sizes))
                client = await stack.enter_async_context(attached_client(kvd, layout))
                disks.append(KvdDisk(kvd, client, copier, memory, layout, num_blocks))
            for disk in disks:
                for session in ("a", "b", "w"):
                    await disk.write(session)
            for turn in range(options.scale.ssd_pairs):
                pairs["write"].append(await _pair(disks, turn, "write", "w"))
                pairs["read"].append(await _pair(disks, turn, "read", "ab"[turn % 2]))
    finally:
        copier.close()
    return pairs


async def _pair(disks: list["KvdDisk"], turn: int, operation: str, session: str) -> Pair:
    """Measure both kvds, in alternating order."""
    samples = {}
    for which in (0, 1) if turn % 2 else (1, 0):
        disk = disks[which]
        move = disk.write if operation == "write" else disk.read
        samples[which] = await move(session)
    return Pair(samples[0], samples[1])


class _Turns:
    """The interleaved measurements of one layout: kvd, the floor, and the floor in huge pages."""

    def __init__(
        self, disk: "KvdDisk", floor: DirectFloor, memory: Buffer, huge: Buffer, num_bytes: int
    ) -> None:
        self.pairs: dict[str, list[Pair]] = {}
        self._disk = disk
        self._floor = floor
        self._memory = memory
        self._huge = huge
        self._num_bytes = num_bytes

    async def take(self, num_turns: int) -> None:
        """Write everything once, then measure."""
        await self._move(self._floor.write, self._memory)
        for name in ("a", "b", "w"):
            await self._disk.write(name)
        for turn in range(num_turns):
            await self._take_turn("write", turn, self._disk.write, "w", self._floor.write)
            name = "ab"[turn % 2]
            await self._take_turn("read", turn, self._disk.read, name, self._floor.read)

    async def _take_turn(
        self,
        operation: str,
        turn: int,
        with_kvd: Callable[[str], Awaitable[Sample]],
        session: str,
        alone: Callable[[BlockAt], None],
    ) -> None:
        """Measure kvd and both floors, each turn in another order."""
        found: dict[int, Sample] = {}
        for step in range(3):
            which = (turn + step) % 3
            if which == 0:
                found[which] = await with_kvd(session)
            else:
                found[which] = await self._move(alone, (self._memory, self._huge)[which - 1])
        self.pairs.setdefault(operation, []).append(Pair(found[0], found[1]))
        self.pairs.setdefault(f"{operation}_huge", []).append(Pair(found[0], found[2]))

    async def _move(self, move: Callable[[BlockAt], None], memory: Buffer) -> Sample:
        await self._disk.kvd.until_quiet()
        return await asyncio.to_thread(_timed, move, memory, self._num_bytes)


class KvdDisk:
    """Writes and reads sessions of one pass each, through kvd."""

    def __init__(
        self,
        kvd: ChildKvd,
        client: KvdClient,
        copier: Copier,
        memory: Buffer,
        layout: KVLayout,
        num_blocks: int,
    ) -> None:
        self.kvd = kvd
        self._client = client
        self._copier = copier
        self._memory = memory
        self._num_blocks = num_blocks
        self._num_tokens = num_blocks * layout.block_tokens
        self._extent_bytes = ExtentShape(layout).full_bytes
        self._stored: dict[str, int] = {}  # session → seed of its tokens
        self._seed = 0

    async def write(self, name: str) -> Sample:
        """Store a session anew; timed until it is durable."""
        key = bench_key(name)
        if name in self._stored:
            await self.kvd.flush(key)
        self._seed += 1
        self._stored[name] = self._seed
        await self.kvd.until_quiet()
        token_ids = token_ids_of(self._seed, self._num_tokens)
        grant = await self._client.prepare_store(key, token_ids, 0, CALL_S)
        if len(grant.blocks) != self._num_blocks:
            raise ChildFailedError(
                f"kvd granted {len(grant.blocks)} of {self._num_blocks} blocks",
                "this is a bug: report it",
            )
        slots = [block.slot_id for block in grant.blocks]
        arena = grant.arena
        await self._copier.copy(
            lambda index: arena.slot(slots[index]), self._memory.block, self._num_blocks
        )
        started = time.perf_counter()
        await self._client.complete_store(grant, success=True)
        await self.kvd.until_clean()
        seconds = time.perf_counter() - started
        return Sample(self._num_blocks * self._extent_bytes, seconds)

    async def read(self, name: str) -> Sample:
        """Load a session; timed until it is in the arena. What was there already does not count."""
        await self.kvd.until_quiet()
        token_ids = token_ids_of(self._stored[name], self._num_tokens)
        end, seconds, num_read, more = 0, 0.0, 0, True
        while more:
            started = time.perf_counter()
            grant = await self._client.prepare_load(bench_key(name), token_ids, end, CALL_S)
            seconds += time.perf_counter() - started
            num_read += sum(span.tier == "ssd" for span in grant.spans)
            await self._client.complete_load(grant)
            end, more = grant.end_token, grant.more
        if end != self._num_tokens or num_read < self._num_blocks // 2:
            raise ChildFailedError(
                f"kvd read {num_read} of {self._num_blocks} blocks from SSD ({grant.miss_reason})",
                "this is a bug: report it",
            )
        return Sample(num_read * self._extent_bytes, seconds)


def sizes_of(options: BenchOptions, layout: KVLayout, num_blocks: int) -> KvdSizes:
    """Return a kvd whose arena holds one session of a pass, and its SSD all of them."""
    return KvdSizes(
        dram_bytes=(num_blocks + SPARE_BLOCKS) * layout.block_bytes,
        ssd_bytes=SESSIONS_KEPT * num_blocks * ExtentShape(layout).full_bytes + 2 * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
        io_threads=options.io_threads,
    )


def blocks_per_pass(options: BenchOptions, layout: KVLayout, directory: Path) -> int:
    """Count the blocks that the disk moves in the time of a pass, by the floor's second writing."""
    shape = ExtentShape(layout)
    probe_blocks = max(MIN_BLOCKS, PROBE_BYTES // layout.block_bytes)
    memory = Buffer(probe_blocks, layout.block_bytes, "shared")
    probe = _floor_of(directory, layout, probe_blocks, options.io_threads)
    try:
        probe.open()
        _timed(probe.write, memory, 1)
        speed = _timed(probe.write, memory, probe_blocks * shape.full_bytes).bytes_per_s
    finally:
        probe.close()
    pass_bytes = min(options.scale.ssd_max_bytes, speed * options.scale.ssd_pass_s)
    return max(MIN_BLOCKS, int(pass_bytes) // shape.full_bytes)


def _floor_of(directory: Path, layout: KVLayout, num_blocks: int, num_threads: int) -> DirectFloor:
    return DirectFloor(
        directory,
        header_bytes=ExtentShape(layout).header_bytes,
        block_bytes=layout.block_bytes,
        num_extents=num_blocks,
        segment_bytes=SEGMENT_BYTES,
        num_threads=num_threads,
    )


def _timed(move: Callable[[BlockAt], None], memory: Buffer, num_bytes: int) -> Sample:
    started = time.perf_counter()
    move(memory.block)
    return Sample(num_bytes, time.perf_counter() - started)
