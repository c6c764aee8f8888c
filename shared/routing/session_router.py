"""SessionRouter: chooses the server of a session's next turn. Pure.

The turn goes to the server that holds the session's KV, unless waiting there costs more:

    a session that some server holds   that server
    another session                    its server on the hash ring
    a turn without a named session     the least busy one of some servers drawn at random

A named session goes elsewhere if that pays: to one of its next servers on the ring, so that other
routers, which count other turns, find it there. The costs of the choices are compared in seconds of
waiting:

    there      until a place is free, by the turns that wait or run and how long a turn has a place
    elsewhere  the same, plus getting the history there: either fetching it, for which only this
               turn waits, or computing it, which also delays the turns that wait there and those
               that are likely to come meanwhile. A session that was just stored may not be
               fetchable yet

A server that drains gets no turn while others accept some. A server that is gone gets none.

The caller reports the servers (`set_servers`), what each of them reports now and then (`report`),
and the turns that it has sent (`on_begin`, `on_end`). Beyond `most_sessions` the router forgets the
sessions that were unused for the longest time; these go by the ring again.

*Source:* bounding loads along the ring: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with
Bounded Loads (SODA 2018); the least of a few that are drawn: Mitzenmacher, The Power of Two Choices
(1996); what computing costs those behind: `shared.types.load_choice`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from random import Random
from time import monotonic
from typing import Literal, NamedTuple

from shared.routing.hash_ring import HashRing, name_hash

DRAWN_SERVERS = 8  # compared for a turn without a session: the least busy of 8 is hardly ever busy

Reason = Literal["held", "owner", "moved", "least_busy"]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The state of a server, as it reports it. A server without a report counts as idle.

    Attributes:
        num_turns: turns that wait or run there.
        num_places: turns that can run at the same time, at least 1.
        turn_s: mean seconds for which a turn has its place.
        compute_s: seconds to compute one token of history.
        starts_per_s: how often a turn gets a place there.
        fetch_s: seconds to fetch one token of history from where other servers have stored it;
            None: this server fetches nothing.
        stored_after_s: seconds from a turn's end until its session is stored for other servers.
        takes_turns: whether it accepts turns; False: it drains.
        sessions: number of tokens held of recently used sessions, by their `name_hash`.
    """

    num_turns: int = 0
    num_places: int = 1
    turn_s: float = 0.0
    compute_s: float = 0.0
    starts_per_s: float = 0.0
    fetch_s: float | None = None
    stored_after_s: float = 0.0
    takes_turns: bool = True
    sessions: Mapping[int, int] = field(default_factory=dict)


class Route(NamedTuple):
    """The choice for one turn.

    Attributes:
        server: name of the server.
        reason: "held": it is known to hold the session; "owner": no server is, and this is the
            session's own on the ring; "moved": the one of these costs more, or drains;
            "least_busy": the turn names no session.
        fallbacks: servers to try if this one cannot be reached, the best first.
    """

    server: str
    reason: Reason
    fallbacks: tuple[str, ...]


class NoServerError(LookupError):
    """There is no server at all."""


class SessionRouter:
    """Chooses the server of each turn.

    Args:
        num_fallbacks: how many servers after its own on the ring a session may go to.
        most_sessions: for how many sessions the holder is remembered.
        seed: seed of the draws for turns without a session.
        clock: returns seconds since any fixed point.
    """

    def __init__(
        self,
        *,
        num_fallbacks: int = 2,
        most_sessions: int = 1_000_000,
        seed: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._num_fallbacks = num_fallbacks
        self._most_sessions = most_sessions
        self._random = Random(seed)  # noqa: S311 - draws need no secrecy
        self._ring = HashRing()
        self._servers: dict[str, _Server] = {}
        self._names: list[str] = []
        self._held: OrderedDict[int, _Held] = OrderedDict()  # the longest unused first

    # --------------------------------------------------------------------------------- reports

    def set_servers(self, servers: Iterable[str]) -> None:
        """Replace the servers."""
        self._ring.set_servers(servers)
        self._servers = {
            name: self._servers.get(name) or _Server() for name in sorted(self._ring.servers)
        }
        self._names = list(self._servers)

    def report(self, server: str, report: ServerReport) -> None:
        """Record a server's report. Reports of servers that are not known are ignored."""
        known = self._servers.get(server)
        if known is None:
            return
        before, known.report = known.report, report
        known.num_since = 0
        for session, tokens in report.sessions.items() - before.sessions.items():
            self._hold(session, server, tokens)

    def on_begin(self, server: str, session: str | None) -> None:
        """Record a turn that was sent to a server, which holds its session from now on."""
        if (known := self._servers.get(server)) is not None:
            known.num_since += 1
        if session is not None:
            hashed = name_hash(session)
            before = self._held.get(hashed, _NOTHING)
            self._remember(hashed, _Held(server, before.tokens, before.changed_s))

    def on_end(self, server: str, session: str | None = None, tokens: int = 0) -> None:
        """Record the end of a turn; `tokens` of its session are held there, if that is known."""
        if (known := self._servers.get(server)) is not None:
            known.num_since -= 1
        if session is not None and tokens:
            self._remember(name_hash(session), _Held(server, tokens, self._clock()))

    @property
    def num_known(self) -> int:
        """Number of sessions whose holder is known."""
        return len(self._held)

    # -------------------------------------------------------------------------------- choices

    def choose(self, session: str | None) -> Route:
        """Choose the server of a turn.

        Args:
            session: name of its session; None: it has none, or one that is not known anywhere.

        Raises:
            NoServerError: there is no server.
        """
        if not self._servers:
            raise NoServerError("there is no server to send the turn to")
        if session is None:
            return self._least_busy()
        held = self._held.get(name_hash(session), _NOTHING)
        holder = held.server if held.server in self._servers else None
        names = self._candidates(session, holder)
        age_s = self._clock() - held.changed_s
        ranked = sorted(names, key=lambda name: self._cost(name, holder, held.tokens, age_s))
        best = ranked[0]  # of equal costs the first candidate, because sorting is stable
        reason: Reason = "held" if best == holder else "moved"
        if holder is None and best == names[0]:
            reason = "owner"
        return Route(best, reason, tuple(ranked[1:]))

    def _candidates(self, session: str, holder: str | None) -> list[str]:
        """List the holder, then the session's servers on the ring, draining ones only if all do."""
        names = [] if holder is None else [holder]
        taking: list[str] = []
        draining: list[str] = []
        for name in self._ring.owners(session):
            (taking if self._servers[name].report.takes_turns else draining).append(name)
            if len(taking) > self._num_fallbacks:
                break
        owners = taking or list(islice(draining, 1 + self._num_fallbacks))
        return names + [name for name in owners if name != holder]

    def _cost(self, name: str, holder: str | None, tokens: int, age_s: float) -> tuple[bool, float]:
        """Return the cost of a turn there, for comparison. A draining server costs most."""
        server = self._servers[name]
        moving_s = 0.0 if name == holder else server.moving_s(tokens, age_s)
        return not server.report.takes_turns, server.wait_s() + moving_s

    def _least_busy(self) -> Route:
        drawn = self._names
        if len(drawn) > DRAWN_SERVERS:
            drawn = self._random.sample(drawn, DRAWN_SERVERS)
        ranked = sorted(drawn, key=lambda name: self._servers[name].busyness())
        return Route(ranked[0], "least_busy", tuple(ranked[1:]))

    # --------------------------------------------------------------------------- held sessions

    def _hold(self, session: int, server: str, tokens: int) -> None:
        """Record that a server holds tokens of a session, unless another one holds more."""
        held = self._held.get(session, _NOTHING)
        if held.server in self._servers and held.server != server and held.tokens > tokens:
            return
        changed_s = held.changed_s if held.tokens == tokens else self._clock()
        self._remember(session, _Held(server, tokens, changed_s))

    def _remember(self, session: int, held: "_Held") -> None:
        self._held[session] = held
        self._held.move_to_end(session)
        if len(self._held) > self._most_sessions:
            self._held.popitem(last=False)


class _Held(NamedTuple):
    """The holder of a session, the number of its tokens, and since when; as far as known."""

    server: str
    tokens: int
    changed_s: float


_NOTHING = _Held("", 0, -inf)


@dataclass(slots=True)
class _Server:
    """A server as the router sees it: its last report, and what the router has sent since."""

    report: ServerReport = field(default_factory=ServerReport)
    num_since: int = 0  # turns that began since the report, less those that ended

    @property
    def num_turns(self) -> int:
        return max(0, self.report.num_turns + self.num_since)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_turns - self.report.num_places)

    def wait_s(self) -> float:
        """Return how many seconds one more turn would wait for its place."""
        num_before = max(0, self.num_turns - self.report.num_places + 1)
        return num_before * self.report.turn_s / self.report.num_places

    def moving_s(self, tokens: int, age_s: float) -> float:
        """Return the cost, for all turns here, of a history that is held elsewhere.

        Args:
            tokens: number of tokens that another server holds.
            age_s: for how many seconds it has held them.
        """
        report = self.report
        compute_s = tokens * report.compute_s
        num_behind = self.num_waiting + report.starts_per_s * compute_s
        compute_s *= 1 + num_behind
        if report.fetch_s is None:
            return compute_s
        fetch_s = tokens * report.fetch_s
        is_stored = age_s >= report.stored_after_s + fetch_s  # storing takes as long as fetching
        return min(fetch_s, compute_s) if is_stored else compute_s

    def busyness(self) -> tuple[bool, float, float]:
        """Return the key by which servers are compared for a turn without a history."""
        return (
            not self.report.takes_turns,
            self.wait_s(),
            self.num_turns / self.report.num_places,
        )
