"""The view of `kvd top`: lines that fit a terminal of a given size. Pure.

Each layout has a line of bars for the last polling intervals. The first poll, and the first after a
restart of kvd, end no interval.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from kvd.top import screen as screens
from kvd.top.screen import Screen, index_of, name_of, starts_reversed
from kvd.views.session_views import history_table
from kvd.views.stats_views import percent, process_line
from kvd.views.views import SESSION_COLUMNS, Rates, expiry, session_row, state
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import counted, plain, sparkline
from shared.terminal.tables import fitted
from shared.types.units import format_bytes, format_duration

MOST_INTERVALS = 200  # intervals that are kept: as many as the widest terminals show
_GAP = 2


@dataclass(frozen=True, slots=True)
class Point:
    """A layout's activity in one interval.

    Attributes:
        hit_rate: share of loads that hit, 0 to 1; None: there was no load.
        tokens_per_s: tokens loaded, from DRAM or SSD.
        ssd_bytes_per_s: bytes read from and written to SSD.
    """

    hit_rate: float | None
    tokens_per_s: float
    ssd_bytes_per_s: float


Points = Mapping[str, Point]  # by layout


def points(now: kvd_pb2.GetStatsResponse, before: kvd_pb2.GetStatsResponse | None) -> Points:
    """Return each layout's activity since the poll before; empty if kvd has restarted since."""
    rates = Rates(now, before)
    if not rates.is_of_interval:
        return {}
    return {
        layout.layout: Point(
            rates.share(layout.layout, "load_hits", "load_misses"),
            rates.per_second(layout.layout, "load_tokens_dram", "load_tokens_ssd"),
            rates.per_second(layout.layout, "ssd_read_bytes", "ssd_written_bytes"),
        )
        for layout in now.layouts
    }


def trend_line(layout: str, intervals: Sequence[Points], width: int) -> Text:
    """Return bars for a layout's last intervals; the highest bar is the highest value shown.

    Args:
        layout: its key.
        intervals: the intervals, oldest first.
        width: columns of the terminal.
    """
    found = [interval.get(layout) for interval in intervals]
    series: tuple[tuple[str, list[float | None], float | None], ...] = (
        ("hit rate ", [point.hit_rate if point else None for point in found], 1.0),
        ("tokens/s ", [point.tokens_per_s if point else None for point in found], None),
        ("ssd bytes/s ", [point.ssd_bytes_per_s if point else None for point in found], None),
    )
    begin = "trend "
    taken = len(begin) + sum(len(label) for label, _, _ in series) + _GAP * (len(series) - 1)
    room = max(0, (width - taken) // len(series))
    line = Text()
    line.append(begin, "bold")
    for index, (label, values, top) in enumerate(series):
        bars = sparkline(values, room, top)
        line.append(" " * _GAP if index else "").append(label)
        line.append(f"{bars:>{room}}", "cyan")
    return line


_BAR_WIDTH = 20
_TREND_HEIGHT = 20  # lower terminals show no trend lines
_WARN, _BAD = 0.9, 0.98  # used shares of a tier from which its bar is yellow, or red
_HEADING = "bold"
_ORDER_NAMES = {
    kvd_pb2.SESSION_ORDER_IDLE: "last use",
    kvd_pb2.SESSION_ORDER_BYTES: "bytes",
    kvd_pb2.SESSION_ORDER_TOKENS: "tokens",
    kvd_pb2.SESSION_ORDER_TTL: "expiry",
}
_KEYS = "↑↓ choose  Enter show  f flush  p pin  u unpin  i b t e r sort  h help  q quit"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last poll, and the intervals before it.

    Attributes:
        stats: the statistics.
        before: those of the poll before.
        intervals: activity in the intervals so far, oldest first.
        sessions, total: the listed sessions, and how many match the filter.
        detail: the chosen session, if it is shown.
        problem: why there is no newer poll; "": none failed.
    """

    stats: kvd_pb2.GetStatsResponse
    before: kvd_pb2.GetStatsResponse | None = None
    intervals: Sequence[Points] = ()
    sessions: Sequence[kvd_pb2.SessionInfo] = ()
    total: int = 0
    detail: kvd_pb2.DescribeSessionResponse | None = None
    problem: str = ""


def top_view(snapshot: Snapshot, screen: Screen, width: int, height: int) -> RenderableType:
    """Return the whole screen."""
    if screen.shows_help:
        return Group(*_help_lines())
    head = list(_head(snapshot, width, shows_trend=height >= _TREND_HEIGHT))
    foot = _foot(snapshot, screen)
    room = height - len(head) - 1
    if screen.shows_session and snapshot.detail is not None:
        body: RenderableType = Group(*_session(snapshot.detail, width, room))
    else:
        body = _sessions(snapshot, screen, width, max(1, room - 2))
    return _Stack(head, body, foot)


class _Stack:
    """A head, a foot, and between them as much of a body as fits."""

    def __init__(self, head: Sequence[Text], body: RenderableType, foot: Text) -> None:
        self._head, self._body, self._foot = head, body, foot

    def __rich_console__(self, console, options):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Render the lines; rich calls this."""
        height = options.height or console.height
        for line in self._head[: height - 1]:
            yield line
        room = height - len(self._head) - 1
        lines = console.render_lines(self._body, options.update(height=None), pad=False)
        for line in lines[: max(0, room)]:
            yield from line
            yield Text("")
        yield self._foot


def _head(snapshot: Snapshot, width: int, *, shows_trend: bool) -> Iterator[Text]:
    rates = Rates(snapshot.stats, snapshot.before)
    yield _cut(process_line(snapshot.stats, rates), width)
    for layout in snapshot.stats.layouts:
        yield from (_cut(line, width) for line in _layout_lines(layout))
        for tier in layout.tiers:
            yield _cut(_tier_line(tier, layout), width)
        for line in _rate_lines(layout.layout, rates):
            yield _cut(line, width)
        if shows_trend:
            yield _cut(trend_line(layout.layout, snapshot.intervals, width), width)
    for engine in snapshot.stats.engines:
        words = (
            f"{engine.name}  pid {engine.pid}  {engine.queue_jobs} wait, {engine.running_jobs} run"
        )
        yield _cut(Text.assemble(("engine ", _HEADING), words), width)
    if not snapshot.stats.engines:
        yield Text("no engine is attached", style="yellow")
    yield Text("")


def _layout_lines(layout: kvd_pb2.LayoutStats) -> Iterator[Text]:
    queue = layout.queue
    num_pinned = layout.hard_pins + layout.soft_pins
    yield Text.assemble(
        ("model ", _HEADING),
        f"{layout.model[:12]}  {counted(layout.num_sessions, 'session')} (mean "
        f"{format_bytes(queue.mean_session_bytes)}), {num_pinned} pinned; leases: {layout.leases}",
    )
    yield Text.assemble(
        ("queue ", _HEADING),
        f"{queue.waiting_jobs} wait, {queue.running_sessions} run  ",
        ("windows ", _HEADING),
        f"prefetch {queue.prefetch_window}, eviction {queue.eviction_window} requests",
    )


def _tier_line(tier: kvd_pb2.TierStats, layout: kvd_pb2.LayoutStats) -> Text:
    share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
    full = round(min(1.0, share) * _BAR_WIDTH)
    style = "red" if share >= _BAD else "yellow" if share >= _WARN else "green"
    line = Text.assemble(
        (f"{plain(tier)['tier']:>5} ", _HEADING),
        ("█" * full, style),
        ("░" * (_BAR_WIDTH - full), "dim"),
        f" {share:4.0%}  {format_bytes(tier.used_bytes)} of {format_bytes(tier.capacity_bytes)}"
        f"  {counted(tier.num_blocks, 'block')}",
    )
    if tier.tier == kvd_pb2.TIER_DRAM and layout.dirty_bytes:
        line.append(f"  {format_bytes(layout.dirty_bytes)} dirty")
    if tier.surplus_bytes:
        line.append(f"  shrinks by {format_bytes(tier.surplus_bytes)}")
    if tier.degraded:
        line.append(f"  degraded: {tier.degraded_reason}", "red")
    return line


def _rate_lines(key: str, rates: Rates) -> Iterator[Text]:
    """Yield the lines of rates in the last interval."""
    share = rates.share(key, "load_hits", "load_misses")
    yield Text.assemble(
        (" hits ", _HEADING),
        f"{percent(share)} of {rates.per_second(key, 'load_hits', 'load_misses'):.1f} loads/s  ",
        ("tokens/s ", _HEADING),
        f"{rates.per_second(key, 'load_tokens_dram'):.0f} dram, "
        f"{rates.per_second(key, 'load_tokens_ssd'):.0f} ssd, "
        f"{rates.per_second(key, 'store_tokens'):.0f} stored",
    )
    read, written = (
        format_bytes(int(rates.per_second(key, f"ssd_{what}_bytes")))
        for what in ("read", "written")
    )
    yield Text.assemble(
        ("  ssd ", _HEADING),
        f"read {read}/s, written {written}/s  ",
        ("evicted/s ", _HEADING),
        f"{rates.per_second(key, 'evictions_dram'):.1f} dram, "
        f"{rates.per_second(key, 'evictions_ssd'):.1f} ssd  ",
        ("ahead/s ", _HEADING),
        f"{rates.per_second(key, 'prefetch_blocks'):.1f}",
    )


def _sessions(snapshot: Snapshot, screen: Screen, width: int, room: int) -> RenderableType:
    """Return the part of the list around the chosen session."""
    turned = screen.is_reversed != starts_reversed(screen.order)
    how = _ORDER_NAMES[screen.order] + (", reversed" if turned else "")
    title = Text(f"{counted(snapshot.total, 'session')} by {how}", style=_HEADING)
    if not snapshot.sessions:
        return Group(title)
    index = index_of(screen, [name_of(info) for info in snapshot.sessions])
    start = max(0, min(index - room // 2, len(snapshot.sessions) - room))
    table = fitted(
        SESSION_COLUMNS,
        [session_row(info) for info in snapshot.sessions[start : start + room]],
        width,
    )
    for row_index, row in enumerate(table.rows):
        row.style = "reverse" if start + row_index == index else None
    return Group(title, table)


def _session(
    detail: kvd_pb2.DescribeSessionResponse, width: int, room: int
) -> Iterator[RenderableType]:
    """Yield the chosen session: a few facts, and its last events; `kvd show` has everything."""
    info = detail.info
    tokens, blocks = counted(info.num_tokens, "token"), counted(info.num_blocks, "block")
    facts = (
        f"session {info.session.session_id}",
        f"tenant {info.session.tenant}",
        f"{tokens} in {blocks}, {info.shared_blocks} shared",
        f"dram {format_bytes(info.dram_bytes)}, ssd {format_bytes(info.ssd_bytes)}",
        f"idle {format_duration(info.idle_s)}, expires in {expiry(info.expires_in_s)}",
        state(info),
    )
    for fact in facts:
        yield _cut(Text(fact), width)
    moves = detail.history[-max(1, room - len(facts) - 3) :]
    yield history_table(moves, width)


def _foot(snapshot: Snapshot, screen: Screen) -> Text:
    if screen.question is not None:
        _, _, session_id = screen.question.name
        words = f"{screen.question.act.value} session {session_id}? y: yes, any other key: no"
        return Text(words, style="bold reverse", no_wrap=True, overflow="ellipsis")
    if snapshot.problem:
        return Text(snapshot.problem, style="bold red", no_wrap=True, overflow="ellipsis")
    held = "held (Space goes on)  " if screen.is_paused else ""
    return Text(held + (screen.message or _KEYS), no_wrap=True, overflow="ellipsis")


def _help_lines() -> Iterator[Text]:
    yield Text("Keys of kvd top", style=_HEADING)
    doc = screens.__doc__ or ""
    for line in doc.splitlines():
        if line.startswith("    "):
            yield Text(line, no_wrap=True, overflow="ellipsis")
    yield Text("")
    yield Text("Rates are those of the time between two looks; bars are those of the last looks,")
    yield Text("the newest at the right. Any key goes back.")


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text
