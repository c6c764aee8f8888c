"""A plan as one page: charts as inline SVG, and the tables; nothing else is loaded. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import log10

from kvd.plan.charts import Chart, Line, capacity_ticks, charts, headline, ticks
from kvd.plan.curves import curves_of
from kvd.plan.figures import PlanReport
from kvd.plan.report import CURVE_COLUMNS, curve_texts, facts, rows
from kvd.plan.sections import sections_of

WIDTH, HEIGHT = 760.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 34.0, 44.0  # of the axes' box, within the picture
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
    """The whole document."""
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
    """One chart as a picture."""
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
    """Where values are in the picture."""

    def __init__(self, chart: Chart) -> None:
        capacities = [x for line in chart.lines for x, _ in line.points]
        self._low, self._high = min(capacities), max(capacities)
        if self._low == self._high:  # one capacity stands in the middle
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
