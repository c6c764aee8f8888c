"""Tables of metrics, and their scrapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from shared.serving.metric_export import Metric, MetricExporter, MetricTable
from shared.types.histogram import Histogram, Tally

TABLE = MetricTable(
    (
        Metric("a_build_info", "info", "What runs", ("version",)),
        Metric("a_loads_total", "counter", "Loads", ("layout", "result"), {"hit": "hits"}),
        Metric("a_stores_total", "counter", "Stores", ("layout",), {"": "stores"}),
        Metric("a_rows", "gauge", "Rows"),
        Metric("a_seconds", "histogram", "Time", ("layout",)),
        Metric("a_calls_total", "counter", "Calls", ("method", "code")),
        Metric("a_absent", "gauge", "Nothing has a value"),
    )
)


def scrape_samples(fill, accept=""):
    text = MetricExporter(TABLE, fill).render(accept)[0].decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }, text


def test_values_have_prometheus_format():
    """Each kind of metric is parsed back with its name, labels and value."""

    def fill(scrape):
        scrape.put("a_build_info", 1, "1.2")
        scrape.put_counters({"hits": 3, "stores": 4, "others": 9}, "l1")
        scrape.put("a_rows", 7)
        tally = Tally()
        tally.add("Get", "OK")
        tally.add("Get", "OK", amount=4)
        scrape.put_tally("a_calls_total", tally)

    samples, text = scrape_samples(fill)
    assert samples == {
        ("a_build_info", ("version", "1.2")): 1,
        ("a_loads_total", ("layout", "l1"), ("result", "hit")): 3,
        ("a_stores_total", ("layout", "l1")): 4,
        ("a_rows",): 7,
        ("a_calls_total", ("code", "OK"), ("method", "Get")): 5,
    }
    assert "# HELP a_absent Nothing has a value" in text


def test_openmetrics_on_request():
    """A scraper that asks for OpenMetrics gets it."""
    exporter = MetricExporter(TABLE, lambda scrape: scrape.put("a_rows", 1))
    body, content_type = exporter.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_buckets_are_cumulative(values):
    """A bucket counts the values up to its bound; the last one and the count, all of them."""
    histogram = Histogram((0.5, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    samples, _ = scrape_samples(lambda scrape: scrape.put_histogram("a_seconds", histogram, "l1"))
    if not values:
        assert not samples
        return
    for bound, shown in ((0.5, "0.5"), (1.0, "1.0"), (10.0, "10.0"), (1e9, "+Inf")):
        key = ("a_seconds_bucket", ("layout", "l1"), ("le", shown))
        assert samples[key] == sum(value <= bound for value in values)
    assert samples["a_seconds_count", ("layout", "l1")] == len(values)
    assert samples["a_seconds_sum", ("layout", "l1")] == pytest.approx(sum(values))


@pytest.mark.parametrize(
    "rows",
    [
        [Metric("a_b", "counter", "No _total")],
        [Metric("a_total", "gauge", "Not a counter")],
        [Metric("a_b", "info", "No _info")],
        [Metric("A-b", "gauge", "No name")],
        [Metric("a_b", "gauge", "Twice"), Metric("a_b", "gauge", "Twice")],
    ],
    ids=lambda rows: rows[0].help,
)
def test_invalid_tables_are_refused(rows):
    """With a name that Prometheus or this project forbids."""
    with pytest.raises(AssertionError):
        MetricTable(rows)


def test_unknown_names_and_labels_are_errors():
    """A value without a row, or with other labels, is a bug that shows at once."""

    def fill(scrape):
        with pytest.raises(KeyError):
            scrape.put("b_rows", 1)
        with pytest.raises(AssertionError):
            scrape.put("a_rows", 1, "label")

    scrape_samples(fill)
