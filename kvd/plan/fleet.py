"""The servers of a plan: how many, what moves between them, and when each is away. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from shared.types.units import NS_PER_S

RemoteWrite = Literal["all", "evicted", "drain"]
_S_PER_D = 86_400.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The servers of a replay. By default there is one, which is always there.

    Attributes:
        num_servers: servers in all.
        num_replayed: servers that are replayed, with their share of the sessions.
        routing: a name in `kvd.plan.routing.ROUTINGS`.
        remote_bytes_per_s: bandwidth between a server and the remote store, in each direction; 0:
            there is no store.
        remote_write: sessions that are pushed there: all after their turns, those that are evicted,
            or ("drain") neither; a draining server pushes all it holds in any case.
        remote_wait: turns wait for a fetch where that pays, as with kvd. False: as with
            remote.wait = "0s", what has not arrived when they start is computed.
        quiet_s: seconds without a turn after which a session is pushed.
        failures_per_day: how often a server is lost, with all that it holds.
        drains_per_day: how often a server leaves, and comes back with what it held.
        away_s: seconds for which a server is away.
        seed: seed of all that is drawn.
    """

    num_servers: int = 1
    num_replayed: int = 1
    routing: str = "session"
    remote_bytes_per_s: float = 0.0
    remote_write: RemoteWrite = "all"
    remote_wait: bool = True
    quiet_s: float = 10.0
    failures_per_day: float = 0.0
    drains_per_day: float = 0.0
    away_s: float = 600.0
    seed: int = 0

    @property
    def share(self) -> float:
        """Share of the sessions that the replayed servers get."""
        return self.num_replayed / self.num_servers


ONE_SERVER = FleetOptions()


class Outage(NamedTuple):
    """A server's absence.

    Attributes:
        starts_ns: when it begins.
        server: the server.
        is_lost: all that it holds is lost, and its turns begin again elsewhere.
    """

    starts_ns: int
    server: int
    is_lost: bool


def draw_outages(fleet: FleetOptions, span_s: float) -> list[Outage]:
    """Draw the outages, in order; a server's outages do not overlap."""
    random = Random(fleet.seed)  # noqa: S311 - draws need no secrecy
    drawn = sorted(
        Outage(round(at_s * NS_PER_S), server, is_lost)
        for server in range(fleet.num_replayed)
        for per_day, is_lost in ((fleet.failures_per_day, True), (fleet.drains_per_day, False))
        for at_s in _times(random, per_day / _S_PER_D, span_s)
    )
    back_ns = [0] * fleet.num_replayed
    kept = []
    for outage in drawn:
        if outage.starts_ns >= back_ns[outage.server]:
            kept.append(outage)
            back_ns[outage.server] = outage.starts_ns + round(fleet.away_s * NS_PER_S)
    return kept


def _times(random: Random, per_s: float, span_s: float) -> Iterator[float]:
    at_s = 0.0
    while per_s and (at_s := at_s + random.expovariate(per_s)) < span_s:
        yield at_s
