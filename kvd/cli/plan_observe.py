"""`kvd plan --observe`: what larger tiers would have found of a running daemon's recent turns."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.client.connection import open_client
from kvd.wire.turn_messages import recorded_turns
from shared.measuring.report import check_json, print_report, progress_bar
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import StateError
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from kvd.plan.observe import Observation
    from kvd.plan.recorded_replay import ObservedCache

SCHEMA = "kvd.plan.observe/1"


class NothingObservedError(StateError):
    """The daemon has no turn to plan from."""

    reason = "nothing_observed"


def show_observation(
    runtime_dir: Path | None, *, ssd_bytes_per_s: float, json_to: str, model: str = ""
) -> None:
    """Ask the daemon for its recent turns, replay them, and print the tables or the document.

    Args:
        runtime_dir: of the daemon; None: the default.
        ssd_bytes_per_s: how fast the SSD reads, for what is read ahead.
        json_to: file for the document, "-" for it alone, "" for none.
        model: only models whose fingerprint starts so.

    Raises:
        NothingObservedError: it has seen no turn.
    """
    from kvd.plan.observe import num_replays, observe
    from kvd.plan.observe_views import observation_tables

    check_json(json_to)
    with open_client(runtime_dir) as client:
        layouts = [layout for layout in client.recent_turns(model) if layout.turns]
    if not layouts:
        raise NothingObservedError(
            "kvd has seen no turn since it started", "ask again when conversations have gone on"
        )
    caches = [_cache_of(layout, ssd_bytes_per_s) for layout in layouts]
    found = []
    with progress_bar("replaying", sum(map(num_replays, caches))) as tell:
        num_before = 0
        for layout, cache in zip(layouts, caches, strict=True):

            def told(num_done: int, num_before: int = num_before) -> None:
                tell(num_before + num_done)

            turns = recorded_turns(layout.turns)
            found.append((layout, observe(turns, cache, layout.max_turns, told)))
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
            **observed.as_dict(),
        }
        for layout, observed in found
    ]
    return {"schema": SCHEMA, "layouts": layouts}


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
