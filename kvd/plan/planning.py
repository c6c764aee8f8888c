"""The replays of a plan, and the cost of their outcomes.

Pure, except that replays may run in other processes, and that the elapsed time is measured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from kvd.plan.figures import RECOMPUTE, Capacity, PlanReport, Result, WorkloadFacts
from kvd.plan.fleet import ONE_SERVER, FleetOptions
from kvd.plan.hardware import Hardware, PlannedModel, ReplayOptions, most_bytes, recompute_load
from kvd.plan.kept import most_states, most_windowed
from kvd.plan.outcome import Outcome
from kvd.plan.prices import Prices, cost_of
from kvd.plan.sizes import BadOptionError
from kvd.plan.sweep import Cell, run_cells
from kvd.plan.workload import Workload
from shared.version import __version__

_S_PER_H = 3600.0
BASELINE_POLICY = "lru"  # unused by the baseline, which keeps nothing


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a plan.

    Attributes:
        workload: the sessions.
        model: the model.
        hardware: a server; its tiers are replaced by the capacities.
        options: options of each replay; their policy is replaced by the policies.
        capacities, policies: what to try.
        prices, num_gpus: what a server costs.
        num_workers: processes.
        command: the command line.
        fleets: servers to try, each with every capacity.
    """

    workload: Workload
    model: PlannedModel
    hardware: Hardware
    options: ReplayOptions
    capacities: Sequence[Capacity]
    policies: Sequence[str]
    prices: Prices
    num_gpus: int
    num_workers: int
    command: tuple[str, ...]
    fleets: Sequence[FleetOptions] = (ONE_SERVER,)

    @property
    def num_replays(self) -> int:
        """All replays, baselines included."""
        return len(_baselines(self)) + len(self.fleets) * len(self.capacities) * len(self.policies)


def footprint_bytes(workload: Workload, model: PlannedModel, charge: str) -> int:
    """Return the bytes of all sessions at their largest, as tiers are charged."""
    if charge == "window":
        return len(workload.sessions) * most_bytes(model, model.window_tokens)
    footprint = workload.footprint_tokens * model.kv_bytes_per_token
    if model.state_bytes:
        footprint += most_states(workload.sessions) * model.state_bytes
    if model.attention_window:
        num_windowed = most_windowed(workload.sessions, model.attention_window)
        footprint += num_windowed * model.windowed_bytes_per_token
    return footprint


def check_window(workload: Workload, model: PlannedModel, charge: str) -> None:
    """Check that contexts fit into the windows that are charged for them.

    Raises:
        BadOptionError: one does not.
    """
    longest = workload.longest_tokens
    if charge == "window" and longest > 2 * model.window_tokens:
        raise BadOptionError(
            f"a context of {longest} tokens is more than twice the charged window of "
            f"{model.window_tokens}",
            "give a larger --window, or --charge packed",
        )


def make_plan(request: PlanRequest, on_progress: Callable[[int], None]) -> PlanReport:
    """Run all replays.

    Args:
        request: the input.
        on_progress: called now and then with the number of turns replayed, over all replays.

    Raises:
        ReportedError: a process ended.
    """
    started_s = time.monotonic()
    baselines = _baselines(request)
    wanted = [*product(request.capacities, request.fleets, request.policies)]
    cells = [
        _cell(request, capacity, fleet, BASELINE_POLICY, load_policy="never")
        for capacity, fleet in baselines
    ]
    cells += [_cell(request, *each) for each in wanted]
    outcomes = run_cells(request.workload.sessions, cells, request.num_workers, on_progress)
    of_baselines = tuple(
        _result(request, capacity, fleet, RECOMPUTE, outcome, None)
        for (capacity, fleet), outcome in zip(baselines, outcomes, strict=False)
    )
    totals = {
        (found.capacity.hbm_bytes, found.fleet.num_servers): found.cost.total
        for found in of_baselines
    }
    results = tuple(
        _result(request, *each, outcome, totals[each[0].hbm_bytes, each[1].num_servers])
        for each, outcome in zip(wanted, outcomes[len(baselines) :], strict=True)
    )
    return PlanReport(
        command=request.command,
        version=__version__,
        elapsed_s=time.monotonic() - started_s,
        workload=_facts(request),
        model=request.model,
        engine=request.hardware.engine,
        num_gpus=request.num_gpus,
        prices=request.prices,
        options=_options(request),
        baselines=of_baselines,
        results=results,
    )


def _baselines(request: PlanRequest) -> list[tuple[Capacity, FleetOptions]]:
    """Return the baselines, which recompute everything: one per HBM and number of servers."""
    hbms = dict.fromkeys(capacity.hbm_bytes for capacity in request.capacities)
    fleets = {fleet.num_servers: fleet for fleet in request.fleets}
    alone = [replace(fleet, remote_bytes_per_s=0.0) for fleet in fleets.values()]
    return [(Capacity(hbm_bytes, 0, 0), fleet) for hbm_bytes in hbms for fleet in alone]


def _cell(
    request: PlanRequest, capacity: Capacity, fleet: FleetOptions, policy: str, **changes: Any
) -> Cell:
    return Cell(
        replace(request.hardware, **asdict(capacity)),
        replace(request.options, policy=policy, **changes),
        fleet,
        fleet.share / request.workload.share,
    )


def _result(
    request: PlanRequest,
    capacity: Capacity,
    fleet: FleetOptions,
    policy: str,
    outcome: Outcome,
    baseline_cost: float | None,
) -> Result:
    """Return a result with its cost; without a baseline's cost it is a baseline itself."""
    cost = cost_of(
        request.prices,
        num_gpus=request.num_gpus,
        gpu_hours=outcome.gpu_hours / fleet.share,
        storage_hours=outcome.span_s / _S_PER_H,
        dram_bytes=capacity.dram_bytes * fleet.num_servers,
        ssd_bytes=capacity.ssd_bytes * fleet.num_servers,
    )
    whole = cost.total if baseline_cost is None else baseline_cost
    return Result(policy, capacity, outcome, cost, cost.total / whole if whole else 0.0, fleet)


def _facts(request: PlanRequest) -> WorkloadFacts:
    workload, engine = request.workload, request.hardware.engine
    return WorkloadFacts(
        origin=workload.origin,
        num_sessions=len(workload.sessions),
        num_turns=workload.num_turns,
        footprint_tokens=workload.footprint_tokens,
        footprint_bytes=footprint_bytes(workload, request.model, request.options.charge),
        longest_tokens=workload.longest_tokens,
        span_s=workload.span_s,
        recompute_load=recompute_load(workload.sessions, engine) / workload.share,
        num_tool_turns=workload.num_tool_turns,
    )


def _options(request: PlanRequest) -> dict[str, Any]:
    """Return the options that are nowhere else in the report."""
    hardware, options = request.hardware, request.options
    return {
        "tiers": options.tiers,
        "charge": options.charge,
        "ttl_s": options.ttl_s,
        "watermark": options.watermark,
        "warmup_turns": options.warmup_turns,
        "load_policy": options.load_policy,
        "end_hints": options.end_hints,
        "tool_hints": options.tool_hints,
        "think_scale": options.think_scale,
        "ssd_bytes_per_s": hardware.ssd_bytes_per_s,
        "pcie_bytes_per_s": hardware.pcie_bytes_per_s,
    }
