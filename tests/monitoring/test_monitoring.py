"""monitoring/ queries metrics, labels and values that exist, where they are served."""

import json
import re
from pathlib import Path

import pytest
import yaml

from inference_svc.metrics.table import METRICS as INFERENCE
from kvd.following.figures import METRICS as FOLLOWING
from kvd.metrics.table import METRICS as KVD

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "monitoring"
GRAFANA = FOLDER / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "cachedattention.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    **{f"alert {rule['alert']}": rule["expr"] for rule in ALERTS},
    **{
        f"panel {panel['id']}{target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
}
TABLES = (KVD, FOLLOWING, INFERENCE)
ROWS = {name: row for table in TABLES for row in table for name in row.exported_names}
SELECTOR = re.compile(r"\b((?:kvd|inference|process|up)(?:_\w+)?)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
OF_PROMETHEUS = {"le", "instance", "job"}


def selectors(query):
    """Return metrics with their label matchers, for each selector of the query."""
    without_groupings = GROUPING.sub("", query)
    for name, matchers in SELECTOR.findall(without_groupings):
        if name != "up":
            yield name, MATCHER.findall(matchers)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_metrics_and_labels_exist(query):
    """Metrics are in the documented tables, and so are their labels and values."""
    assert list(selectors(query)) or "up" in query
    for name, matchers in selectors(query):
        assert name in ROWS, f"{name} is no metric"
        row = ROWS[name]
        for label, pattern in matchers:
            assert label in {*row.labels, *OF_PROMETHEUS}, f"{name} has no label {label}"
            if row.labels[-1:] == (label,) and row.counters:
                assert set(pattern.split("|")) <= set(row.counters)
    labels = {label for name, _ in selectors(query) for label in ROWS[name].labels}
    for grouping in GROUPING.findall(query):
        named = {label.strip() for label in grouping.split(",")}
        assert named <= labels | OF_PROMETHEUS, f"{named - labels} are no labels of it"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_are_explained(rule):
    """An alert has a severity, a summary, and one sentence about its meaning."""
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    description = rule["annotations"]["description"]
    assert description.endswith(".")
    assert not re.search(r"\.\s+[A-Z]", description), "more than a sentence"


def test_alerts_have_a_remedy():
    """Each alert is in the runbook of docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in ALERTS if rule["alert"] not in text] == []


def test_prometheus_scrapes_the_documented_addresses():
    """Prometheus scrapes the addresses that the settings' examples name."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    for job, settings in (
        ("kvd", "kvd.toml"),
        ("kvd-remote", "kvd.toml"),
        ("inference-svc", "inference-svc.toml"),
    ):
        (target,) = jobs[job]
        assert f'"{target}"' in (ROOT / "systemd" / settings).read_text(encoding="utf-8")


def test_the_dashboard_finds_its_data():
    """Panels have distinct names, units and places, and query the provisioned data source."""
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    (source,) = sources["datasources"]
    providers = yaml.safe_load(
        (GRAFANA / "provisioning/dashboards/cachedattention.yml").read_text()
    )
    assert providers["providers"][0]["options"]["path"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"]
        assert panel["datasource"]["uid"] == source["uid"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_metric_of_failures_is_watched():
    """Every counter of failures is on the dashboard or in an alert."""
    asked = {name for query in QUERIES.values() for name, _ in selectors(query)}
    wrong = {name for name in ROWS if re.search(r"error|corrupt|degraded|quarantine|refus", name)}
    same = {"kvd_corrupt_copies_total", "kvd_ssd_refused_blocks_total", "kvd_quarantined_slots"}
    assert wrong - asked - same == set()
