"""What a table of metrics is made of. Pure: the tables are literals in each process's metrics.py.

A counter or gauge may name where its values come from, `counters`: the value of its last label →
the name in the process's own counters ("" → name, where it has no such label). Then nobody has to
write code for it, and a test can see that no counter was forgotten.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_ENDINGS: Mapping[str, str] = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True)
class Metric:
    """One row of a table.

    Attributes:
        name: as it is scraped, without what Prometheus appends to histograms.
        help: one sentence, without a full stop.
        labels: their names.
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
    """Rows by name, in their order.

    Raises:
        AssertionError: a name is used twice, or does not say what it must.
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
        """Names of all samples."""
        return frozenset(name for row in self for name in row.exported_names)

    def counters(self) -> frozenset[str]:
        """Names of the process's own counters that some row exports."""
        return frozenset(name for row in self for name in row.counters.values())
