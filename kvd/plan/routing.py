"""Routings of a plan: which server gets a turn. Pure.

random    any server, as a balancer that does not know sessions
ring      the session's own, by consistent hashing, as HAProxy is set up in examples/haproxy
session   as `shared.routing.session_router` chooses, with reports as from Ray Serve's replicas

If only some servers of a fleet are replayed, a random turn has to meet a server that has its
session as rarely as among all servers: see `Routing.forgets`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from random import Random

from kvd.plan.fleet import FleetOptions
from shared.routing.hash_ring import HashRing
from shared.routing.session_router import ServerReport, SessionRouter
from shared.types.units import NS_PER_S

REPORT_S = 10.0  # between two reports of a server, as with Ray Serve


class Routing(ABC):
    """Chooses servers for sessions; both are numbers."""

    def __init__(self, fleet: FleetOptions) -> None:
        self._fleet = fleet

    @abstractmethod
    def set_servers(self, servers: Iterable[int]) -> None:
        """Set the servers that take turns; at least one."""

    @abstractmethod
    def choose(self, session: int, now_ns: int) -> int:
        """Choose a server for a turn of a session, and count the turn there."""

    def forgets(self) -> bool:
        """Return whether the chosen server stands for one without the session, not replayed."""
        return False

    def on_turn_end(  # noqa: B027 - most routings ignore it
        self,
        server: int,
        session: int,
        tokens: int,
        report: Callable[[], ServerReport],
        now_ns: int,
    ) -> None:
        """Count a turn that has ended; `tokens`: the session's tokens stored then.

        `report` returns the server's report, if the routing needs one.
        """


class RandomRouting(Routing):
    """Chooses any server."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._random = Random(fleet.seed)  # noqa: S311 - draws need no secrecy
        self._servers: list[int] = []

    def set_servers(self, servers: Iterable[int]) -> None:
        """Set the servers that take turns; at least one."""
        self._servers = sorted(servers)

    def choose(self, session: int, now_ns: int) -> int:  # noqa: ARG002 - the same for all sessions
        """Choose a server for a turn of a session, and count the turn there."""
        return self._random.choice(self._servers)

    def forgets(self) -> bool:
        """Return whether a server was drawn that is not replayed."""
        return self._random.random() >= self._fleet.num_replayed / self._fleet.num_servers


class RingRouting(Routing):
    """Chooses the session's own server."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._ring = HashRing()

    def set_servers(self, servers: Iterable[int]) -> None:
        """Set the servers that take turns; at least one."""
        self._ring.set_servers(map(str, servers))

    def choose(self, session: int, now_ns: int) -> int:  # noqa: ARG002 - the same at all times
        """Choose a server for a turn of a session, and count the turn there."""
        return int(next(self._ring.owners(str(session))))


class SessionRouting(Routing):
    """Chooses the server that holds the session, unless waiting there costs more."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._now_s = 0.0
        self._router = SessionRouter(seed=fleet.seed, clock=lambda: self._now_s)
        self._reported_s: dict[int, float] = {}

    def set_servers(self, servers: Iterable[int]) -> None:
        """Set the servers that take turns; at least one."""
        self._router.set_servers(map(str, servers))

    def choose(self, session: int, now_ns: int) -> int:
        """Choose a server for a turn of a session, and count the turn there."""
        self._now_s = now_ns / NS_PER_S
        server = self._router.choose(str(session)).server
        self._router.on_begin(server, str(session))
        return int(server)

    def on_turn_end(
        self,
        server: int,
        session: int,
        tokens: int,
        report: Callable[[], ServerReport],
        now_ns: int,
    ) -> None:
        """Count a turn that has ended; take the server's report, at most one per REPORT_S."""
        self._now_s = now_ns / NS_PER_S
        self._router.on_end(str(server), str(session), tokens)
        if self._now_s >= self._reported_s.get(server, -REPORT_S) + REPORT_S:
            self._router.report(str(server), report())
            self._reported_s[server] = self._now_s


ROUTINGS: Mapping[str, Callable[[FleetOptions], Routing]] = {
    "random": RandomRouting,
    "ring": RingRouting,
    "session": SessionRouting,
}
