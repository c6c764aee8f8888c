"""A report as a JSON document, and as tables for people. Pure.

The document is the Report of figures.py, field by field, with `schema` before it and `goals`
(goals.py) behind it. Sizes are bytes, durations seconds unless the name ends in `_us`; a part that
was not run is null.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvd.bench.figures import SCHEMA, Comparison, LoopCalls, QueueCosts, Report
from kvd.bench.goals import goals_of
from shared.statistics import Spread
from shared.units import format_bytes, format_duration


def as_document(report: Report) -> dict[str, Any]:
    """Plain values for json.dumps."""
    return {
        "schema": SCHEMA,
        **asdict(report),
        "goals": [asdict(goal) for goal in goals_of(report)],
    }


def tables(report: Report) -> Iterator[Table]:
    """What was run, one table a part."""
    yield _machine_table(report)
    if report.arena is not None:
        yield _comparisons("arena: through leases, against memcpy", report.arena)
    if report.ssd is not None:
        yield _comparisons("ssd: through kvd, against direct I/O", report.ssd)
    if report.encryption is not None:
        yield _comparisons("encryption: kvd with a key, against kvd without", report.encryption)
    if report.latencies is not None:
        yield _latency_table(report)
    if report.growths is not None:
        yield _growth_table(report)
    if report.queue is not None:
        yield _queue_table(report.queue)
    if report.restart is not None:
        yield _restart_table(report)
    if report.loop_calls is not None:
        yield _loop_calls_table(report.loop_calls)
    yield _goal_table(report)


def _titled(title: str, *columns: str) -> Table:
    table = Table(columns[0], box=None, title=title, title_justify="left")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _machine_table(report: Report) -> Table:
    machine = report.machine
    table = Table(box=None, show_header=False)
    facts = (
        ("cpu", f"{machine.cpu}, {machine.cpus} usable"),
        ("load before", f"{machine.load_average:.2f}"),
        ("memory", format_bytes(machine.memory_bytes)),
        ("private huge pages", machine.huge_pages),
        ("shared huge pages", machine.shared_huge_pages),
        ("reserved huge pages", str(machine.reserved_huge_pages)),
        ("kernel", machine.kernel),
        ("disk", f"{machine.filesystem} on {machine.device}, {_direct(machine.direct_io)}"),
        ("kvd", f"{machine.kvd}, Python {machine.python}"),
        ("took", f"{format_duration(report.elapsed_s)} ({report.scale})"),
    )
    for name, value in facts:
        table.add_row(name, value)
    return table


def _direct(is_direct: bool) -> str:
    return "direct I/O" if is_direct else "NO direct I/O: disk figures are the page cache's"


def _comparisons(title: str, found: tuple[Comparison, ...]) -> Table:
    columns = ("operation", "slice", "pass", "threads", "kvd", "floor", "kvd / floor", "quartiles")
    table = _titled(title, *columns)
    for entry in found:
        table.add_row(
            entry.operation,
            format_bytes(entry.slice_bytes),
            format_bytes(entry.pass_bytes),
            str(entry.num_threads),
            f"{format_bytes(int(entry.kvd_bytes_per_s))}/s",
            f"{format_bytes(int(entry.floor_bytes_per_s))}/s",
            f"{entry.ratio.median:.2f}",
            _quartiles(entry.ratio),
        )
    return table


def _latency_table(report: Report) -> Table:
    table = _titled("control plane", "call", "level", "sessions", "calls", "p50 us", "p99 us")
    for entry in report.latencies or ():
        table.add_row(
            entry.operation,
            entry.level,
            str(entry.num_sessions),
            str(entry.num_calls),
            f"{entry.p50_us:.0f}",
            f"{entry.p99_us:.0f}",
        )
    return table


def _growth_table(report: Report) -> Table:
    table = _titled("growth of the median", "call", "level", "from", "to", "times", "quartiles")
    for entry in report.growths or ():
        table.add_row(
            entry.operation,
            entry.level,
            str(entry.from_sessions),
            str(entry.to_sessions),
            f"{entry.ratio.median:.2f}",
            _quartiles(entry.ratio),
        )
    return table


def _queue_table(found: QueueCosts) -> Table:
    table = _titled(f"queue of {found.num_jobs} jobs, {found.policy}", "told", "ms", "quartiles")
    for what, seconds in (("all at once", found.full_s), ("a change", found.change_s)):
        low, median, high = (value * 1e3 for value in (seconds.low, seconds.median, seconds.high))
        table.add_row(what, f"{median:.2f}", f"{low:.2f} - {high:.2f}")
    return table


def _restart_table(report: Report) -> Table:
    table = Table(box=None, show_header=False, title="restart", title_justify="left")
    found = report.restart
    if found is not None:
        table.add_row("sessions", f"{found.num_restored} restored of {found.num_sessions}")
        table.add_row("index", format_bytes(found.index_bytes))
        table.add_row("exec to serving", f"{found.ready_s.median:.2f} s")
        table.add_row("processor time of it", f"{found.ready_cpu_s.median:.2f} s")
        table.add_row("with no sessions", f"{found.empty_ready_s.median:.2f} s")
        table.add_row("resident memory", format_bytes(found.rss_bytes))
        table.add_row("with no sessions", format_bytes(found.empty_rss_bytes))
        table.add_row("per idle session", f"{found.rss_per_session_bytes:.0f} B")
        table.add_row("at the most", f"{found.peak_rss_per_session_bytes:.0f} B")
    return table


def _loop_calls_table(found: LoopCalls) -> Table:
    title = f"longest calls, {found.num_sessions} sessions of {found.blocks_per_session} blocks"
    table = _titled(f"{title}, {found.policy}", "call", "processor time")
    table.add_row("restoring", f"{found.restore_cpu_s:.2f} s")
    for what, took_ms in (
        ("first attach", found.attach_ms),
        ("timer after it", found.look_ms),
        ("store into a full tier", found.store_ms),
        ("reload with a first quota", found.reload_ms),
        ("timer when all expire", found.expire_ms),
    ):
        table.add_row(what, f"{took_ms:.2f} ms")
    return table


def _goal_table(report: Report) -> Table:
    table = _titled("goals", "what", "goal", "measured", "")
    for goal in goals_of(report):
        verdict = "met" if goal.met else "MISSED"
        table.add_row(goal.what, goal.bound, f"{goal.measured:.2f}", verdict)
    return table


def _quartiles(spread: Spread) -> str:
    return f"{spread.low:.2f} - {spread.high:.2f}"
