"""What a replica tells routers of its service, as plain values. Pure.

Ray carries a replica's routing stats, a dict, to all routers (`record_routing_stats`): what a
`ServerReport` says, by the names of its fields. Who reads them may be of another version.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shared.pb.inference.v1 import inference_pb2 as pb
from shared.routing.hash_ring import name_hash
from shared.routing.session_router import ServerReport

HALF_LIFE_S = 60.0  # of what was seen of turns; longer than most of them, shorter than a rush hour
_NAMES = frozenset(one.name for one in fields(ServerReport))


def stats_of(report: ServerReport) -> dict[str, Any]:
    """Return a report as routing stats."""
    return asdict(report)


def report_from(stats: Mapping[str, Any]) -> ServerReport:
    """Read routing stats; of what they do not say, the report says nothing."""
    return ServerReport(**{name: value for name, value in stats.items() if name in _NAMES})


def report_of(
    model: pb.Model, times: "PlaceTimes", sessions: Mapping[int, int], *, takes_turns: bool
) -> ServerReport:
    """Make the report of a service.

    Args:
        model: what it says of itself.
        times: how long its turns have their places, and how often they get one.
        sessions: tokens of sessions that were used lately, by `name_hash`.
        takes_turns: whether it does.
    """
    per_s = model.gauges.get("prefill_tokens_per_s", 0.0)
    return ServerReport(
        num_turns=model.running_turns + model.waiting_turns,
        num_places=max(1, int(model.gauges.get("turn_places", 1))),
        turn_s=times.turn_s,
        compute_s=1 / per_s if per_s else 0.0,
        starts_per_s=times.starts_per_s,
        takes_turns=takes_turns,
        sessions=sessions,
    )


def ended_turns(model: pb.Model) -> int:
    """Return how many turns have ended since the service began, however they did."""
    names = ("turns_finished", "turns_cancelled", "turns_failed")
    return sum(model.counters.get(name, 0) for name in names)


def held_tokens(usage: pb.Usage) -> int:
    """Return how many tokens of a session its server has when a turn of it is over."""
    gone = usage.compressed_tokens
    return max(0, usage.history_tokens + usage.new_tokens + usage.output_tokens - gone)


class PlaceTimes:
    """How long turns have their places, by who is seen running and how many have ended.

    *Source:* Little, A Proof for the Queuing Formula L = λW (1961).
    """

    def __init__(self) -> None:
        self._held_s = 0.0  # by all turns together; the sums fade with HALF_LIFE_S
        self._num_ended = 0.0
        self._seen_s = 0.0
        self._before: tuple[float, int, int] | None = None

    def note(self, now_s: float, num_running: int, num_ended: int) -> None:
        """Take in what was seen: turns that run, and those that have ended since the beginning."""
        before, self._before = self._before, (now_s, num_running, num_ended)
        if before is None:
            return
        before_s, ran_before, ended_before = before
        passed_s = max(0.0, now_s - before_s)
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self._held_s = kept * self._held_s + passed_s * (ran_before + num_running) / 2
        # A service that was started again counts from 0.
        new = num_ended - ended_before if num_ended >= ended_before else num_ended
        self._num_ended = kept * self._num_ended + new
        self._seen_s = kept * self._seen_s + passed_s

    @property
    def starts_per_s(self) -> float:
        """How often a turn gets a place: as often as one ends, in the long run."""
        return self._num_ended / self._seen_s if self._seen_s else 0.0

    @property
    def turn_s(self) -> float:
        """The mean, in seconds; 0: none has ended yet."""
        return self._held_s / self._num_ended if self._num_ended else 0.0


class RecentSessions:
    """Sessions that were used lately, by the hash of their names, and their tokens.

    Args:
        most: how many are remembered; those that were longest unused are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def used(self, session: str, tokens: int) -> None:
        """Note that a session was used, and has so many tokens now."""
        hashed = name_hash(session)
        self._tokens[hashed] = tokens
        self._tokens.move_to_end(hashed)
        if len(self._tokens) > self._most:
            self._tokens.popitem(last=False)

    def as_dict(self) -> dict[int, int]:
        """Return all that are remembered."""
        return dict(self._tokens)
