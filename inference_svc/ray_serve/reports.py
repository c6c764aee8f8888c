"""Reports of a replica's service to the routers, as plain values. Pure.

Ray sends a replica's routing stats, a dict, to all routers (`record_routing_stats`). Here these
are the fields of a `ServerReport`. Writer and reader may be of different versions.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shared.pb.inference.v1 import inference_pb2 as pb
from shared.routing.hash_ring import name_hash
from shared.routing.session_router import ServerReport

# Half-life of the weight of observed turns: longer than most turns, shorter than a rush hour.
HALF_LIFE_S = 60.0
_NAMES = frozenset(field.name for field in fields(ServerReport))


def stats_of(report: ServerReport) -> dict[str, Any]:
    """Return a report as routing stats."""
    return asdict(report)


def report_from(stats: Mapping[str, Any]) -> ServerReport:
    """Read routing stats; missing fields get their defaults, unknown ones are ignored."""
    return ServerReport(**{name: value for name, value in stats.items() if name in _NAMES})


def report_of(
    model: pb.Model, times: "PlaceTimes", sessions: Mapping[int, int], *, takes_turns: bool
) -> ServerReport:
    """Return the report of a service.

    Args:
        model: the service's description of itself, with its gauges.
        times: how long turns occupy their places, and how often one starts.
        sessions: tokens of recently used sessions, by `name_hash`.
        takes_turns: whether the service takes turns.
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
    """Return the number of turns that have ended since the service's start, in any way."""
    names = ("turns_finished", "turns_cancelled", "turns_failed")
    return sum(model.counters.get(name, 0) for name in names)


def held_tokens(usage: pb.Usage) -> int:
    """Return the number of a session's tokens that its server has after a turn."""
    gone = usage.compressed_tokens
    return max(0, usage.history_tokens + usage.new_tokens + usage.output_tokens - gone)


class PlaceTimes:
    """Estimates how long turns occupy their places, from the numbers of running and ended turns.

    *Source:* Little, A Proof for the Queuing Formula L = λW (1961).
    """

    def __init__(self) -> None:
        # Sums that decay with HALF_LIFE_S: time in places of all turns, ended turns, elapsed time.
        self._held_s = 0.0
        self._num_ended = 0.0
        self._seen_s = 0.0
        self._before: tuple[float, int, int] | None = None

    def record(self, now_s: float, num_running: int, num_ended: int) -> None:
        """Record an observation.

        Args:
            now_s: time of the observation, monotonic.
            num_running: number of turns that run.
            num_ended: number of turns that have ended since the service's start.
        """
        before, self._before = self._before, (now_s, num_running, num_ended)
        if before is None:
            return
        before_s, ran_before, ended_before = before
        passed_s = max(0.0, now_s - before_s)
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self._held_s = kept * self._held_s + passed_s * (ran_before + num_running) / 2
        # A restarted service counts from 0.
        new = num_ended - ended_before if num_ended >= ended_before else num_ended
        self._num_ended = kept * self._num_ended + new
        self._seen_s = kept * self._seen_s + passed_s

    @property
    def starts_per_s(self) -> float:
        """Turns started per second; in the long run as many as end."""
        return self._num_ended / self._seen_s if self._seen_s else 0.0

    @property
    def turn_s(self) -> float:
        """Mean time that a turn occupies its place, in seconds; 0 if none has ended yet."""
        return self._held_s / self._num_ended if self._num_ended else 0.0


class RecentSessions:
    """The tokens of recently used sessions, by the hashes of their names.

    Args:
        most: most sessions; the least recently used one is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def record_use(self, session: str, tokens: int) -> None:
        """Record that a session was used, and has `tokens` tokens now."""
        hashed = name_hash(session)
        self._tokens[hashed] = tokens
        self._tokens.move_to_end(hashed)
        if len(self._tokens) > self._most:
            self._tokens.popitem(last=False)

    def as_dict(self) -> dict[int, int]:
        """Return the tokens of all sessions, by the hashes of their names."""
        return dict(self._tokens)
