"""To which server a plan's turns go, by the name of a routing. Pure.

random    to any, as a balancer does that knows no sessions
ring      to the session's own, by consistent hashing: as HAProxy is set up in examples/haproxy
session   as `shared.routing.session_router` says, told by servers as Ray Serve's replicas tell it

Of a fleet of which only some servers are replayed, a turn at random comes to a server that has its
session as rarely as it would among all: see `Routing.forgets`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from random import Random

from kvd.plan.fleet import FleetOptions
from shared.routing.hash_ring import HashRing
from shared.routing.session_router import ServerReport, SessionRouter
from shared.types.units import NS_PER_S

REPORT_S = 10.0  # between two reports of a server, as Ray Serve asks for them


class Routing(ABC):
    """Chooses servers, which are numbers, for sessions, which are numbers as well."""

    def __init__(self, fleet: FleetOptions) -> None:
        self._fleet = fleet

    @abstractmethod
    def set_servers(self, servers: Iterable[int]) -> None:
        """Know the servers that take turns; at least one."""

    @abstractmethod
    def choose(self, session: int, now_ns: int) -> int:
        """Choose a server for a turn of a session, and count it there."""

    def forgets(self) -> bool:
        """Whether the server stands for one that is not replayed, and has never had the session."""
        return False

    def ended(  # noqa: B027 - most need not hear it
        self,
        server: int,
        session: int,
        tokens: int,
        report: Callable[[], ServerReport],
        now_ns: int,
    ) -> None:
        """Count a turn that is over, and has left so much of its session; ask the server more."""


class RandomRouting(Routing):
    """Any server."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._random = Random(fleet.seed)  # noqa: S311 - draws need no secrecy
        self._servers: list[int] = []

    def set_servers(self, servers: Iterable[int]) -> None:
        """Know the servers that take turns; at least one."""
        self._servers = sorted(servers)

    def choose(self, session: int, now_ns: int) -> int:  # noqa: ARG002 - whosever it is
        """Choose a server for a turn of a session, and count it there."""
        return self._random.choice(self._servers)

    def forgets(self) -> bool:
        """Whether it is one of those that are not replayed, which are drawn as often."""
        return self._random.random() >= self._fleet.num_replayed / self._fleet.num_servers


class RingRouting(Routing):
    """The session's own server."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._ring = HashRing()

    def set_servers(self, servers: Iterable[int]) -> None:
        """Know the servers that take turns; at least one."""
        self._ring.set_servers(map(str, servers))

    def choose(self, session: int, now_ns: int) -> int:  # noqa: ARG002 - whenever it comes
        """Choose a server for a turn of a session, and count it there."""
        return int(next(self._ring.owners(str(session))))


class SessionRouting(Routing):
    """Who holds the session, unless waiting there costs more."""

    def __init__(self, fleet: FleetOptions) -> None:
        super().__init__(fleet)
        self._now_s = 0.0
        self._router = SessionRouter(seed=fleet.seed, clock=lambda: self._now_s)
        self._reported_s: dict[int, float] = {}

    def set_servers(self, servers: Iterable[int]) -> None:
        """Know the servers that take turns; at least one."""
        self._router.set_servers(map(str, servers))

    def choose(self, session: int, now_ns: int) -> int:
        """Choose a server for a turn of a session, and count it there."""
        self._now_s = now_ns / NS_PER_S
        server = self._router.choose(str(session)).server
        self._router.on_begin(server, str(session))
        return int(server)

    def ended(
        self,
        server: int,
        session: int,
        tokens: int,
        report: Callable[[], ServerReport],
        now_ns: int,
    ) -> None:
        """Count a turn that is over; the server is asked no more often than in life."""
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
