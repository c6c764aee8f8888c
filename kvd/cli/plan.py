"""The command `kvd plan`: replays a trace to find how much DRAM and SSD pay; see kvd/PLAN.md."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvd.cli.options import RuntimeDir
from kvd.client.connection import open_client
from kvd.errors import UnclearSelectionError
from kvd.plan.options import (
    ArrivalArguments,
    CapacityArguments,
    CostArguments,
    EngineArguments,
    KvdArguments,
    ServerArguments,
    option,
)
from kvd.wire.messages import recorded_turns
from shared.measuring.options import command
from shared.measuring.report import check_json, print_report, progress_bar
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import StateError
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from kvd.plan.observe import Observation
    from kvd.plan.recorded_replay import ObservedCache

_INSTEAD = "Instead of a plan"
OBSERVE_SCHEMA = "kvd.plan.observe/1"


class NothingObservedError(StateError):
    """The daemon has no turn to plan from."""

    reason = "nothing_observed"


@dataclass(frozen=True, slots=True)
class InsteadArguments:
    """Options that ask for something else than a plan."""

    paper: Annotated[
        bool, option(_INSTEAD, "The paper's experiments, beside its numbers.", "--paper")
    ] = False
    quick: Annotated[
        bool, option(_INSTEAD, "--paper with a twentieth of it; says less.", "--quick")
    ] = False
    observe: Annotated[
        bool, option(_INSTEAD, "What larger tiers would bring a running kvd.", "--observe")
    ] = False
    runtime_dir: RuntimeDir = None


@command(
    ArrivalArguments,
    EngineArguments,
    CapacityArguments,
    ServerArguments,
    KvdArguments,
    CostArguments,
    InsteadArguments,
)
def plan(
    arrivals: ArrivalArguments,
    engine: EngineArguments,
    capacity: CapacityArguments,
    servers: ServerArguments,
    kvd: KvdArguments,
    cost: CostArguments,
    instead: InsteadArguments,
) -> None:
    """Replay a trace: hits, times and cost by policy and capacity. How much DRAM and SSD?"""
    # Imported here, so that other commands start faster.
    from kvd.plan.arguments import request_of
    from kvd.plan.planning import make_plan
    from kvd.plan.plots import check_plot, plot
    from kvd.plan.report import as_document, tables
    from kvd.plan.sizes import rate_of

    if instead.paper or instead.observe:
        _check_alone(instead.paper, instead.observe, arrivals.trace, arrivals.generate, cost.plot)
    if instead.paper:
        show_paper(
            seed=arrivals.seed,
            is_quick=instead.quick,
            num_workers=cost.jobs,
            json_to=cost.json_to,
        )
        return
    if instead.observe:
        rate_s = rate_of(capacity.ssd_bandwidth, "--ssd-bandwidth")
        show_observation(instead.runtime_dir, ssd_bytes_per_s=rate_s, json_to=cost.json_to)
        return
    if cost.plot is not None:
        check_plot(cost.plot)
    check_json(cost.json_to)
    request = request_of(arrivals, engine, capacity, servers, kvd, cost, tuple(sys.argv))
    with progress_bar("replaying", request.num_replays * request.workload.num_turns) as on_progress:
        report = make_plan(request, on_progress)
    print_report(as_document(report), lambda _: tables(report), cost.json_to)
    if cost.plot is not None:
        plot(report, cost.plot)


def _check_alone(*parts: object) -> None:
    """Raise UnclearSelectionError if more than one of the parts is given."""
    if sum(map(bool, parts)) > 1:
        raise UnclearSelectionError(
            "--paper and --observe cannot be combined with --trace, --generate or --plot",
            "leave those out, or plan without --paper and --observe",
        )


def show_paper(*, seed: int, is_quick: bool, num_workers: int, json_to: str) -> None:
    """Replay the paper's experiments and print them beside its numbers; takes minutes.

    Args:
        seed: seed of the sessions.
        is_quick: use a twentieth of the sessions and of the tiers; takes seconds.
        num_workers: processes; 0: as many as there are processors.
        json_to: file for the document; "-": print it alone; "": none.
    """
    from kvd.plan.paper.reproduction import Reproduction
    from kvd.plan.paper.runs import QUICK_SCALE, Sample
    from kvd.plan.paper.tables import paper_tables

    check_json(json_to)
    reproduction = Reproduction(Sample(seed, QUICK_SCALE if is_quick else 1.0))
    with progress_bar("replaying", reproduction.num_turns) as on_progress:
        report = reproduction.make(num_workers or os.cpu_count() or 1, on_progress)
    print_report(report.as_dict(), lambda _: paper_tables(report), json_to)


def show_observation(
    runtime_dir: Path | None, *, ssd_bytes_per_s: float, json_to: str, model: str = ""
) -> None:
    """Replay the daemon's recent turns, and print the tables or the document.

    Args:
        runtime_dir: the daemon's runtime directory; None: the default.
        ssd_bytes_per_s: the SSD's read bandwidth, for prefetches.
        json_to: file for the document; "-": print it alone; "": none.
        model: only models whose fingerprint begins so.

    Raises:
        NothingObservedError: the daemon has seen no turn.
    """
    from kvd.plan.observe import num_replays, observation_tables, observe

    check_json(json_to)
    with open_client(runtime_dir) as client:
        layouts = [layout for layout in client.recent_turns(model) if layout.turns]
    if not layouts:
        raise NothingObservedError(
            "kvd has not seen any turn since it started", "run this again after some conversations"
        )
    caches = [_cache_of(layout, ssd_bytes_per_s) for layout in layouts]
    found = []
    with progress_bar("replaying", sum(map(num_replays, caches))) as on_progress:
        num_before = 0
        for layout, cache in zip(layouts, caches, strict=True):

            def on_replay(num_done: int, num_before: int = num_before) -> None:
                on_progress(num_before + num_done)

            turns = recorded_turns(layout.turns)
            found.append((layout, observe(turns, cache, layout.max_turns, on_replay)))
            num_before += num_replays(cache)
    tables = (
        table for layout, observed in found for table in observation_tables(layout.model, observed)
    )
    print_report(_document(found), lambda _: tables, json_to)


def _document(found: "list[tuple[kvd_pb2.RecentTurns, Observation]]") -> dict[str, Any]:
    layouts = [
        {
            "layout": layout.layout,
            "model": layout.model,
            "policy": layout.policy,
            **asdict(observed),
        }
        for layout, observed in found
    ]
    return {"schema": OBSERVE_SCHEMA, "layouts": layouts}


def _cache_of(layout: kvd_pb2.RecentTurns, ssd_bytes_per_s: float) -> "ObservedCache":
    from kvd.plan.recorded_replay import ObservedCache

    return ObservedCache(
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        dram_bytes=layout.dram_bytes,
        ssd_bytes=layout.ssd_bytes,
        policy=layout.policy,
        ttl_ns=round(layout.ttl_s * NS_PER_S) if layout.ttl_s else None,
        ssd_bytes_per_s=ssd_bytes_per_s,
    )
