"""Tables and lines about sessions, leases and verification; rates between two polls. Pure."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import plain
from shared.terminal.tables import Column, fitted
from shared.types.units import format_bytes, format_duration


class Rates:
    """Differences between the statistics of two polls, by kvd's own clock.

    Without an earlier poll, or if kvd was restarted between them: since kvd's start.

    Attributes:
        seconds: length of the interval.
        is_of_interval: the differences are of the interval, not since the start.
    """

    def __init__(
        self, now: kvd_pb2.GetStatsResponse, before: kvd_pb2.GetStatsResponse | None = None
    ) -> None:
        self.is_of_interval = (
            before is not None
            and before.process.pid == now.process.pid
            and before.process.uptime_s < now.process.uptime_s
        )
        earlier = before if before is not None and self.is_of_interval else None
        self.seconds = now.process.uptime_s - (earlier.process.uptime_s if earlier else 0.0)
        self._cpu_s = now.process.cpu_s - (earlier.process.cpu_s if earlier else 0.0)
        self._now = _counters(now)
        self._before = _counters(earlier) if earlier else {}

    def count(self, layout: str, counter: str) -> int:
        """Return the change of a counter."""
        now = self._now.get(layout, {}).get(counter, 0)
        return now - self._before.get(layout, {}).get(counter, 0)

    def per_second(self, layout: str, *counters: str) -> float:
        """Return the change of some counters together, per second."""
        count = sum(self.count(layout, counter) for counter in counters)
        return count / self.seconds if self.seconds > 0 else 0.0

    def share(self, layout: str, part: str, rest: str) -> float | None:
        """Return the share of `part` in `part` and `rest` together, 0 to 1; None: both are 0."""
        num_part = self.count(layout, part)
        whole = num_part + self.count(layout, rest)
        return num_part / whole if whole else None

    @property
    def cpu_share(self) -> float:
        """The process's CPU time, in cores."""
        return self._cpu_s / self.seconds if self.seconds > 0 else 0.0


def _counters(stats: kvd_pb2.GetStatsResponse) -> dict[str, Mapping[str, int]]:
    return {layout.layout: layout.counters for layout in stats.layouts}


SESSION_COLUMNS = (
    Column("session", may_be_cut=True, least=36),  # a UUID
    Column("tenant", rank=2, may_be_cut=True, least=12),
    Column("model", rank=6),
    Column("tokens", is_number=True),
    Column("blocks", is_number=True, rank=8),
    Column("dram", is_number=True),
    Column("ssd", is_number=True),
    Column("dirty", is_number=True, rank=7),
    Column("idle", is_number=True),
    Column("expires in", is_number=True, rank=3),
    Column("state"),
)
_LEASE_COLUMNS = (
    Column("lease", is_number=True, rank=5),
    Column("kind"),
    Column("session", may_be_cut=True, least=20),
    Column("tenant", rank=6, may_be_cut=True),
    Column("model", rank=7),
    Column("slots", is_number=True),
    Column("bytes", is_number=True, rank=4),
    Column("age", is_number=True),
    Column("pid", is_number=True),
    Column("process", rank=2, may_be_cut=True, least=28),
    Column("state"),
)


def sessions_table(sessions: Sequence[kvd_pb2.SessionInfo], width: int) -> Table:
    """Return the table of sessions, a line per session."""
    return fitted(SESSION_COLUMNS, [session_row(info) for info in sessions], width)


def session_row(info: kvd_pb2.SessionInfo) -> tuple[str, ...]:
    """Return a session's cells for SESSION_COLUMNS."""
    return (
        info.session.session_id,
        info.session.tenant,
        info.session.model[:12],
        str(info.num_tokens),
        str(info.num_blocks),
        format_bytes(info.dram_bytes),
        format_bytes(info.ssd_bytes),
        format_bytes(info.dirty_bytes),
        format_duration(info.idle_s),
        expiry(info.expires_in_s),
        state(info),
    )


def leases_table(leases: Sequence[kvd_pb2.LeaseInfo], width: int) -> Table:
    """Return the table of leases, a line per lease."""
    rows = [
        (
            str(lease.lease_id),
            plain(lease)["kind"],
            lease.session.session_id or "-",
            lease.session.tenant or "-",
            lease.session.model[:12] or "-",
            str(lease.num_slots),
            format_bytes(lease.bytes),
            format_duration(lease.age_s),
            str(lease.pid) if lease.pid else "-",
            " ".join(word for word in (lease.engine_name, lease.process_status) if word) or "-",
            _lease_state(lease),
        )
        for lease in leases
    ]
    return fitted(_LEASE_COLUMNS, rows, width)


def verify_line(progress: kvd_pb2.VerifyProgress) -> str:
    """Return the progress of a verification as one line."""
    num_checked = progress.dram.num_blocks + progress.ssd.num_blocks
    share = min(1.0, num_checked / progress.num_copies) if progress.num_copies else 1.0
    num_corrupt = progress.dram.num_corrupt + progress.ssd.num_corrupt
    checked_bytes = format_bytes(progress.dram.bytes + progress.ssd.bytes)
    return f"{share:4.0%}  {num_checked} copies, {checked_bytes}, {num_corrupt} corrupt"


def verify_table(report: kvd_pb2.VerifyProgress) -> Table:
    """Return the table of a verification's results."""
    table = Table("tier", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("copies checked", "bytes", "corrupt"):
        table.add_column(heading, justify="right")
    for name, tier in (("dram", report.dram), ("ssd", report.ssd)):
        table.add_row(name, str(tier.num_blocks), format_bytes(tier.bytes), str(tier.num_corrupt))
    table.caption = (
        f"{report.num_repaired} repaired, {report.num_lost} lost, {report.num_errors} not checked"
    )
    table.caption_justify = "left"
    return table


def temperature(info: kvd_pb2.SessionInfo) -> str:
    """Return how fast a session loads: hot (all in DRAM), warm (partly), cold (on SSD only)."""
    if not info.dram_bytes:
        return "cold"
    return "hot" if info.dram_bytes == info.bytes else "warm"


def expiry(expires_in_s: float) -> str:
    """Return when a session expires, for people."""
    return "never" if expires_in_s < 0 else format_duration(expires_in_s)


def state(info: kvd_pb2.SessionInfo) -> str:
    """Return a session's temperature, and other properties that operators need to know."""
    words = (
        (temperature(info), True),
        ("pinned", info.pin == kvd_pb2.PIN_HARD),
        ("soft-pinned", info.pin == kvd_pb2.PIN_SOFT),
        ("retained", info.retain_s > 0),
        ("awaits tools", bool(info.awaited_tools)),
        ("superseded", info.superseded),
        ("near eviction", info.near_eviction),
        ("ended", info.ended),
        ("in use", bool(info.leases)),
    )
    return ", ".join(word for word, applies in words if applies)


def _lease_state(lease: kvd_pb2.LeaseInfo) -> str:
    if lease.quarantined:
        return "quarantined"
    return "attached, waits for reads" if lease.pending else "attached"
