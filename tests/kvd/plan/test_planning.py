"""From a request to priced results."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvd.plan.arguments import request_of
from kvd.plan.options import (
    ArrivalArguments,
    CapacityArguments,
    CostArguments,
    EngineArguments,
    KvdArguments,
    ServerArguments,
)
from kvd.plan.planning import make_plan
from kvd.plan.prices import Prices
from kvd.plan.sizes import GB

REQUEST = request_of(
    ArrivalArguments(trace=Path("tests/data/trace_sample.jsonl.gz"), warmup_turns="0"),
    EngineArguments(),
    CapacityArguments(hbm="0,20GB", dram="1GB", ssd="4GB,16GB"),
    ServerArguments(),
    KvdArguments(policy="lru"),
    CostArguments(jobs=1),
    ("kvd", "plan"),
)


@pytest.fixture(scope="module")
def report():
    """Make a report of two HBMs with two SSDs each."""
    progress = []
    found = make_plan(REQUEST, progress.append)
    assert progress[-1] == REQUEST.num_replays * 88
    return found


def test_results_have_the_order_of_the_sweep(report):
    """Each HBM with each SSD; one baseline per HBM."""
    sizes = [(each.capacity.hbm_bytes, each.capacity.ssd_bytes // GB) for each in report.results]
    assert sizes == [(0, 4), (0, 16), (20 * GB, 4), (20 * GB, 16)]
    assert [each.capacity.hbm_bytes for each in report.baselines] == [0, 20 * GB]


def test_gpus_are_paid_while_they_compute_and_tiers_all_the_time(report):
    """GPU hours, and the hours of the whole replay for each GB."""
    result, prices = report.results[1], Prices()
    hours = result.outcome.span_s / 3600
    assert result.cost.gpu == pytest.approx(2 * prices.gpu * result.outcome.gpu_hours)
    assert result.cost.dram == pytest.approx(1 * prices.dram_gb * hours)
    assert result.cost.ssd == pytest.approx(16 * prices.ssd_gb * hours)
    assert result.outcome.gpu_hours <= hours


def test_recomputing_pays_no_tiers(report):
    """It is the baseline of the others with the same HBM."""
    baseline = report.baselines[1]
    assert (baseline.cost.dram, baseline.cost.ssd, baseline.cost_ratio) == (0.0, 0.0, 1.0)
    assert baseline.outcome.num_hits == 0
    found = report.results[2]
    assert found.cost_ratio == pytest.approx(found.cost.total / baseline.cost.total)


def test_the_report_has_everything_that_was_requested(report):
    """So that a document says how it was made."""
    assert report.workload.num_turns == 88
    assert report.workload.footprint_bytes == report.workload.footprint_tokens * 780_000
    assert report.options["tiers"] == "inclusive"
    assert (report.command, report.num_gpus) == (("kvd", "plan"), 2)


def test_without_costs_there_is_no_ratio():
    """Nothing by nothing is no number."""
    free = replace(REQUEST, prices=Prices(0.0, 0.0, 0.0), capacities=REQUEST.capacities[:1])
    (found,) = make_plan(free, lambda _: None).results
    assert (found.cost.total, found.cost_ratio) == (0.0, 0.0)


def test_several_servers_are_priced_together():
    """The replayed servers' measurements count for all; RE has one baseline per number."""
    request = request_of(
        ArrivalArguments(generate="sharegpt-like", sessions=120, rate=0.5, warmup_turns="0"),
        EngineArguments(),
        CapacityArguments(dram="20GB", ssd="100GB"),
        ServerArguments(servers="1,6", replayed=2, routing="ring,random"),
        KvdArguments(policy="lru"),
        CostArguments(jobs=1),
        ("kvd", "plan"),
    )
    report = make_plan(request, lambda _: None)
    assert [(found.fleet.num_servers, found.fleet.routing) for found in report.results] == [
        (1, "ring"), (6, "ring"), (6, "random"),
    ]  # fmt: skip
    one, ring, random = report.results
    assert ring.outcome.num_turns == random.outcome.num_turns < one.outcome.num_turns
    assert ring.outcome.hits_tok > 2 * random.outcome.hits_tok
    assert ring.cost.gpu == pytest.approx(3 * ring.outcome.gpu_hours * 2 * 5.0)
    assert ring.cost.dram / 6 == pytest.approx(one.cost.dram, rel=0.5)  # for about as long
    assert [found.fleet.num_servers for found in report.baselines] == [1, 6]
    assert ring.cost_ratio == ring.cost.total / report.baselines[1].cost.total
