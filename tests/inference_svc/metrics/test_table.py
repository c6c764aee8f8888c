"""The service's table of metrics has a row for every counter."""

from inference_svc.core.counters import COUNTERS
from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.metrics.table import METRICS

GAUGES = {  # of EngineLoop.gauges; a real service's are compared in tests/integration
    *(
        "reserved_token_slots",
        "resident_token_slots",
        "resident_sessions",
        "shared_token_slots",
        "pool_token_slots",
        "pool_free_token_slots",
    ),
    *("pool_misses", "saves_under_way", "compute_busy_s", "turn_places"),
    *("write_ring_token_slots", "write_ring_free_token_slots", "write_stall_s"),
}


def test_every_counter_is_exported():
    """Each counter, gauge and measured rate is in a row, and no row has an unknown one."""
    rates = Rates()
    for num_tokens in range(1, 200):
        seconds = 0.01 + num_tokens * 1e-4
        rates.steps.note(num_tokens, pairs(0, num_tokens), seconds)
        for tier in ("dram", "ssd"):
            rates.loads.note(tier, num_tokens, seconds)
    assert METRICS.counters() == {*COUNTERS, *GAUGES, *rates.as_dict()}


def test_names_have_the_prefix():
    """Every name says whose it is."""
    assert all(row.name.startswith(("inference_", "process_")) for row in METRICS)
