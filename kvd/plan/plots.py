"""Writes the charts of a plan: a page (.html), or a picture, for which matplotlib is needed."""

from pathlib import Path
from typing import Any

from kvd.plan.figures import PlanReport
from kvd.plan.page import Chart, capacity_ticks, charts, headline, page
from shared.measuring.plots import NoPlotError, picture
from shared.measuring.plots import check_plot as check_picture

PAGES = (".html", ".htm")


def check_plot(path: Path) -> None:
    """Raise NoPlotError if a plot could not be made: before the minutes that planning takes."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise NoPlotError(f"{path} cannot be written", "name a file in a directory that exists")
    if path.suffix not in PAGES:
        check_picture(path)


def plot(report: PlanReport, path: Path) -> None:
    """Write the page or the picture; the file's name says which.

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
            f"{path} cannot be written ({error.strerror})", "name another file with --plot"
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
