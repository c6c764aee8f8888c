"""What `inference-svc status` shows: gauges and counters with their meaning and unit."""

import pytest
from rich.console import Console

from inference_svc.cli.status import format_gauge, status_lines, status_tables
from inference_svc.core.counters import COUNTERS
from shared.pb.inference.v1 import inference_pb2 as pb


def test_status_shows_gauges_and_counters_with_their_meaning():
    """A person sees units and explanations; counters unknown to this version come last."""
    model = pb.Model(
        name="tiny",
        gauges={"pool_bytes": 1 << 20, "retry_after_s": 0.25, "waiting": 3.0},
        counters={"turns_finished": 1234, "future": 5},
    )
    console = Console(width=120)
    with console.capture() as captured:
        for table in status_tables(model):
            console.print(table)
    shown = captured.get()
    for said in ("tiny", "1.0 MB", "250 ms", "1,234", COUNTERS["turns_finished"], "future"):
        assert said in shown
    assert shown.index("turns_finished") < shown.index("future")


def test_status_fits_a_screen():
    """The most important lines in 80 columns and 24 lines; for a new service, too."""
    counts = {"turns_finished": 12, "history_tokens": 2000, "reused_tokens": 1900}
    counts |= {"recomputed_tokens": 100, "output_tokens": 600, "load_errors": 2, "expired": 0}
    gauges = {"uptime_s": 507.0, "compute_busy_s": 20.0, "ttft_p50_s": 0.025, "ttft_p95_s": 0.2}
    model = pb.Model(name="tiny", counters=counts, gauges=gauges)
    lines = list(status_lines(model, 80))
    shown = " ".join(" ".join(lines).split())
    for said in ("95.0% of 2,000", "after 25 ms", "30 tokens/s", "up 8m27s", "12 answered"):
        assert said in shown
    assert f"troubles 2 {COUNTERS['load_errors']}" in shown
    screens = (lines, list(status_lines(pb.Model(name="new"), 80)))
    for screen in screens:
        rows = "\n".join(screen).splitlines()
        assert len(rows) < 24
        assert max(map(len, rows)) <= 80
    assert "none yet" in "".join(screens[1])


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("prefill_tokens_per_s", 12345.6, "12,346 /s"),
        ("load_s", 0.002, "2 ms"),
        ("resident_bytes", 2048.0, "2.0 KB"),
        ("kv_tokens", 4096.0, "4,096"),
        ("busy", 0.4567, "0.457"),
    ],
)
def test_gauges_are_shown_with_their_unit(name, value, shown):
    """The end of the name is the unit."""
    assert format_gauge(name, value) == shown
