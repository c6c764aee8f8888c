"""What a plan finds, and where more capacity stops paying. Frozen values for report.py. Pure.

The names of the fields are the names in the JSON document, which scripts read: a field is added
freely, but renamed or removed only with a new number in SCHEMA.

The *knee* of a curve of hit rates is its point farthest above the straight line from its first
point to its last, with both axes scaled to 0..1 and capacity in bytes: before it a byte brings more
than in the mean, after it less. The *cheapest* point is that of the least cost: it knows prices.

*Source:* V. Satopää et al., Finding a "kneedle" in a haystack, 2011 (without its smoothing: a sweep
has few points, and none of them is noise).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.plan.fleet import ONE_SERVER, FleetOptions
from kvd.plan.hardware import EngineConstants, PlannedModel
from kvd.plan.outcome import Outcome
from kvd.plan.prices import Cost, Prices
from kvd.plan.sizes import format_size

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
        capacity: each server's.
        outcome: what was measured of the servers that were replayed.
        cost: cost of all servers.
        cost_ratio: cost, divided by that of recomputing everything; 0: that costs nothing.
    """

    policy: str
    capacity: Capacity
    outcome: Outcome
    cost: Cost
    cost_ratio: float
    fleet: FleetOptions = ONE_SERVER

    def of_all(self, value: float) -> float:
        """Return what all servers have of what was measured of those that were replayed."""
        return value / self.fleet.share

    @property
    def store_requests_per_s(self) -> float:
        """Requests of all servers to the remote store."""
        outcome = self.outcome
        requests = self.of_all(outcome.store_puts + outcome.store_gets)
        return requests / outcome.span_s if outcome.span_s else 0.0

    @property
    def cost_of_million(self) -> float:
        """Cost of a million prompt tokens; 0: there were none."""
        tokens = self.of_all(self.outcome.prompt_tokens)
        return self.cost.total / tokens * 1e6 if tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it flat, as a row of a table."""
        return {
            "policy": self.policy,
            **asdict(self.capacity),
            **asdict(self.outcome),
            "cost": self.cost.as_dict(),
            "cost_against_re": self.cost_ratio,
            "fleet": asdict(self.fleet),
        }


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """The sessions that were replayed, as they arrived.

    Attributes:
        footprint_bytes: room that would never need an eviction, as tiers are charged.
        longest_tokens: the largest context.
        recompute_load: see kvd.plan.hardware.
        num_tool_turns: turns whose answer calls tools.
    """

    origin: str
    num_sessions: int
    num_turns: int
    footprint_tokens: int
    footprint_bytes: int
    longest_tokens: int
    span_s: float
    recompute_load: float
    num_tool_turns: int = 0


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything of one plan.

    Attributes:
        options: what the replays were given, by name.
        baselines: results of recomputing everything, one for each HBM.
        results: results in the order of the sweep: capacities, and policies within each.
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


LEAST_POINTS = 3  # that a knee can be seen in
LEAST_BEND = 0.05  # above the straight line, as a share of the axis: less is no knee
LEAST_RISE = 0.01  # of a hit rate over the whole curve: less, and the least capacity will do


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's results by capacity, smallest first.

    Attributes:
        name: name of the policy, with what else tells it from the other curves.
        knee: index into results; None: there is none.
        cheapest: the same.
    """

    name: str
    policy: str
    results: tuple[Result, ...]
    knee: int | None
    cheapest: int


def curves_of(results: Sequence[Result]) -> list[Curve]:
    """Return one curve for each policy and, if these were swept too, HBM and DRAM."""
    hbms = {result.capacity.hbm_bytes for result in results}
    names: dict[str, list[Result]] = {}
    for result in results:
        names.setdefault(_name(result, results, has_hbms=len(hbms) > 1), []).append(result)
    return [_curve(name, found) for name, found in names.items()]


def knee_of(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the knee of a rising curve, see above; None: too few points, or none.

    Args:
        points: capacity and hit rate, by rising capacity.
    """
    if len(points) < LEAST_POINTS:
        return None
    left, right = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if right <= left or high - low < LEAST_RISE:
        return None
    first, last = ((y - low) / (high - low) for y in (points[0][1], points[-1][1]))
    bends = []
    for x, y in points:
        along = (x - left) / (right - left)
        bends.append((y - low) / (high - low) - (first + (last - first) * along))
    best = max(range(len(points)), key=bends.__getitem__)
    return best if bends[best] >= LEAST_BEND else None


def _name(result: Result, results: Sequence[Result], *, has_hbms: bool) -> str:
    """Name a curve, by DRAM too if several sizes of it stand beside the same SSD."""
    parts = [result.policy]
    if result.fleet.num_servers > 1:
        parts.append(f"{result.fleet.num_servers} servers, {result.fleet.routing}")
    capacity = result.capacity
    if has_hbms:
        parts.append(f"HBM {format_size(capacity.hbm_bytes)}")
    ssds_of_dram = {
        other.capacity.ssd_bytes
        for other in results
        if other.capacity.dram_bytes == capacity.dram_bytes
    }
    drams = {other.capacity.dram_bytes for other in results}
    if len(drams) > 1 and len(ssds_of_dram) > 1:
        parts.append(f"DRAM {format_size(capacity.dram_bytes)}")
    return ", ".join(parts)


def _curve(name: str, results: Sequence[Result]) -> Curve:
    ordered = tuple(sorted(results, key=lambda result: result.capacity.total_bytes))
    points = [(result.capacity.total_bytes, result.outcome.hits_tok) for result in ordered]
    cheapest = min(range(len(ordered)), key=lambda index: ordered[index].cost.total)
    return Curve(name, ordered[0].policy, ordered, knee_of(points), cheapest)
