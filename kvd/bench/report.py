"""The bench's report as a JSON document, and as tables for people. Pure.

The document is the Report of figures.py, field by field, with `schema` before it and `goals` behind
it. Sizes are in bytes, durations in seconds unless the name ends in `_us`; a part that was not run
is null.

Goals are the project's promises about these results. They are shown, never asserted: a machine that
is busy with something else misses them.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvd.bench.figures import SCHEMA, LoopCalls, Report, Restart
from shared.measuring.report import number, quartiles, table_of, verdict
from shared.measuring.statistics import Spread
from shared.terminal.tables import Column, facts
from shared.types.units import format_bytes, format_duration

MIN_RATIO = 0.9
MAX_GROWTH = 1.3
MAX_QUEUE_MS = 20.0
MAX_READY_S = 5.0  # of processor time, plus MAX_READY_US for each session
MAX_READY_US = 10.0
MAX_SESSION_BYTES = 1024
MAX_PEAK = 1.3  # times the memory of the sessions at rest
MAX_CALL_MS = 50.0
BIG_SLICE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise, and whether a run meets it. `measured` is in the unit of the bound."""

    what: str
    bound: str
    measured: float
    met: bool


def goals_of(report: Report) -> tuple[Goal, ...]:
    """Return the goals of the parts that were run."""
    return (
        *_ratios_goals(report),
        *_growths_goals(report),
        *_queue_goals(report),
        *_restart_goals(report),
        *_loop_calls_goals(report),
    )


def _ratios_goals(report: Report) -> Iterator[Goal]:
    for found in report.arena or ():
        if found.slice_bytes >= BIG_SLICE_BYTES and found.operation in ("store", "load"):
            yield _at_least(f"arena {found.operation} / memcpy", found.ratio.median)
    for found in report.ssd or ():
        if found.operation not in ("write", "read"):
            continue
        what = f"ssd {found.operation} / direct I/O, {found.slice_bytes >> 10} KiB slices"
        yield _at_least(what, found.ratio.median)


def _growths_goals(report: Report) -> Iterator[Goal]:
    for found in report.growths or ():
        what = f"{found.level} {found.operation}, {found.from_sessions} to {found.to_sessions}"
        yield _at_most(f"{what} sessions", found.ratio.median, MAX_GROWTH)


def _queue_goals(report: Report) -> Iterator[Goal]:
    if report.queue is not None:
        num_jobs = report.queue.num_jobs
        what = f"queue of {num_jobs} requests reported at once, milliseconds of a processor"
        yield _at_most(what, report.queue.full_s.median * 1e3, MAX_QUEUE_MS)


def _restart_goals(report: Report) -> Iterator[Goal]:
    if report.restart is not None:
        found = report.restart
        sessions = f"{found.num_sessions} sessions"
        yield _at_most(
            f"restart with {sessions}, seconds of a processor",
            found.ready_cpu_s.median,
            MAX_READY_S + MAX_READY_US * found.num_sessions / 1e6,
        )
        yield _at_most(
            "memory of an idle session, bytes", found.rss_per_session_bytes, MAX_SESSION_BYTES
        )
        peak = found.peak_rss_per_session_bytes / found.rss_per_session_bytes
        yield _at_most("peak memory of a start, times that at rest", peak, MAX_PEAK)


def _loop_calls_goals(report: Report) -> Iterator[Goal]:
    found = report.loop_calls
    if found is not None:
        longest = max(
            found.attach_ms, found.look_ms, found.store_ms, found.reload_ms, found.expire_ms
        )
        what = f"longest call with {found.num_sessions} sessions, milliseconds"
        yield _at_most(what, longest, MAX_CALL_MS)


def _at_least(what: str, measured: float) -> Goal:
    return Goal(what, f">= {MIN_RATIO}", measured, measured >= MIN_RATIO)


def _at_most(what: str, measured: float, bound: float) -> Goal:
    return Goal(what, f"<= {bound}", measured, measured <= bound)


_COMPARISON = (
    (Column("operation"), lambda row: row.operation),
    (number("slice"), lambda row: format_bytes(row.slice_bytes)),
    (number("pass", 2), lambda row: format_bytes(row.pass_bytes)),
    (number("threads"), lambda row: str(row.num_threads)),
    (number("kvd"), lambda row: f"{format_bytes(int(row.kvd_bytes_per_s))}/s"),
    (number("floor"), lambda row: f"{format_bytes(int(row.floor_bytes_per_s))}/s"),
    (number("kvd / floor"), lambda row: f"{row.ratio.median:.2f}"),
    (number("quartiles", 1), lambda row: quartiles(row.ratio)),
)
_LATENCY = (
    (Column("call", may_be_cut=True, least=20), lambda row: row.operation),
    (Column("level"), lambda row: row.level),
    (number("sessions"), lambda row: f"{row.num_sessions:,}"),
    (number("calls", 1), lambda row: f"{row.num_calls:,}"),
    (number("p50"), lambda row: f"{row.p50_us:,.0f} us"),
    (number("p99"), lambda row: f"{row.p99_us:,.0f} us"),
)
_GROWTH = (
    (Column("call", may_be_cut=True, least=20), lambda row: row.operation),
    (Column("level"), lambda row: row.level),
    (number("from"), lambda row: f"{row.from_sessions:,}"),
    (number("to sessions"), lambda row: f"{row.to_sessions:,}"),
    (number("median"), lambda row: f"x {row.ratio.median:.2f}"),
    (number("quartiles", 1), lambda row: quartiles(row.ratio)),
)
_QUEUE = (  # what is reported, and milliseconds
    (Column("reported"), lambda row: row[0]),
    (number("median"), lambda row: f"{row[1].median:.2f} ms"),
    (number("quartiles, ms", 1), lambda row: quartiles(row[1])),
)
_LOOP_CALLS = (
    (Column("call"), lambda row: row[0]),
    (number("processor time"), lambda row: row[1]),
)
_GOALS = (
    (Column("what", may_be_cut=True, least=30), lambda row: row.what),
    (number("goal"), lambda row: row.bound),
    (number("measured"), lambda row: f"{row.measured:.2f}"),
    (Column(""), lambda row: verdict(row.met)),
)


def as_document(report: Report) -> dict[str, Any]:
    """Return plain values for json.dumps."""
    return {
        "schema": SCHEMA,
        **asdict(report),
        "goals": [asdict(goal) for goal in goals_of(report)],
    }


def tables(report: Report, width: int) -> Iterator[Table]:
    """Yield a table for each part that was run, for a terminal of `width` columns."""
    yield facts(_machine_facts(report), width)
    for title, found in (
        ("arena: through leases, against memcpy", report.arena),
        ("ssd: through kvd, against direct I/O", report.ssd),
        ("encryption: kvd with a key, against kvd without", report.encryption),
    ):
        if found is not None:
            yield table_of(_COMPARISON, found, width, title)
    if report.latencies is not None:
        yield table_of(_LATENCY, report.latencies, width, "control plane")
    if report.growths is not None:
        yield table_of(_GROWTH, report.growths, width, "growth of the median")
    if (queue := report.queue) is not None:
        title = f"queue of {queue.num_jobs:,} requests, {queue.policy}, processor time"
        reports = (("all at once", queue.full_s), ("a change", queue.change_s))
        rows = [(what, Spread(s.low * 1e3, s.median * 1e3, s.high * 1e3)) for what, s in reports]
        yield table_of(_QUEUE, rows, width, title)
    if report.restart is not None:
        yield facts(_restart_facts(report.restart), width, "restart")
    if (calls := report.loop_calls) is not None:
        title = (
            f"longest calls, {calls.num_sessions:,} sessions of {calls.blocks_per_session} blocks, "
            f"{calls.policy}"
        )
        yield table_of(_LOOP_CALLS, _loop_calls(calls), width, title)
    yield table_of(_GOALS, goals_of(report), width, "goals")


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
