"""A figure as a table: the paper's numbers beside the plan's, and its layout for people. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as RichTable

from kvd.plan.outcome import Outcome
from kvd.plan.paper.numbers import PAPER, PAPER_MODELS, PREPRINT, Stated
from kvd.plan.paper.runs import Run, Sample

SCHEMA = "kvd.plan.paper/1"
OutcomeOf = Callable[[Run], Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: as planned, as in the paper, and as in the preprint.

    Attributes:
        label: its name.
        unit: "%", "x" (times), "s", "h", "points" (of percent), "tokens/s".
        planned: the value of the replay.
        paper: the paper's value; None: its text has none.
        preprint: the preprint's value; None: its text has none.
    """

    label: str
    unit: str
    planned: float
    paper: Stated | None = None
    preprint: Stated | None = None

    @property
    def difference(self) -> float | None:
        """The plan's value minus the paper's, or the preprint's if only that has one."""
        stated = self.paper or self.preprint
        return None if stated is None else self.planned - stated.value

    def as_dict(self) -> dict[str, object]:
        """Return the row as plain values, by name."""
        return {**asdict(self), "difference": self.difference}


@dataclass(frozen=True, slots=True)
class Table:
    """One figure.

    Attributes:
        figure: its number, and the document's name.
        title: its title.
        rows: its quantities.
        notes: where and why plan and paper differ.
    """

    figure: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the table as plain values, by name."""
        return {
            "figure": self.figure,
            "title": self.title,
            "rows": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class PaperReport:
    """All tables.

    Attributes:
        sample: the sessions.
        num_replays: number of replays.
        num_turns: turns over all replays.
        tables: the figures.
    """

    sample: Sample
    num_replays: int
    num_turns: int
    tables: tuple[Table, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values, by name."""
        return {
            "schema": SCHEMA,
            "seed": self.sample.seed,
            "scale": self.sample.scale,
            "num_replays": self.num_replays,
            "num_turns": self.num_turns,
            "tables": [table.as_dict() for table in self.tables],
        }


def stated_row(
    label: str, unit: str, planned: float, stated: Mapping[str, Mapping[Any, Stated]], key: object
) -> Row:
    """Return a row with the values that paper and preprint state for `key`."""
    return Row(label, unit, planned, stated[PAPER].get(key), stated[PREPRINT].get(key))


def model_rows(
    unit: str,
    planned: Callable[[str], float],
    stated: Mapping[str, Mapping[str, Stated]],
    label: str = "{}",
) -> list[Row]:
    """Return a row for each of the paper's models; the label contains the model's name."""
    return [
        stated_row(label.format(model), unit, planned(model), stated, model)
        for model in PAPER_MODELS
    ]


def notes(text: str, **values: float) -> tuple[str, ...]:
    """Return the paragraphs of a text of reasons.py, with the numbers put in."""
    filled = text.format(**values)
    return tuple(" ".join(note.split()) for note in filled.split("\n\n"))


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if whole is 0."""
    return part / whole if whole else 0.0


_DIGITS = {"%": 1, "points": 1, "x": 2, "s": 3, "h": 2, "tokens/s": 0}
_NOT_STATED = "-"


def paper_tables(report: PaperReport) -> Iterator[RichTable]:
    """Yield a legend, and a table per figure."""
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
