"""docs/metrics.md equals the tables in the code."""

from tests.docs.metrics_table import DOCUMENT, TABLES, document


def test_the_document_is_current():
    """`python -m tests.docs.metrics_table` would write the same."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_every_metric_is_explained():
    """Each metric has a row, and a sentence that does not end with a full stop."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for table in TABLES.values():
        for row in table:
            assert f"| `{row.name}` |" in text
            assert row.help
            assert row.help[0].isupper() or row.help.startswith(("1 ", "gRPC"))
            assert not row.help.endswith(".")
