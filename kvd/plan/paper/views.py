"""The figures' tables for people. Pure."""

from collections.abc import Iterator

from rich.table import Table as RichTable

from kvd.plan.paper.numbers import Stated
from kvd.plan.paper.reproduction import PaperReport
from kvd.plan.paper.tables import Row, Table

_DIGITS = {"%": 1, "points": 1, "x": 2, "s": 3, "h": 2, "tokens/s": 0}
_NOT_STATED = "-"


def paper_tables(report: PaperReport) -> Iterator[RichTable]:
    """One table a figure, and what the columns mean."""
    yield _legend(report)
    for table in report.tables:
        yield _figure(table)


def _legend(report: PaperReport) -> RichTable:
    legend = RichTable(box=None, show_header=False)
    scale = report.sample.scale
    size = "of the paper's size" if scale == 1 else f"{scale:.0%} of the paper's size"
    size += "" if scale == 1 else ": for a first look, the notes are about the full size"
    legend.add_row("replays", f"{report.num_replays}, {report.num_turns} turns")
    legend.add_row("sessions", f"like ShareGPT's, seed {report.sample.seed}, {size}")
    legend.add_row("paper", "CachedAttention (ATC 2024): what its text says; * as derived from it")
    legend.add_row("preprint", "AttentionStore, its earlier version, with another workload")
    legend.add_row(_NOT_STATED, "the text does not say it; nothing is measured off a plot")
    legend.add_row("difference", "kvd plan less the paper (the preprint where only that says it)")
    return legend


def _figure(table: Table) -> RichTable:
    caption = "\n".join(f"- {note}" for note in table.notes)
    figure = RichTable(
        box=None,
        title=f"{table.figure}: {table.title}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    figure.add_column("")
    for heading in ("paper", "preprint", "kvd plan", "difference"):
        figure.add_column(heading, justify="right")
    figure.add_column("")
    figure.add_column("where")
    for row in table.rows:
        figure.add_row(*_cells(row))
    return figure


def _cells(row: Row) -> tuple[str, ...]:
    stated = row.paper or row.preprint
    difference = row.difference
    return (
        row.label,
        _stated(row.paper, row.unit),
        _stated(row.preprint, row.unit),
        _number(row.planned, row.unit),
        _NOT_STATED if difference is None else f"{difference:+.{_DIGITS[row.unit]}f}",
        row.unit,
        "" if stated is None else stated.where,
    )


def _stated(stated: Stated | None, unit: str) -> str:
    if stated is None:
        return _NOT_STATED
    words = (stated.hedge, f"{stated.value:g}" if unit != "tokens/s" else f"{stated.value:.0f}")
    return " ".join(word for word in words if word) + ("*" if stated.derived else "")


def _number(value: float, unit: str) -> str:
    return f"{value:.{_DIGITS[unit]}f}"
