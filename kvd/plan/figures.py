"""The results of a plan, and where more capacity stops paying. Frozen values for report.py. Pure.

Field names are the names in the JSON document, which scripts read: fields may be added freely, but
renamed or removed only with a new number in SCHEMA.

The *knee* of a curve of hit rates is its point farthest above the straight line from its first
point to its last, with both axes scaled to 0..1 and capacity in bytes: before it a byte brings more
than on average, after it less. The *cheapest* point has the lowest cost: it depends on prices.

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
RECOMPUTE = "re"  # the baseline's name among the policies: nothing is kept


@dataclass(frozen=True, slots=True)
class Capacity:
    """The bytes of each tier; hbm_bytes 0: only slots limit the running turns."""

    hbm_bytes: int
    dram_bytes: int
    ssd_bytes: int

    @property
    def total_bytes(self) -> int:
        """DRAM and SSD, which keep sessions between their turns."""
        return self.dram_bytes + self.ssd_bytes


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one policy with one capacity.

    Attributes:
        policy: the eviction policy.
        capacity: each server's tiers.
        outcome: measurements of the servers that were replayed.
        cost: cost of all servers.
        cost_ratio: cost, divided by that of recomputing everything; 0: that costs nothing.
        fleet: the servers.
    """

    policy: str
    capacity: Capacity
    outcome: Outcome
    cost: Cost
    cost_ratio: float
    fleet: FleetOptions = ONE_SERVER

    def of_all(self, value: float) -> float:
        """Scale a measurement of the replayed servers to all servers."""
        return value / self.fleet.share

    @property
    def store_requests_per_s(self) -> float:
        """Requests of all servers to the remote store, per second."""
        outcome = self.outcome
        requests = self.of_all(outcome.store_puts + outcome.store_gets)
        return requests / outcome.span_s if outcome.span_s else 0.0

    @property
    def cost_of_million(self) -> float:
        """Cost per million prompt tokens; 0: there were none."""
        tokens = self.of_all(self.outcome.prompt_tokens)
        return self.cost.total / tokens * 1e6 if tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the result flat, as a row of a table."""
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
    """The sessions that were replayed.

    Attributes:
        origin: their origin, for people.
        footprint_tokens, footprint_bytes: room that would never need an eviction, as tiers are
            charged.
        longest_tokens: the largest context.
        span_s: seconds from the first session's begin to the last one's.
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
    """A complete plan.

    Attributes:
        command: the command line.
        version: kvd's version.
        options: the replays' options, by name.
        baselines: results of recomputing everything, one for each HBM and number of servers.
        results: the other results, by capacity, then by policy.
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


LEAST_POINTS = 3  # with fewer points there is no knee
LEAST_BEND = 0.05  # a knee's least height above the line, as a share of the axis
LEAST_RISE = 0.01  # if hit rates differ by less, the smallest capacity is enough


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's results by capacity, smallest first.

    Attributes:
        name: the policy, and what else distinguishes this curve.
        policy: the policy.
        results: the results.
        knee: index of the knee in the results; None: there is none.
        cheapest: index of the cheapest result.
    """

    name: str
    policy: str
    results: tuple[Result, ...]
    knee: int | None
    cheapest: int


def curves_of(results: Sequence[Result]) -> list[Curve]:
    """Return a curve for each policy, number of servers and, if they vary, HBM and DRAM."""
    hbms = {result.capacity.hbm_bytes for result in results}
    names: dict[str, list[Result]] = {}
    for result in results:
        names.setdefault(_name(result, results, has_hbms=len(hbms) > 1), []).append(result)
    return [_curve(name, found) for name, found in names.items()]


def knee_of(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the knee of a rising curve; None: it has none, or too few points.

    Args:
        points: (capacity, hit rate), by rising capacity.
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
    """Return the name of a result's curve, with its DRAM if that varies beside the same SSD."""
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
