"""Tables of metrics, and their export to Prometheus: values are read when they are scraped.

The tables are literals of `Metric` in each process. A counter or gauge may say where its values
come from, in `counters`: the name in the process's own counters, by the value of its last label
(by "" if it has no such label). Then no code is needed for it, and a test can check that no counter
was forgotten.

`Scrape` collects the values of one scrape by the names of the table. `MetricExporter` renders them
in the text format that the scraper accepts, or OpenMetrics.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from shared.types.histogram import Histogram, Labels, Tally

Kind = Literal["counter", "gauge", "histogram", "info"]
NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_ENDINGS: Mapping[str, str] = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True)
class Metric:
    """One metric, as a row of a table.

    Attributes:
        name: name as it is scraped, without what Prometheus appends to histograms.
        kind: "counter", "gauge", "histogram" or "info".
        help: one sentence, without a full stop.
        labels: names of its labels.
        counters: see the module docstring.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    counters: Mapping[str, str] = field(default_factory=dict)

    @property
    def exported_names(self) -> tuple[str, ...]:
        """Names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


class MetricTable:
    """The metrics of a process by name, in their order.

    Raises:
        AssertionError: a name is used twice, or does not fit its kind.
    """

    def __init__(self, rows: Sequence[Metric]) -> None:
        self._rows = {row.name: row for row in rows}
        assert len(self._rows) == len(rows), "a name is used twice"  # noqa: S101
        for row in rows:
            assert NAME.match(row.name), row.name  # noqa: S101
            assert row.name.endswith(_ENDINGS.get(row.kind, "")), row.name  # noqa: S101
            is_total = row.name.endswith(("_total", "_info"))
            assert is_total == (row.kind in _ENDINGS), row.name  # noqa: S101

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._rows.values())

    def __getitem__(self, name: str) -> Metric:
        return self._rows[name]

    def exported_names(self) -> frozenset[str]:
        """Return the names of all samples."""
        return frozenset(name for row in self for name in row.exported_names)

    def counters(self) -> frozenset[str]:
        """Return the names of the process's own counters that some row exports."""
        return frozenset(name for row in self for name in row.counters.values())


class Scrape:
    """The values of one scrape.

    Args:
        table: every name must be in it, with as many labels.
    """

    def __init__(self, table: MetricTable) -> None:
        self._table = table
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._histograms: dict[str, list[tuple[Labels, Histogram]]] = defaultdict(list)

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set one value. Of equal labels the last value counts."""
        assert len(labels) == len(self._table[name].labels), name  # noqa: S101
        self._values[name][labels] = value

    def put_tally(self, name: str, tally: Tally, *labels: str) -> None:
        """Set values from all counts of a tally. `labels` come before the tally's own."""
        for own, count in tally.counts.items():
            self.put(name, count, *labels, *own)

    def put_counters(self, counters: Mapping[str, float], *labels: str) -> None:
        """Fill every row that names counters of the process, as far as there are such counters.

        A row is skipped unless its labels are `labels`, or `labels` and one more.
        """
        for row in self._table:
            for value, name in row.counters.items():
                own = (*labels, value) if value else labels
                if name in counters and len(own) == len(row.labels):
                    self.put(row.name, counters[name], *own)

    def put_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add all series of a histogram. `labels` come before the histogram's own."""
        self._histograms[name].append((labels, histogram))

    def families(self) -> Iterable[MetricFamily]:
        """Yield all metrics as objects of the client library, in the table's order."""
        for row in self._table:
            yield (
                _histogram(row, self._histograms[row.name])
                if row.kind == "histogram"
                else (_family(row, self._values[row.name]))
            )


class MetricExporter:
    """Renders the metrics of a table.

    Args:
        table: the table.
        fill: sets the current values.
    """

    def __init__(self, table: MetricTable, fill: Callable[[Scrape], None]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_TableCollector(table, fill))

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _TableCollector(Collector):
    def __init__(self, table: MetricTable, fill: Callable[[Scrape], None]) -> None:
        self._table = table
        self._fill = fill

    def describe(self) -> Iterable[MetricFamily]:
        return ()

    def collect(self) -> Iterable[MetricFamily]:
        scrape = Scrape(self._table)
        self._fill(scrape)
        return scrape.families()


def _family(row: Metric, values: Mapping[Labels, float]) -> MetricFamily:
    if row.kind == "info":
        info = InfoMetricFamily(row.name.removesuffix("_info"), row.help)
        for labels in values:
            info.add_metric((), dict(zip(row.labels, labels, strict=True)))
        return info
    family: CounterMetricFamily | GaugeMetricFamily
    if row.kind == "counter":
        family = CounterMetricFamily(row.name, row.help, labels=row.labels)
    else:
        family = GaugeMetricFamily(row.name, row.help, labels=row.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(row: Metric, parts: Iterable[tuple[Labels, Histogram]]) -> MetricFamily:
    family = HistogramMetricFamily(row.name, row.help, labels=row.labels)
    for labels, histogram in parts:
        bounds = [*map(_bound, histogram.bounds), "+Inf"]
        for own, series in histogram.series.items():
            assert len(labels) + len(own) == len(row.labels), row.name  # noqa: S101
            buckets = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric((*labels, *own), buckets, series.total)
    return family


def _bound(value: float) -> str:
    return repr(float(value))
