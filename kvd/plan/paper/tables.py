"""What a figure's table is made of: numbers of the text, and beside them what was planned. Pure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvd.plan.outcome import Outcome
from kvd.plan.paper.numbers import Stated
from kvd.plan.paper.runs import Run

OutcomeOf = Callable[[Run], Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """One number, three times.

    Attributes:
        unit: "%", "x" (times), "s", "h", "points" (of percent), "tokens/s".
        paper: as the paper states it; None: its text does not.
        preprint: as the preprint does.
        planned: as the replay has it.
    """

    label: str
    unit: str
    planned: float
    paper: Stated | None = None
    preprint: Stated | None = None

    @property
    def difference(self) -> float | None:
        """How far the plan is from the paper, or from the preprint if only that has a number."""
        stated = self.paper or self.preprint
        return None if stated is None else self.planned - stated.value

    def as_dict(self) -> dict[str, object]:
        """All of it, by name."""
        return {**asdict(self), "difference": self.difference}


@dataclass(frozen=True, slots=True)
class Table:
    """One figure.

    Attributes:
        figure: its number, and whose.
        notes: where and why plan and paper differ.
    """

    figure: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """All of it, by name."""
        return {
            "figure": self.figure,
            "title": self.title,
            "rows": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
        }


def notes(text: str, **values: float) -> tuple[str, ...]:
    """The paragraphs of a text of reasons.py, with numbers of the replays in them."""
    filled = text.format(**values)
    return tuple(" ".join(note.split()) for note in filled.split("\n\n"))


def ratio(part: float, whole: float) -> float:
    """0 if there is nothing to compare with."""
    return part / whole if whole else 0.0
