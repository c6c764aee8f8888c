"""One run of the bench: its directories, its parts in order, and its end on Ctrl-C."""

import asyncio
import time
from dataclasses import replace

from kvd.bench import arena, control, filled_index, lookups, ssd
from kvd.bench.figures import Report
from kvd.bench.options import BenchOptions, fitted
from kvd.bench.workspace import Workspace, machine_facts, room_of, workspace
from shared.measuring.workspace import check_memory, run_until_signal


def run(options: BenchOptions) -> Report:
    """Measure the parts that the options name; takes minutes.

    All files and processes of the bench are removed at the end, even if it is interrupted.

    Raises:
        NoRoomError: the disk or the memory is too small for the scale.
        ChildFailedError: the bench's kvd does not work.
        OSError: the directory cannot be used.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    options = replace(options, scale=fitted(options.scale, *room_of(options.directory)))
    check_memory(
        needed_memory_bytes(options),
        "the bench",
        "stop other programs that use memory, or measure less with --quick",
    )
    with workspace(options.directory, needed_disk_bytes(options)) as work:
        return run_until_signal(lambda: _measure(options, work))


def needed_disk_bytes(options: BenchOptions) -> int:
    """Return the bytes of disk that all parts need; they are added up."""
    needed = 64 << 20
    if "ssd" in options.parts:
        needed += ssd.needed_bytes(options)
    if "encryption" in options.parts:
        needed += ssd.encryption_bytes(options)
    if "control" in options.parts or "restart" in options.parts:
        scale = options.scale
        needed += filled_index.needed_bytes(max(scale.session_counts), scale.blocks_per_session)
    return needed


def needed_memory_bytes(options: BenchOptions) -> int:
    """Return the bytes of memory for kvd, the bench and the largest part."""
    needed = 512 << 20
    if "arena" in options.parts:
        needed = max(needed, 4 * options.scale.arena_bytes)
    if "ssd" in options.parts:
        needed = max(needed, 4 * options.scale.ssd_max_bytes)
    if "encryption" in options.parts:
        needed = max(needed, 5 * options.scale.ssd_max_bytes)
    if "control" in options.parts:  # engines and kvds of all sizes at once
        needed = max(needed, 8192 * sum(options.scale.session_counts))
    return needed


async def _measure(options: BenchOptions, work: Workspace) -> Report:
    started = time.monotonic()
    report = Report(
        started_unix_s=time.time(),
        elapsed_s=0.0,
        command=options.command,
        scale=options.scale.name,
        machine=machine_facts(work.state),
    )
    indexes = filled_index.FilledIndexes(
        work.state, max(options.scale.session_counts), options.scale.blocks_per_session
    )
    if "arena" in options.parts:
        report = replace(report, arena=await arena.measure_arena(options, work))
    if "ssd" in options.parts:
        report = replace(report, ssd=await ssd.measure_ssd(options, work))
    if "encryption" in options.parts:
        report = replace(report, encryption=await ssd.measure_encryption(options, work))
    # This comes before control, which adds sessions to the indexes.
    if "restart" in options.parts or "control" in options.parts:
        report = replace(report, restart=await control.measure_restart(options, work, indexes))
    if "control" in options.parts:
        report = await _measure_control(options, work, indexes, report)
    if "queue" in options.parts:
        options.on_progress("an engine's queue")
        report = replace(report, queue=await asyncio.to_thread(lookups.measure_queues, options))
    return replace(report, elapsed_s=time.monotonic() - started)


async def _measure_control(
    options: BenchOptions, work: Workspace, indexes: filled_index.FilledIndexes, report: Report
) -> Report:
    state_dir = await indexes.state_dir(max(options.scale.session_counts))
    longest = await asyncio.to_thread(control.measure_loop_calls, options, indexes, state_dir)
    calls = await control.measure_calls(options, work, indexes)
    options.on_progress("control plane, the engine by itself")
    looked_up = await asyncio.to_thread(lookups.measure_lookups, options)
    _, middle, largest = options.scale.session_counts
    return replace(
        report,
        latencies=(*calls.latencies(), *looked_up.latencies()),
        loop_calls=longest,
        growths=(*calls.growths(middle, largest), *looked_up.growths(middle, largest)),
    )
