"""Measurements of rounds: seconds by line, engine and round; chosen tokens; medians.

Pure. Rounds below 0 warm up and do not count.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.benchmarks.peers.peer import Seconds

Clock = Literal["cpu", "wall"]
MS_BELOW_S = 1.0  # a line's figures are in milliseconds if the largest is below


@dataclass(slots=True)
class Figures:
    """The measurements of one run.

    Attributes:

    seconds: by line, engine and round.

    ids: the answers of counted rounds, by question and engine.
    """

    seconds: dict[str, dict[str, dict[int, Seconds]]] = field(default_factory=dict)
    ids: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, line: str, name: str, number: int, took: Seconds) -> None:
        """Add the duration of a round to what it took before."""
        if number >= 0:
            rounds = self.seconds.setdefault(line, {}).setdefault(name, {})
            before = rounds.get(number, Seconds(0.0, 0.0))
            rounds[number] = Seconds(before.wall + took.wall, before.cpu + took.cpu)

    def chose(self, what: str, name: str, number: int, ids: list[list[int]]) -> None:
        """Record an answer."""
        if number >= 0:
            self.ids.setdefault(f"{what}, round {number}", {})[name] = ids

    def table(self, clock: Clock, names: list[str], ours: str) -> str:
        """Return a table in Markdown: medians, and the ratio to the best other engine, by round."""
        rows = [f"| | {' | '.join(names)} | {ours} / best |", f"|---|{'---|' * (len(names) + 1)}"]
        for line, by_name in self.seconds.items():
            # An interrupted run has rounds that not every engine has taken part in.
            rounds = sorted(set.intersection(*(set(by_name.get(name, ())) for name in names)))
            values = {
                name: [getattr(by_name[name][number], clock) for number in rounds] for name in names
            }
            if any(map(any, values.values())):  # otherwise it is a line of the other clock
                rows.append(f"| {line} | {_cells(values, ours)} |")
        return "\n".join(rows)

    def other_tokens(self, reference: str) -> Counter[str]:
        """Return how many answers of each engine differ from the reference's."""
        found = Counter[str]()
        for answers in self.ids.values():
            if reference in answers:
                expected = answers[reference]
                found.update(name for name, ids in answers.items() if ids != expected)
        return found


def _cells(values: dict[str, list[float]], ours: str) -> str:
    """Return medians, and the median of the rounds' ratios to the best other engine."""
    medians = {name: statistics.median(row) for name, row in values.items()}
    largest = max(medians.values())
    best = min(medians.keys() - {ours}, key=lambda name: medians[name])
    pairs = zip(values[ours], values[best], strict=True)
    ratio = statistics.median(mine / its for mine, its in pairs)
    cells = [_format_seconds(seconds, largest) for seconds in medians.values()]
    return " | ".join([*cells, f"{ratio:.2f} ({best})"])


def _format_seconds(seconds: float, largest: float) -> str:
    return f"{1000 * seconds:.1f} ms" if largest < MS_BELOW_S else f"{seconds:.2f} s"
