"""What variants measured in turn, round by round, and the ratios of one round's. Pure."""

from collections.abc import Mapping, Sequence

from inference_svc.bench.figures import Case, Measured, Ratio
from shared.measuring.statistics import spread


class Interleaved:
    """One case's measurements.

    Args:
        name: of the case.
        facts: what it is, for readers.
    """

    def __init__(self, name: str, facts: Mapping[str, float]) -> None:
        self._name = name
        self._facts = dict(facts)
        self._found: dict[str, dict[int, Mapping[str, float]]] = {}
        self._num_discarded: dict[str, int] = {}
        self._ratios: list[Ratio] = []

    def add(self, variant: str, round_number: int, values: Mapping[str, float]) -> None:
        """Note one measurement: values by metric, whose name ends in its unit."""
        self._found.setdefault(variant, {})[round_number] = values

    def discard(self, variant: str) -> None:
        """Count a measurement that was not what the case says."""
        self._num_discarded[variant] = self._num_discarded.get(variant, 0) + 1

    def compare(self, metric: str, over: str, *under: str, at_most: float = 0.0) -> None:
        """Add the ratio of two variants, of rounds that have both: `over` by the least of `under`.

        Without such rounds there is no ratio. `at_most`: the goal, see Ratio.
        """
        self._compare(metric, over, under, at_most=at_most, at_least=0.0)

    def compare_gain(self, metric: str, over: str, under: str, at_least: float = 0.0) -> None:
        """Add a ratio that is the better, the greater it is."""
        self._compare(metric, over, (under,), at_most=0.0, at_least=at_least)

    def _compare(
        self, metric: str, over: str, under: Sequence[str], *, at_most: float, at_least: float
    ) -> None:
        series = [self._found.get(variant, {}) for variant in (over, *under)]
        rounds = set(series[0]).intersection(*series[1:])
        pairs = [
            found[0] / min(found[1:])
            for number in sorted(rounds)
            if (found := [values[number][metric] for values in series]) and min(found[1:]) > 0
        ]
        if pairs:
            below = under[0] if len(under) == 1 else f"min({', '.join(under)})"
            what = f"{over} / {below}"
            self._ratios.append(Ratio(what, metric, len(pairs), spread(pairs), at_most, at_least))

    def case(self) -> Case:
        """All of it, summed up."""
        names = [*self._found, *(set(self._num_discarded) - set(self._found))]
        return Case(
            self._name,
            self._facts,
            tuple(self._measured(name) for name in names),
            tuple(self._ratios),
        )

    def _measured(self, variant: str) -> Measured:
        rounds = self._found.get(variant, {}).values()
        metrics = dict.fromkeys(metric for values in rounds for metric in values)
        values = {
            metric: spread([found[metric] for found in rounds if metric in found])
            for metric in metrics
        }
        return Measured(variant, len(rounds), self._num_discarded.get(variant, 0), values)
