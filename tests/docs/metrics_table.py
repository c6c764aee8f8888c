"""Writes the tables of docs/metrics.md from those in the code.

python -m tests.docs.metrics_table

The text before the marker is written by hand.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from inference_svc.metrics.table import METRICS as INFERENCE
from kvd.following.figures import METRICS as FOLLOWING
from kvd.metrics.table import METRICS as KVD
from shared.serving.metric_export import Metric, MetricTable
from shared.serving.process_metrics import PROCESS_METRICS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
MARKER = "<!-- From here on:"
TABLES: dict[str, MetricTable] = {
    "kvd": KVD,
    "kvd remote follow": FOLLOWING,
    "inference-svc": INFERENCE,
}


def document() -> str:
    """Return the whole document."""
    by_hand, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(MARKER)
    marker = MARKER + rest.partition("\n")[0]
    parts = [by_hand + marker + "\n"]
    for title, table in TABLES.items():
        own = (row for row in table if row not in PROCESS_METRICS)
        parts.append("\n".join((f"## {title}", "", *_rows(own))) + "\n")
    parts.append("\n".join(("## Each process", "", *_rows(PROCESS_METRICS))) + "\n")
    return "\n".join(parts)


def _rows(rows: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | what |"
    yield "|---|---|---|---|"
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        values = ", ".join(f"`{value}`" for value in row.counters if value)
        what = f"{row.help} ({row.labels[-1]}: {values})" if values else row.help
        yield f"| `{row.name}` | {row.kind} | {labels} | {what} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
