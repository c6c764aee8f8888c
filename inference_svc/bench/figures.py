"""The results of a run of the bench: frozen values, which report.py writes down. Pure.

The names of the fields are the names in the JSON document, which scripts read. Fields may be added
freely; renaming or removing one needs a new number in SCHEMA. `Interleaved` collects what variants
measured in turn, round by round, and compares measurements of the same round.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf

from shared.measuring.statistics import Spread, spread

SCHEMA = "inference_svc.bench/1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant of a case.

    Attributes:
        variant: the variant's name.
        num: number of measurements that count.
        num_discarded: number of measurements that do not: the history was not where the case
            requires.
        values: measurements by metric, whose name ends in its unit: "ttft_s", "tokens_per_s".
    """

    variant: str
    num: int
    num_discarded: int
    values: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two variants, measured one right after the other, compared pair by pair.

    Attributes:
        what: "a / b", or "a / min(b, c)".
        metric: the metric's name.
        num_pairs: number of pairs.
        ratio: the ratios of the pairs.
        at_most, at_least: the project's goal; 0: none is set.
    """

    what: str
    metric: str
    num_pairs: int
    ratio: Spread
    at_most: float = 0.0
    at_least: float = 0.0

    @property
    def goal(self) -> str:
        """The goal for display; "" if there is none."""
        if self.at_most:
            return f"<= {self.at_most:g}"
        return f">= {self.at_least:g}" if self.at_least else ""

    @property
    def is_met(self) -> bool:
        """Whether the median meets the goal."""
        if self.at_most:
            return self.ratio.median <= self.at_most
        return self.ratio.median >= self.at_least


@dataclass(frozen=True, slots=True)
class Case:
    """One setting, in which variants were measured in turn.

    Attributes:
        name: the case's name.
        facts: history_tokens, new_tokens and other numbers that define the case.
        variants: the measurements of each variant.
        ratios: the compared variants.
        notes: lines for display.
    """

    name: str
    facts: Mapping[str, float]
    variants: tuple[Measured, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that was measured.

    Attributes:
        name: name of the directory, or of the preset ("random" is then true).
        layers, attention_mode, kv_bytes_per_token, block_tokens: see `inference-svc status`.
        threads: number of threads that computed, the same for every variant.
    """

    name: str
    architecture: str
    random: bool
    layers: int
    num_weights: int
    dtype: str
    device: str
    threads: int
    attention_mode: str
    kv_bytes_per_token: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that it was measured on.

    Attributes:
        cpus: number of CPUs that this process may use.
        load_average: load of the last minute before the run; much above 0 is a busy machine.
        huge_pages: when private memory gets transparent huge pages.
        accelerator: its name; "" without one.
    """

    cpu: str
    cpus: int
    load_average: float
    memory_bytes: int
    huge_pages: str
    kernel: str
    accelerator: str
    python: str
    inference_svc: str
    libraries: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run.

    Attributes:
        part: "turns", "overlap", "buffers", "serve", "policies" or "decode".
        metric: the main metric of the part, which a plot shows.
    """

    part: str
    metric: str
    command: tuple[str, ...]
    started_unix_s: float
    elapsed_s: float
    subject: Subject
    machine: Machine
    cases: tuple[Case, ...] = field(default=())


def as_document(report: Report) -> dict[str, object]:
    """Return the report for json.dumps: the fields, `schema`, and every goal with its verdict."""
    goals = [
        {
            "case": case.name,
            "what": ratio.what,
            "metric": ratio.metric,
            "goal": ratio.goal,
            "measured": ratio.ratio.median,
            "met": ratio.is_met,
        }
        for case in report.cases
        for ratio in case.ratios
        if ratio.goal
    ]
    return {"schema": SCHEMA, **asdict(report), "goals": goals}


class Interleaved:
    """Collects the measurements of one case.

    Args:
        name: name of the case.
        facts: the numbers that define it, for readers.
    """

    def __init__(self, name: str, facts: Mapping[str, float]) -> None:
        self._name = name
        self._facts = dict(facts)
        self._found: dict[str, dict[int, Mapping[str, float]]] = {}
        self._num_discarded: dict[str, int] = {}
        self._ratios: list[Ratio] = []

    def add(self, variant: str, round_number: int, values: Mapping[str, float]) -> None:
        """Add one measurement: values by metric, whose name ends in its unit."""
        self._found.setdefault(variant, {})[round_number] = values

    def discard(self, variant: str) -> None:
        """Count a measurement that was not what the case requires."""
        self._num_discarded[variant] = self._num_discarded.get(variant, 0) + 1

    def compare(
        self, metric: str, over: str, *under: str, at_most: float = 0.0, at_least: float = 0.0
    ) -> None:
        """Add the ratio of two variants, from the rounds that have both.

        There is no ratio without such rounds.

        Args:
            metric: the metric to compare.
            over: the numerator.
            under: the variants of which the least is the denominator.
            at_most: the goal; see Ratio.
            at_least: the goal; see Ratio.
        """
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

    def median(self, metric: str, variant: str) -> float:
        """Return a variant's median so far; infinite if it was not measured."""
        values = self._values(variant).get(metric)
        return spread(values).median if values else inf

    def case(self) -> Case:
        """Return the case with all its measurements and ratios."""
        names = [*self._found, *(set(self._num_discarded) - set(self._found))]
        return Case(
            self._name,
            self._facts,
            tuple(self._measured(name) for name in names),
            tuple(self._ratios),
        )

    def _measured(self, variant: str) -> Measured:
        values = {metric: spread(found) for metric, found in self._values(variant).items()}
        num = len(self._found.get(variant, {}))
        return Measured(variant, num, self._num_discarded.get(variant, 0), values)

    def _values(self, variant: str) -> dict[str, list[float]]:
        """Return all measurements of a variant, by metric."""
        values: dict[str, list[float]] = {}
        for found in self._found.get(variant, {}).values():
            for metric, value in found.items():
                values.setdefault(metric, []).append(value)
        return values
