"""Plans for tests of reports, made without a replay."""

from kvd.plan.figures import Capacity, PlanReport, Result, WorkloadFacts
from kvd.plan.fleet import ONE_SERVER, FleetOptions
from kvd.plan.hardware import MODELS, EngineConstants
from kvd.plan.outcome import Outcome
from kvd.plan.prices import Cost, Prices
from kvd.plan.sizes import GB

OPTIONS = {
    "tiers": "inclusive",
    "charge": "packed",
    "ttl_s": None,
    "watermark": 0.02,
    "warmup_turns": 10,
    "load_policy": "auto",
    "end_hints": False,
    "tool_hints": True,
    "think_scale": 1.0,
    "ssd_bytes_per_s": 5e9,
    "pcie_bytes_per_s": 25e9,
}


def outcome(tok: float = 0.0, **facts: float) -> Outcome:
    """Make an outcome of a hundred turns with these values."""
    known: dict[str, float] = dict.fromkeys(Outcome.__dataclass_fields__, 0)
    known |= {"num_turns": 110, "num_turns_measured": 100, "hits_tok": tok, "gpu_hours": 1.0}
    return Outcome(**(known | facts))  # type: ignore[arg-type]


def result(
    policy: str,
    dram_gb: int,
    ssd_gb: int,
    tok: float,
    cost: float,
    hbm_gb: int = 0,
    fleet: FleetOptions = ONE_SERVER,
    **facts: float,
) -> Result:
    """Make a policy's result at a capacity; recomputing everything costs 10."""
    capacity = Capacity(hbm_gb * GB, dram_gb * GB, ssd_gb * GB)
    found = outcome(tok, **({"recompute_load": 1.25, "queue_mean": 37.0, "num_hits": 5} | facts))
    return Result(policy, capacity, found, Cost(cost, 0.0, 0.0), cost / 10, fleet)


def plan(*results: Result) -> PlanReport:
    """Make a report of these results."""
    return PlanReport(
        command=("kvd", "plan", "--trace", "a<b>.jsonl"),
        version="1",
        elapsed_s=2.0,
        workload=WorkloadFacts("a<b>.jsonl", 9, 110, 1000, 1 << 30, 500, 60.0, 1.25),
        model=MODELS["llama-13b"],
        engine=EngineConstants(),
        num_gpus=2,
        prices=Prices(),
        options=OPTIONS,
        baselines=(result("re", 0, 0, 0.0, 10.0),),
        results=results,
    )


def swept() -> PlanReport:
    """Make two policies over four capacities; lru bends at 128 GB, 256 GB are its cheapest."""
    return plan(
        *(
            each
            for size, lru, belady, cost in (
                (64, 0.1, 0.5, 9.0),
                (128, 0.6, 0.8, 6.0),
                (256, 0.7, 0.9, 5.5),
                (512, 0.8, 0.95, 5.8),
            )
            for each in (
                result("lru", size // 16, size - size // 16, lru, cost),
                result("belady", size // 16, size - size // 16, belady, cost - 1),
            )
        )
    )
