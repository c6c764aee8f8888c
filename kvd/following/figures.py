"""The follower's counters, and the metrics it exports itself, at the setting `remote.metrics`."""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvd.config import RemoteSettings
from kvd.following.status import Failure, FollowerStatus
from kvd.host.process_identity import start_ticks_of
from shared.serving.metric_export import Metric, MetricExporter, MetricTable, Scrape
from shared.serving.process_metrics import PROCESS_METRICS, fill_process
from shared.terminal.printing import counted
from shared.types.histogram import Tally
from shared.types.units import format_duration
from shared.version import __version__

KEPT_FAILURES = 5

METRICS = MetricTable(
    (
        Metric("kvd_remote_build_info", "info", "The running release", ("version",)),
        Metric(
            "kvd_remote_pushes_total",
            "counter",
            "Sessions by what became of their push: pushed, unchanged, longer there, gone from "
            "kvd, fenced (another server owns it), failed",
            ("result",),
        ),
        Metric(
            "kvd_remote_pulls_total",
            "counter",
            "Sessions that turns wanted by what became of their pull: pulled, absent from the "
            "store (or kvd has as much by now), failed",
            ("result",),
        ),
        Metric(
            "kvd_remote_drops_total",
            "counter",
            "Sessions that were flushed or ended by what became of them in the store: dropped, "
            "absent (or another server's), failed",
            ("result",),
        ),
        Metric(
            "kvd_remote_bytes_total",
            "counter",
            "Bytes of sessions that were pushed, those that lay there already included, or fetched",
            ("direction",),
        ),
        Metric(
            "kvd_remote_requests_total",
            "counter",
            "Requests of the store by kind: put, get, find, delete, list",
            ("kind",),
        ),
        Metric(
            "kvd_remote_evicted_unpushed_total",
            "counter",
            "Sessions evicted here, at least in part, before they were pushed",
        ),
        Metric(
            "kvd_remote_unpushed_sessions",
            "gauge",
            "Sessions to push, or to check in the store",
        ),
        Metric(
            "kvd_remote_oldest_unpushed_seconds",
            "gauge",
            "For how long the oldest session has been stored here and not there; of those that are "
            "near eviction, where only these are pushed: for how long it has been near it",
        ),
        Metric("kvd_remote_undropped_sessions", "gauge", "Sessions to drop from the store"),
        Metric("kvd_remote_wanted_sessions", "gauge", "Sessions waiting to be pulled"),
        Metric("kvd_remote_store_up", "gauge", "1 if the last call of the store succeeded"),
        Metric("kvd_remote_kvd_up", "gauge", "1 while kvd's events are followed"),
        *PROCESS_METRICS,
    )
)


@dataclass
class Figures:
    """Counters since the start, and the state of both connections.

    Attributes:
        pushes, pulls, drops: sessions by result.
        bytes: bytes of sessions by direction.
        requests: requests of the store by kind. Any thread counts them, like `add_bytes`.
        pulling: sessions being pulled now.
        failures: the last failures, newest last.
        store_up: whether the store's last call succeeded; None: none was made yet.
        kvd_up: whether kvd's events are followed.
    """

    pushes: Tally = field(default_factory=Tally)
    pulls: Tally = field(default_factory=Tally)
    drops: Tally = field(default_factory=Tally)
    bytes: dict[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    requests: Tally = field(default_factory=Tally)
    pulling: int = 0
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    store_up: bool | None = None
    kvd_up: bool = False

    def add_bytes(self, direction: str, num_bytes: int) -> None:
        """Count bytes, from any thread. Without a lock: a race loses few counts."""
        self.bytes[direction] += num_bytes

    def record_failure(self, event: str, why: str) -> None:
        """Record a failure that has just happened."""
        self.failures.append(Failure(time.time(), event, why))


@dataclass(frozen=True)
class Backlog:
    """What is left to do at a moment.

    Attributes:
        num_unpushed: sessions to push, or to look up in the store.
        oldest_s: seconds for which the oldest of them has waited; 0: none has.
        num_drops: sessions to drop from the store.
        num_wanted: sessions to pull.
        num_evicted: sessions evicted before they were pushed, since the start.
    """

    num_unpushed: int
    oldest_s: float
    num_drops: int
    num_wanted: int
    num_evicted: int = 0


def status_of(figures: Figures, backlog: Backlog) -> str:
    """Return the follower's state as one line, for systemd."""
    if not figures.kvd_up:
        return "kvd does not answer"
    store = {None: "", True: ", the store answers", False: ", the store fails"}[figures.store_up]
    oldest = f", the oldest for {format_duration(backlog.oldest_s)}" if backlog.oldest_s else ""
    return f"{counted(backlog.num_unpushed, 'session')} to push{oldest}{store}"


def follower_status(
    figures: Figures,
    backlog: Backlog,
    settings: RemoteSettings,
    started_unix_s: float,
    unix_s: float,
) -> FollowerStatus:
    """Return the follower's state in full, for `kvd remote status`."""
    return FollowerStatus(
        pid=os.getpid(),
        start_ticks=start_ticks_of(os.getpid()),
        started_unix_s=started_unix_s,
        unix_s=unix_s,
        url=settings.url,
        write=settings.write,
        pull=settings.pull,
        kvd_up=figures.kvd_up,
        store_up=figures.store_up,
        num_unpushed=backlog.num_unpushed,
        oldest_s=backlog.oldest_s,
        num_drops=backlog.num_drops,
        num_wanted=backlog.num_wanted,
        num_pulling=figures.pulling,
        num_evicted=backlog.num_evicted,
        pushes=_by_label(figures.pushes),
        pulls=_by_label(figures.pulls),
        drops=_by_label(figures.drops),
        num_bytes=dict(figures.bytes),
        requests=_by_label(figures.requests),
        failures=tuple(figures.failures),
    )


def _by_label(tally: Tally) -> dict[str, int]:
    return {label: count for (label,), count in sorted(tally.counts.copy().items())}


def make_exporter(figures: Figures, backlog: Callable[[], Backlog]) -> MetricExporter:
    """Return the exporter of the follower's metrics."""
    return MetricExporter(METRICS, partial(_fill, figures, backlog))


def _fill(figures: Figures, backlog: Callable[[], Backlog], scrape: Scrape) -> None:
    scrape.put("kvd_remote_build_info", 1, __version__)
    scrape.put_tally("kvd_remote_pushes_total", figures.pushes)
    scrape.put_tally("kvd_remote_pulls_total", figures.pulls)
    scrape.put_tally("kvd_remote_drops_total", figures.drops)
    for direction, num_bytes in figures.bytes.items():
        scrape.put("kvd_remote_bytes_total", num_bytes, direction)
    scrape.put_tally("kvd_remote_requests_total", figures.requests)
    left = backlog()
    scrape.put("kvd_remote_evicted_unpushed_total", left.num_evicted)
    scrape.put("kvd_remote_unpushed_sessions", left.num_unpushed)
    scrape.put("kvd_remote_oldest_unpushed_seconds", left.oldest_s)
    scrape.put("kvd_remote_undropped_sessions", left.num_drops)
    scrape.put("kvd_remote_wanted_sessions", left.num_wanted)
    if figures.store_up is not None:
        scrape.put("kvd_remote_store_up", figures.store_up)
    scrape.put("kvd_remote_kvd_up", figures.kvd_up)
    fill_process(scrape)
