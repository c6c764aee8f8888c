"""A report as a picture: bars of every variant, and of the ratios; needs matplotlib."""

from pathlib import Path
from typing import Any

from inference_svc.bench.figures import Case, Report
from shared.measuring.plots import picture

BAR_SPACE = 0.8  # of the room of a case
LOG_FROM = 20.0  # times the least value: from there on the axis is logarithmic


def plot(report: Report, path: Path) -> None:
    """Write the picture; its format follows from the file's name.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    width = max(7.0, 1.2 * len(report.cases) + 3)
    subject = report.subject
    with picture(path, 2, 1, figsize=(width, 8)) as (figure, (above, below)):
        figure.suptitle(
            f"inference-svc bench {report.part}: {subject.name}, {subject.dtype} on"
            f" {subject.device}, {subject.threads} threads"
        )
        _draw(above, report.cases, [_values(case, report.metric) for case in report.cases])
        above.set_ylabel(report.metric)
        _draw(below, report.cases, [_ratios(case) for case in report.cases])
        below.set_ylabel("median ratio")
        below.axhline(1.0, color="grey", linewidth=0.8)


Bars = dict[str, tuple[float, float, float]]  # name → low, median, high


def _values(case: Case, metric: str) -> Bars:
    found: Bars = {}
    for variant in case.variants:
        # A part whose cases differ (overlap) shows of each what it has first.
        spread = variant.values.get(metric) or next(iter(variant.values.values()), None)
        if spread is not None:
            found[variant.variant] = (spread.low, spread.median, spread.high)
    return found


def _ratios(case: Case) -> Bars:
    return {
        f"{ratio.what} ({ratio.metric})": (ratio.ratio.low, ratio.ratio.median, ratio.ratio.high)
        for ratio in case.ratios
    }


def _draw(axes: Any, cases: tuple[Case, ...], groups: list[Bars]) -> None:
    """Bars in groups, with quartiles, one group a case."""
    names = list(dict.fromkeys(name for bars in groups for name in bars))
    medians = [bar[1] for bars in groups for bar in bars.values() if bar[1] > 0]
    if not names or not medians:
        return
    width = BAR_SPACE / len(names)
    for number, name in enumerate(names):
        at = [index for index, bars in enumerate(groups) if name in bars]
        bars = [groups[index][name] for index in at]
        axes.bar(
            [index + (number + 0.5) * width - BAR_SPACE / 2 for index in at],
            [median for _, median, _ in bars],
            width,
            yerr=[[m - low for low, m, _ in bars], [high - m for _, m, high in bars]],
            label=name,
            capsize=2,
        )
    if max(medians) > LOG_FROM * min(medians):
        axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [case.name for case in cases], rotation=20)
    axes.legend(fontsize="small")
