"""How it went over the last looks of `kvd top`: a line of bars for each layout. Pure.

A look is of the time since the one before; the first one, and the first after a restart of kvd,
have nothing to tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from kvd.views.rates import Rates
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import sparkline

MOST_LOOKS = 200  # that are kept: what the widest terminals have room for
_GAP = 2


@dataclass(frozen=True, slots=True)
class Point:
    """What a layout did between two looks.

    Attributes:
        hit_rate: share of loads that hit; None: there was none.
        tokens_per_s: loaded, from either tier.
        ssd_bytes_per_s: read and written.
    """

    hit_rate: float | None
    tokens_per_s: float
    ssd_bytes_per_s: float


Points = Mapping[str, Point]  # by layout


def points(now: kvd_pb2.GetStatsResponse, before: kvd_pb2.GetStatsResponse | None) -> Points:
    """What every layout did since the look before; nothing if kvd was started since."""
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


def trend_line(layout: str, looks: Sequence[Points], width: int) -> Text:
    """Bars of a layout's last looks, side by side; the highest is the most that is shown.

    Args:
        layout: its key.
        looks: oldest first.
        width: of the terminal.
    """
    found = [look.get(layout) for look in looks]
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
