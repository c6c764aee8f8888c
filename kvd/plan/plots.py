"""The charts of a plan: in an HTML page, or in a picture, for which matplotlib is needed.

There are two charts over the capacity of both tiers, with a line per curve: the share of history
tokens that hit, with the knees marked; and the cost, with the cheapest points marked and the cost
of recomputing as a level. The page has the charts as inline SVG, and the tables; it loads nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from kvd.plan.figures import Curve, PlanReport, curves_of
from kvd.plan.report import CURVE_COLUMNS, capacity_text, curve_texts, facts, rows
from kvd.plan.sections import load_text, sections_of
from kvd.plan.sizes import GB
from shared.measuring.plots import NoPlotError, picture
from shared.measuring.plots import check_plot as check_picture

LOG_FROM = 8.0  # largest by smallest capacity from which the axis is logarithmic
NUM_TICKS = 5  # of an axis, approximately
PAGES = (".html", ".htm")
_NICE = (1.0, 2.0, 5.0, 10.0)
_UNITS = ((1000.0, "TB"), (1.0, "GB"), (1 / 1000, "MB"))  # in GB


@dataclass(frozen=True, slots=True)
class Line:
    """A curve in a chart.

    Attributes:
        name: the curve's name.
        points: (GB of both tiers, value).
        labels: the points' labels.
        marked: index of the knee, or of the cheapest point; None: there is none.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    marked: int | None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over the capacity of both tiers.

    Attributes:
        title: its title.
        unit: the unit of the values.
        mark: the meaning of the marked points.
        lines: the curves.
        level: a value to compare with, and its name; None: there is none.
        is_log: the axis of capacities is logarithmic.
        top: end of the axis of values, which begins at 0.
    """

    title: str
    unit: str
    mark: str
    lines: tuple[Line, ...]
    level: tuple[float, str] | None
    is_log: bool
    top: float


def headline(report: PlanReport) -> str:
    """Return the title of the charts."""
    work = report.workload
    load = f"recompute load {load_text(work.recompute_load)}"
    return f"kvd plan: {report.model.name}, {work.origin}, {load}"


def charts(report: PlanReport) -> tuple[Chart, Chart]:
    """Return the charts of hit rates and of costs."""
    curves = curves_of(report.results)
    totals = [result.capacity.total_bytes for result in report.results]
    is_log = min(totals) > 0 and max(totals) >= LOG_FROM * min(totals)
    hits = Chart(
        "history tokens that were loaded",
        "%",
        "knee",
        tuple(_hit_line(curve) for curve in curves),
        None,
        is_log,
        100.0,
    )
    costs = tuple(_cost_line(curve) for curve in curves)
    recomputing = max(result.cost.total for result in report.baselines)
    top = max([recomputing, *(value for line in costs for _, value in line.points)])
    level = (recomputing, "RE: recomputing everything")
    return hits, Chart("cost of the replay", "", "cheapest", costs, level, is_log, _above(top))


def ticks(low: float, high: float, *, is_log: bool) -> Sequence[float]:
    """Return round values within an axis."""
    if is_log:
        exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
        found = [nice * 10.0**exponent for exponent in exponents for nice in _NICE[:3]]
    else:
        step = _nice_step((high - low) / NUM_TICKS)
        found = [number * step for number in range(ceil(low / step), floor(high / step) + 1)]
    return [value for value in found if low <= value <= high]


def capacity_ticks(low: float, high: float, *, is_log: bool) -> list[tuple[float, str]]:
    """Return round capacities within an axis of GB, with their labels."""
    unit, name = next((each for each in _UNITS if high >= 2 * each[0]), _UNITS[-1])
    found = ticks(low / unit, high / unit, is_log=is_log)
    return [(value * unit, f"{value:g} {name}") for value in found]


def _hit_line(curve: Curve) -> Line:
    points, labels = [], []
    for result in curve.results:
        outcome = result.outcome
        points.append((result.capacity.total_bytes / GB, 100 * outcome.hits_tok))
        where = capacity_text(result.capacity)
        labels.append(
            f"{curve.name}, {where}: {outcome.hits_tok:.1%} of tokens, {outcome.hits_fu:.1%} of"
            f" later turns, queue {outcome.queue_mean:.0f}"
        )
    return Line(curve.name, tuple(points), tuple(labels), curve.knee)


def _cost_line(curve: Curve) -> Line:
    points, labels = [], []
    for result in curve.results:
        points.append((result.capacity.total_bytes / GB, result.cost.total))
        where = capacity_text(result.capacity)
        share = f"{result.cost_ratio:.1%} of RE's" if result.cost_ratio else "RE costs nothing"
        labels.append(f"{curve.name}, {where}: {result.cost.total:,.2f}, {share}")
    return Line(curve.name, tuple(points), tuple(labels), curve.cheapest)


def _above(value: float) -> float:
    """Return a round number >= value, and above 0, so that the axis has a length."""
    step = _nice_step(value / NUM_TICKS)
    return max(step, ceil(value / step) * step)


def _nice_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, >= `least`."""
    if least <= 0:
        return 1.0
    scale: float = 10.0 ** floor(log10(least))
    return scale * next((nice for nice in _NICE if nice * scale >= least * (1 - 1e-9)), 10.0)


WIDTH, HEIGHT = 760.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 34.0, 44.0  # margins of the axes within the picture
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555",
)  # fmt: skip
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 62em; }
h1 { font-size: 1.25em; } h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(-n+2), td:nth-child(-n+2), .facts td { text-align: left; }
svg { max-width: 100%; height: auto; display: block; } svg text { font-size: 12px; fill: #444; }
.legend { list-style: none; padding: 0; margin: .3em 0 0; } .legend li { display: inline-block; }
.legend li { margin-right: 1.4em; } .wide { overflow-x: auto; } p { max-width: 46em; }
"""
_NOTE = (
    "Capacity is DRAM and SSD together. The ring marks the knee: the point farthest above the"
    " straight line between a curve's ends, with both axes scaled to 0..1 and capacity in bytes;"
    " in the second chart it marks the cheapest point. Hit rates depend on how busy the engine is:"
    " read them with the recompute load and the queue beside them."
)


def page(report: PlanReport) -> str:
    """Return the HTML page."""
    title = escape(headline(report))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        _table((), facts(report), kind="facts"),
    ]
    for chart in charts(report):
        parts += [f"<h2>{escape(chart.title)}</h2>", svg(chart), _legend(chart)]
    parts.append(f"<p>{escape(_NOTE)}</p>")
    how_much = [curve_texts(curve) for curve in curves_of(report.results)]
    parts += _titled("How much", _table(CURVE_COLUMNS, how_much))
    for section in sections_of(report):
        names = ("DRAM + SSD", "policy", *(column.name for column in section.columns))
        cells = [
            (capacity, policy, *(column.cell(result) for column in section.columns))
            for capacity, policy, result in rows(report)
        ]
        parts += _titled(section.title.capitalize(), _table(names, cells))
        if section.legend:
            parts.append(f"<p>{escape(section.legend)}</p>")
    parts.append(f"<p><code>{escape(' '.join(report.command))}</code></p></body></html>")
    return "\n".join(parts) + "\n"


def svg(chart: Chart) -> str:
    """Return a chart as SVG."""
    axes = _Axes(chart)
    size = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" width="{WIDTH:.0f}"'
    kind = 'role="img" xmlns="http://www.w3.org/2000/svg"'
    parts = [f'<svg {size} {kind} aria-label="{escape(chart.title)}">', *axes.drawn()]
    if chart.level is not None:
        value, name = chart.level
        y = axes.y(value)
        parts.append(_stroke(LEFT, y, WIDTH - RIGHT, y, "#888", ' stroke-dasharray="5 4"'))
        parts.append(_text(LEFT + 6, y - 5, name, "start"))
    for line, colour in zip(chart.lines, _colours(), strict=False):
        parts += _line(chart, line, axes, colour)
    return "\n".join([*parts, "</svg>"])


class _Axes:
    """Maps capacities and values to positions in the picture."""

    def __init__(self, chart: Chart) -> None:
        capacities = [x for line in chart.lines for x, _ in line.points]
        self._low, self._high = min(capacities), max(capacities)
        if self._low == self._high:  # a single capacity is put in the middle
            self._low, self._high = self._low / 2, self._high * 2 or 1.0
        self._chart = chart

    def x(self, capacity: float) -> float:
        low, high = self._low, self._high
        if self._chart.is_log:
            low, high, capacity = log10(low), log10(high), log10(capacity)
        return LEFT + 12 + (WIDTH - LEFT - RIGHT - 24) * (capacity - low) / (high - low)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self._chart.top

    def drawn(self) -> Iterator[str]:
        chart, bottom = self._chart, HEIGHT - BOTTOM
        for value in ticks(0.0, chart.top, is_log=False):
            y = self.y(value)
            yield _stroke(LEFT, y, WIDTH - RIGHT, y, "#e4e4e4")
            yield _text(LEFT - 8, y + 4, f"{value:,.6g}{chart.unit}", "end")
        for capacity, label in capacity_ticks(self._low, self._high, is_log=chart.is_log):
            x = self.x(capacity)
            yield _stroke(x, bottom, x, bottom + 5, "#888")
            yield _text(x, bottom + 19, label, "middle")
        yield _stroke(LEFT, bottom, WIDTH - RIGHT, bottom, "#888")
        scale = ", logarithmic" if chart.is_log else ""
        yield _text((LEFT + WIDTH) / 2, HEIGHT - 6, f"DRAM + SSD{scale}", "middle")


def _line(chart: Chart, line: Line, axes: _Axes, colour: str) -> Iterator[str]:
    places = [(axes.x(x), axes.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for index, ((x, y), label) in enumerate(zip(places, line.labels, strict=True)):
        mark = f" ({chart.mark})" if index == line.marked else ""
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(label + mark)}</title></circle>"
        )
        if index == line.marked:
            yield (
                f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none"'
                f' stroke="{colour}" stroke-width="2"/>'
            )


def _legend(chart: Chart) -> str:
    items = (
        f'<li><svg width="14" height="10" style="display:inline">'
        f'<rect width="14" height="10" fill="{colour}"/></svg> {escape(line.name)}</li>'
        for line, colour in zip(chart.lines, _colours(), strict=False)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _titled(heading: str, table: str) -> Iterator[str]:
    yield f"<h2>{escape(heading)}</h2>"
    yield f'<div class="wide">{table}</div>'


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _table(columns: Sequence[str], cells: Iterable[Sequence[str]], *, kind: str = "") -> str:
    heading = "".join(f"<th>{escape(column)}</th>" for column in columns)
    head = f"<thead><tr>{heading}</tr></thead>" if columns else ""
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f'<table class="{kind}">{head}<tbody>\n{body}\n</tbody></table>'


def _stroke(x: float, y: float, to_x: float, to_y: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def check_plot(path: Path) -> None:
    """Raise NoPlotError if the plot cannot be written: planning takes minutes, so check first."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise NoPlotError(
            f"the plot {path} cannot be written", "give a file in an existing directory with --plot"
        )
    if path.suffix not in PAGES:
        check_picture(path)


def plot(report: PlanReport, path: Path) -> None:
    """Write the page or the picture, by the file's suffix.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    if path.suffix not in PAGES:
        with picture(path, 2, 1, figsize=(9, 9)) as (figure, axes):
            figure.suptitle(headline(report))
            for each, chart in zip(axes, charts(report), strict=True):
                _draw(each, chart)
        return
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise NoPlotError(
            f"the plot {path} cannot be written ({error.strerror})", "give another file with --plot"
        ) from error


def _draw(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        capacities = [x for x, _ in line.points]
        values = [y for _, y in line.points]
        (drawn,) = axes.plot(capacities, values, marker="o", markersize=4, label=line.name)
        if line.marked is not None:
            place = [capacities[line.marked]], [values[line.marked]]
            ring = {"marker": "o", "markersize": 13, "fillstyle": "none", "linestyle": "none"}
            axes.plot(*place, color=drawn.get_color(), **ring)
    if chart.level is not None:
        value, name = chart.level
        axes.axhline(value, color="grey", linestyle="--", linewidth=1, label=name)
    _scale(axes, chart)
    axes.set_title(f"{chart.title}; rings: {chart.mark}")
    axes.set_ylabel(chart.unit)
    axes.set_ylim(0, chart.top)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _scale(axes: Any, chart: Chart) -> None:
    if chart.is_log:
        axes.set_xscale("log")
    capacities = [x for line in chart.lines for x, _ in line.points]
    if min(capacities) < max(capacities):
        found = capacity_ticks(min(capacities), max(capacities), is_log=chart.is_log)
        axes.set_xticks([place for place, _ in found], [label for _, label in found])
        axes.minorticks_off()
    axes.set_xlabel("DRAM + SSD")
