"""What the project promises of these figures, and whether a run shows it. Pure.

A goal is shown, never asserted: a machine that is busy with something else misses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd.bench.figures import Report

MIN_RATIO = 0.9
MAX_GROWTH = 1.3
MAX_QUEUE_MS = 20.0
MAX_READY_S = 5.0  # of processor time, and MAX_READY_US more for each session
MAX_READY_US = 10.0
MAX_SESSION_BYTES = 1024
MAX_PEAK = 1.3  # times what sessions take at rest
MAX_CALL_MS = 50.0
BIG_SLICE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise. `measured` is in the unit of the bound."""

    what: str
    bound: str
    measured: float
    met: bool


def goals_of(report: Report) -> tuple[Goal, ...]:
    """The goals of the parts that were run."""
    return (
        *_ratios(report),
        *_growths(report),
        *_queue(report),
        *_restart(report),
        *_loop_calls(report),
    )


def _ratios(report: Report) -> Iterator[Goal]:
    for found in report.arena or ():
        if found.slice_bytes >= BIG_SLICE_BYTES and found.operation in ("store", "load"):
            yield _at_least(f"arena {found.operation} / memcpy", found.ratio.median)
    for found in report.ssd or ():
        if found.operation not in ("write", "read"):
            continue
        what = f"ssd {found.operation} / direct I/O, {found.slice_bytes >> 10} KiB slices"
        yield _at_least(what, found.ratio.median)


def _growths(report: Report) -> Iterator[Goal]:
    for found in report.growths or ():
        what = f"{found.level} {found.operation}, {found.from_sessions} to {found.to_sessions}"
        yield _at_most(f"{what} sessions", found.ratio.median, MAX_GROWTH)


def _queue(report: Report) -> Iterator[Goal]:
    if report.queue is not None:
        what = f"queue of {report.queue.num_jobs} jobs told at once, milliseconds"
        yield _at_most(what, report.queue.full_s.median * 1e3, MAX_QUEUE_MS)


def _restart(report: Report) -> Iterator[Goal]:
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


def _loop_calls(report: Report) -> Iterator[Goal]:
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
