"""A report as a JSON document, and as tables for people. Pure.

The document is the Report of figures.py, field by field, with `schema` before it and `goals`
(goals.py) behind it. Sizes are bytes, durations seconds unless the name ends in `_us`; a part that
was not run is null.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvd.bench.figures import (
    SCHEMA,
    Comparison,
    Growth,
    Latency,
    LoopCalls,
    QueueCosts,
    Report,
    Restart,
)
from kvd.bench.goals import goals_of
from shared.measuring.statistics import Spread
from shared.terminal.tables import Column, facts, fitted
from shared.types.units import format_bytes, format_duration

_COMPARISON = (
    Column("operation"),
    Column("slice", is_number=True),
    Column("pass", is_number=True, rank=2),
    Column("threads", is_number=True),
    Column("kvd", is_number=True),
    Column("floor", is_number=True),
    Column("kvd / floor", is_number=True),
    Column("quartiles", is_number=True, rank=1),
)
_LATENCY = (
    Column("call", may_be_cut=True, least=20),
    Column("level"),
    Column("sessions", is_number=True),
    Column("calls", is_number=True, rank=1),
    Column("p50", is_number=True),
    Column("p99", is_number=True),
)
_GROWTH = (
    Column("call", may_be_cut=True, least=20),
    Column("level"),
    Column("from", is_number=True),
    Column("to sessions", is_number=True),
    Column("median", is_number=True),
    Column("quartiles", is_number=True, rank=1),
)
_QUEUE = (
    Column("told"),
    Column("median", is_number=True),
    Column("quartiles, ms", is_number=True, rank=1),
)
_LOOP_CALLS = (Column("call"), Column("processor time", is_number=True))
_GOALS = (
    Column("what", may_be_cut=True, least=30),
    Column("goal", is_number=True),
    Column("measured", is_number=True),
    Column(""),
)


def as_document(report: Report) -> dict[str, Any]:
    """Plain values for json.dumps."""
    return {
        "schema": SCHEMA,
        **asdict(report),
        "goals": [asdict(goal) for goal in goals_of(report)],
    }


def tables(report: Report, width: int) -> Iterator[Table]:
    """What was run, one table a part, for a terminal of so many columns."""
    yield facts(_machine_facts(report), width)
    for title, found in (
        ("arena: through leases, against memcpy", report.arena),
        ("ssd: through kvd, against direct I/O", report.ssd),
        ("encryption: kvd with a key, against kvd without", report.encryption),
    ):
        if found is not None:
            yield fitted(_COMPARISON, _comparisons(found), width, title)
    if report.latencies is not None:
        yield fitted(_LATENCY, _latencies(report.latencies), width, "control plane")
    if report.growths is not None:
        yield fitted(_GROWTH, _growths(report.growths), width, "growth of the median")
    if (queue := report.queue) is not None:
        title = f"queue of {queue.num_jobs:,} jobs, {queue.policy}"
        yield fitted(_QUEUE, list(_queue_rows(queue)), width, title)
    if report.restart is not None:
        yield facts(_restart_facts(report.restart), width, "restart")
    if (calls := report.loop_calls) is not None:
        title = (
            f"longest calls, {calls.num_sessions:,} sessions of {calls.blocks_per_session} blocks, "
            f"{calls.policy}"
        )
        yield fitted(_LOOP_CALLS, list(_loop_calls(calls)), width, title)
    yield fitted(_GOALS, list(_goals(report)), width, "goals")


def _machine_facts(report: Report) -> Iterator[tuple[str, str]]:
    machine = report.machine
    yield "cpu", f"{machine.cpu}, {machine.cpus} usable"
    yield "load before", f"{machine.load_average:.2f}"
    yield "memory", format_bytes(machine.memory_bytes)
    yield "private huge pages", machine.huge_pages
    yield "shared huge pages", machine.shared_huge_pages
    yield "reserved huge pages", str(machine.reserved_huge_pages)
    yield "kernel", machine.kernel
    yield "disk", f"{machine.filesystem} on {machine.device}, {_direct(machine.direct_io)}"
    yield "kvd", f"{machine.kvd}, Python {machine.python}"
    yield "took", f"{format_duration(report.elapsed_s)} ({report.scale})"


def _direct(is_direct: bool) -> str:
    return "direct I/O" if is_direct else "NO direct I/O: disk figures are the page cache's"


def _comparisons(found: Sequence[Comparison]) -> list[tuple[str, ...]]:
    return [
        (
            entry.operation,
            format_bytes(entry.slice_bytes),
            format_bytes(entry.pass_bytes),
            str(entry.num_threads),
            f"{format_bytes(int(entry.kvd_bytes_per_s))}/s",
            f"{format_bytes(int(entry.floor_bytes_per_s))}/s",
            f"{entry.ratio.median:.2f}",
            _quartiles(entry.ratio),
        )
        for entry in found
    ]


def _latencies(found: Sequence[Latency]) -> list[tuple[str, ...]]:
    return [
        (
            entry.operation,
            entry.level,
            f"{entry.num_sessions:,}",
            f"{entry.num_calls:,}",
            f"{entry.p50_us:,.0f} us",
            f"{entry.p99_us:,.0f} us",
        )
        for entry in found
    ]


def _growths(found: Sequence[Growth]) -> list[tuple[str, ...]]:
    return [
        (
            entry.operation,
            entry.level,
            f"{entry.from_sessions:,}",
            f"{entry.to_sessions:,}",
            f"x {entry.ratio.median:.2f}",
            _quartiles(entry.ratio),
        )
        for entry in found
    ]


def _queue_rows(found: QueueCosts) -> Iterator[tuple[str, ...]]:
    for what, seconds in (("all at once", found.full_s), ("a change", found.change_s)):
        low, median, high = (value * 1e3 for value in (seconds.low, seconds.median, seconds.high))
        yield what, f"{median:.2f} ms", f"{low:.2f} - {high:.2f}"


def _restart_facts(found: Restart) -> Iterator[tuple[str, str]]:
    yield "sessions", f"{found.num_restored:,} restored of {found.num_sessions:,}"
    yield "index", format_bytes(found.index_bytes)
    yield "exec to serving", f"{found.ready_s.median:.2f} s"
    yield "processor time of it", f"{found.ready_cpu_s.median:.2f} s"
    yield "with no sessions", f"{found.empty_ready_s.median:.2f} s"
    yield "resident memory", format_bytes(found.rss_bytes)
    yield "with no sessions", format_bytes(found.empty_rss_bytes)
    yield "per idle session", f"{found.rss_per_session_bytes:,.0f} B"
    yield "at the most", f"{found.peak_rss_per_session_bytes:,.0f} B"


def _loop_calls(found: LoopCalls) -> Iterator[tuple[str, ...]]:
    yield "restoring", f"{found.restore_cpu_s:.2f} s"
    for what, took_ms in (
        ("first attach", found.attach_ms),
        ("timer after it", found.look_ms),
        ("store into a full tier", found.store_ms),
        ("reload with a first quota", found.reload_ms),
        ("timer when all expire", found.expire_ms),
    ):
        yield what, f"{took_ms:.2f} ms"


def _goals(report: Report) -> Iterator[tuple[str, ...]]:
    for goal in goals_of(report):
        yield goal.what, goal.bound, f"{goal.measured:.2f}", "met" if goal.met else "MISSED"


def _quartiles(spread: Spread) -> str:
    return f"{spread.low:.2f} - {spread.high:.2f}"
