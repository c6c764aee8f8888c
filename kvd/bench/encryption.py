"""What encryption costs: kvd with a key against kvd without, writing to and reading from SSD.

Two daemons with equal settings, on the same disk, take turns; each pass is one of kvd/bench/ssd.py.
The ratio is the encrypted one's speed by the plain one's: below 1 where the disk is faster than the
ciphers of all threads together.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from kvd.bench.buffers import Buffer
from kvd.bench.copying import Copier
from kvd.bench.figures import Comparison, comparison
from kvd.bench.options import BenchOptions
from kvd.bench.process import attached_client, running_kvd
from kvd.bench.ssd import SESSIONS_KEPT, KvdDisk, blocks_per_pass, sizes_of
from kvd.bench.workspace import Workspace
from kvd.core.records.extent_shape import ExtentShape
from kvd.encryption.key_file import new_master_key, write_master_key
from shared.measuring.statistics import Pair
from shared.types.kv_layout import KVLayout


async def measure_encryption(options: BenchOptions, work: Workspace) -> tuple[Comparison, ...]:
    """Write and read, for each layout."""
    found: list[Comparison] = []
    for layout in options.scale.layouts:
        options.on_progress(f"encryption, slices of {layout.slice_bytes(0) >> 10} KiB")
        found += await _measure_layout(options, work, layout)
    return tuple(found)


def needed_bytes(options: BenchOptions) -> int:
    """What all of it takes on disk: the sessions of two kvds."""
    return (2 * SESSIONS_KEPT + 1) * options.scale.ssd_max_bytes + (1 << 30)


async def _measure_layout(
    options: BenchOptions, work: Workspace, layout: KVLayout
) -> list[Comparison]:
    name = f"enc-{layout.slice_bytes(0)}"
    key_file = work.state / f"{name}.key"
    write_master_key(key_file, new_master_key())
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
    return [
        comparison(
            operation,
            found,
            slice_bytes=layout.slice_bytes(0),
            io_bytes=ExtentShape(layout).full_bytes,
            num_threads=options.io_threads,
        )
        for operation, found in pairs.items()
    ]


async def _pair(disks: list[KvdDisk], turn: int, operation: str, session: str) -> Pair:
    """Each of the two, beginning with the other one every time."""
    samples = {}
    for which in (0, 1) if turn % 2 else (1, 0):
        disk = disks[which]
        move = disk.write if operation == "write" else disk.read
        samples[which] = await move(session)
    return Pair(samples[0], samples[1])
