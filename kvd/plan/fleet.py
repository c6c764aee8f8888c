"""Several servers: who routes to them, what moves between them, when one is away. Pure."""

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
        num_replayed: how many of these are replayed, with their share of the sessions.
        routing: a name of `kvd.plan.routing.ROUTINGS`.
        remote_bytes_per_s: of one server to the remote store, and the same from it; 0: there is
            none.
        remote_write: what is stored there: every session after its turns, what a server evicts, or
            neither; and what a server holds that drains.
        remote_wait: turns wait for what is fetched where that pays, as kvd does it; False, as it
            does with remote.wait = "0s": what is not there when they start is computed.
        quiet_s: how long a session is left alone before it is stored there.
        failures_per_day: how often a server is lost, with all that it holds.
        drains_per_day: how often a server is taken out, and comes back with what it held.
        away_s: how long a server is away.
        seed: of what is drawn.
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
        """Share of the sessions that the servers that are replayed have."""
        return self.num_replayed / self.num_servers


ONE_SERVER = FleetOptions()


class Outage(NamedTuple):
    """A server is away for a while.

    Attributes:
        is_lost: all that it holds is gone, and its turns have to begin anew.
    """

    starts_ns: int
    server: int
    is_lost: bool


def draw_outages(fleet: FleetOptions, span_s: float) -> list[Outage]:
    """Draw when servers are away, in order; none is away twice at a time."""
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
