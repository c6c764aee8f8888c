"""What a plan finds. Frozen values; report.py writes them down, plots draw them. Pure.

The names of the fields are the names in the JSON document, which scripts read: a field is added
freely, but renamed or removed only with a new number in SCHEMA.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvd.plan.hardware import EngineConstants, PlannedModel
from kvd.plan.outcome import Outcome
from kvd.plan.prices import Cost, Prices

SCHEMA = "kvd.plan/1"
RECOMPUTE = "re"  # the name of the baseline among policies: nothing is kept


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of each tier; hbm_bytes 0: only slots bound what runs."""

    hbm_bytes: int
    dram_bytes: int
    ssd_bytes: int

    @property
    def total_bytes(self) -> int:
        """What sessions are kept in between their turns."""
        return self.dram_bytes + self.ssd_bytes


@dataclass(frozen=True, slots=True)
class Result:
    """One policy with one capacity.

    Attributes:
        cost_ratio: its cost by that of recomputing everything; 0: that costs nothing.
    """

    policy: str
    capacity: Capacity
    outcome: Outcome
    cost: Cost
    cost_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """Flat, as a row of a table."""
        return {
            "policy": self.policy,
            **asdict(self.capacity),
            **self.outcome.as_dict(),
            "cost": self.cost.as_dict(),
            "cost_against_re": self.cost_ratio,
        }


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """The sessions that were replayed, as they arrived.

    Attributes:
        footprint_bytes: room that would never need an eviction, as tiers are charged.
        longest_tokens: the largest context.
        recompute_load: see kvd.plan.load.
    """

    origin: str
    num_sessions: int
    num_turns: int
    footprint_tokens: int
    footprint_bytes: int
    longest_tokens: int
    span_s: float
    recompute_load: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything of one plan.

    Attributes:
        options: what the replays were told, by name.
        baselines: of recomputing everything, one for each HBM.
        results: in the order of the sweep: capacities, and policies within each.
    """

    command: tuple[str, ...]
    version: str
    elapsed_s: float
    workload: WorkloadFacts
    model: PlannedModel
    engine: EngineConstants
    num_gpus: int
    prices: Prices
    options: Mapping[str, Any]
    baselines: tuple[Result, ...]
    results: tuple[Result, ...]
