"""A plan as charts: what is drawn, for whoever draws it (page.py, plots.py). Pure.

Two charts over the capacity of both tiers, a line a curve: the share of history tokens that hit,
with the knees marked, and the cost, with the cheapest points marked and recomputing as a line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from kvd.plan.curves import Curve, curves_of
from kvd.plan.decimal_sizes import GB
from kvd.plan.figures import PlanReport
from kvd.plan.report import capacity_text
from kvd.plan.sections import load_text

LOG_FROM = 8.0  # times the least capacity: from there on the axis is logarithmic
NUM_TICKS = 5  # of an axis, about
_NICE = (1.0, 2.0, 5.0, 10.0)
_UNITS = ((1000.0, "TB"), (1.0, "GB"), (1 / 1000, "MB"))  # in GB


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart.

    Attributes:
        points: (GB of both tiers, value).
        labels: of the points, for people.
        marked: index of the knee, or of the cheapest point; None: none is.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    marked: int | None


@dataclass(frozen=True, slots=True)
class Chart:
    """See the module docstring.

    Attributes:
        mark: what the marked points are.
        level: a value to compare with, and its name.
        is_log: whether the axis of capacities is logarithmic.
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
    """What the charts are of."""
    work = report.workload
    load = f"recompute load {load_text(work.recompute_load)}"
    return f"kvd plan: {report.model.name}, {work.origin}, {load}"


def charts(report: PlanReport) -> tuple[Chart, Chart]:
    """Hit rates, costs."""
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
    """Round values within an axis."""
    if is_log:
        exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
        found = [nice * 10.0**exponent for exponent in exponents for nice in _NICE[:3]]
    else:
        step = _nice_step((high - low) / NUM_TICKS)
        found = [number * step for number in range(ceil(low / step), floor(high / step) + 1)]
    return [value for value in found if low <= value <= high]


def capacity_ticks(low: float, high: float, *, is_log: bool) -> list[tuple[float, str]]:
    """Round capacities within an axis of GB, with their labels."""
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
    """A round number at or above it; not 0, for an axis has a length."""
    step = _nice_step(value / NUM_TICKS)
    return max(step, ceil(value / step) * step)


def _nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at or above `least`."""
    if least <= 0:
        return 1.0
    scale: float = 10.0 ** floor(log10(least))
    return scale * next((nice for nice in _NICE if nice * scale >= least * (1 - 1e-9)), 10.0)
