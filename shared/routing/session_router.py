"""Where a session's next turn goes: to who holds its KV, unless waiting there costs more. Pure.

    a session that some server holds   that server
    another one                        its server on the hash ring
    a turn of no named session         of some servers that are drawn, the least busy one

A named session goes elsewhere if that is worth it: to one of its next servers on the ring, so that
other routers, which count other turns, find it there. Compared is what each choice costs, in
seconds of waiting:

    there      until a place is free, by the turns that wait or run and how long a turn has a place
    elsewhere  the same, and what brings the history there: fetching it, which the turn alone waits
               for, or computing it, which holds up those who wait there as well, and those who are
               likely to come meanwhile. What has just been stored may not be there to be fetched

Servers that drain get no turn while others take some. Who is gone is asked no more.

A router is told of servers (`set_servers`), of what each says now and then (`report`), and of the
turns that it has sent (`began`, `ended`). It forgets the sessions that were longest unused where it
would know more than `most_sessions`: these go by the ring again.

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

DRAWN_SERVERS = 8  # looked at for a turn of no session: the least of so many is hardly ever busy

Reason = Literal["held", "owner", "moved", "least_busy"]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server says of itself. Unless it has said anything it is idle.

    Attributes:
        num_turns: turns that wait or run there.
        num_places: turns that run at the same time, at least one.
        turn_s: mean time for which a turn has its place.
        compute_s: of a token of history that is computed.
        starts_per_s: how often a turn gets a place there.
        fetch_s: of a token of history that is fetched from where other servers have stored it;
            None: this server fetches nothing.
        stored_after_s: how long after its turn a session is stored there for others.
        takes_turns: False: it drains.
        sessions: tokens held of sessions that were used lately, by their `name_hash`.
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
    """Where a turn goes.

    Attributes:
        server: name of the server.
        reason: "held": it is known to hold the session; "owner": nobody is, and it is the session's
            own; "moved": the one of these would cost more, or drains; "least_busy": the turn names
            no session.
        others: those to be asked if this one cannot be reached, the best first.
    """

    server: str
    reason: Reason
    others: tuple[str, ...]


class NoServerError(LookupError):
    """There is no server at all."""


class SessionRouter:
    """Which server gets a turn; see the module.

    Args:
        num_fallbacks: servers behind its own on the ring that a session may go to.
        most_sessions: sessions of which it is known who holds them.
        seed: of what is drawn for turns of no session.
        clock: seconds, from anywhere on.
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

    # ------------------------------------------------------------------------------ what is told

    def set_servers(self, servers: Iterable[str]) -> None:
        """Know these servers, and no others."""
        self._ring.set_servers(servers)
        self._servers = {
            name: self._servers.get(name) or _Server() for name in sorted(self._ring.servers)
        }
        self._names = list(self._servers)

    def report(self, server: str, report: ServerReport) -> None:
        """Take in what a server says; of one that is not known nothing is."""
        known = self._servers.get(server)
        if known is None:
            return
        before, known.report = known.report, report
        known.num_since = 0
        for session, tokens in report.sessions.items() - before.sessions.items():
            self._hold(session, server, tokens)

    def began(self, server: str, session: str | None) -> None:
        """Count a turn that was sent to a server: from now on its session is held there."""
        if (known := self._servers.get(server)) is not None:
            known.num_since += 1
        if session is not None:
            hashed = name_hash(session)
            before = self._held.get(hashed, _NOTHING)
            self._note(hashed, _Held(server, before.tokens, before.changed_s))

    def ended(self, server: str, session: str | None = None, tokens: int = 0) -> None:
        """Count a turn that is over; `tokens` of its session are held there, if that is known."""
        if (known := self._servers.get(server)) is not None:
            known.num_since -= 1
        if session is not None and tokens:
            self._note(name_hash(session), _Held(server, tokens, self._clock()))

    @property
    def num_known(self) -> int:
        """Number of sessions of which it is known who holds them."""
        return len(self._held)

    # ---------------------------------------------------------------------------- what is decided

    def choose(self, session: str | None) -> Route:
        """Say where a turn goes.

        Args:
            session: name of its session; None: it has none, or one that nobody knows.

        Raises:
            NoServerError: there is no server.
        """
        if not self._servers:
            raise NoServerError("there is no server")
        if session is None:
            return self._least_busy()
        held = self._held.get(name_hash(session), _NOTHING)
        holder = held.server if held.server in self._servers else None
        names = self._candidates(session, holder)
        age_s = self._clock() - held.changed_s
        ranked = sorted(names, key=lambda name: self._cost(name, holder, held.tokens, age_s))
        best = ranked[0]  # of equals the one that was first: sorting is stable
        reason: Reason = "held" if best == holder else "moved"
        if holder is None and best == names[0]:
            reason = "owner"
        return Route(best, reason, tuple(ranked[1:]))

    def _candidates(self, session: str, holder: str | None) -> list[str]:
        """List the holder, then the session's servers on the ring, those that drain at the end."""
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
        """Return what a turn there costs, to be compared: who drains costs more than any other."""
        server = self._servers[name]
        moving_s = 0.0 if name == holder else server.moving_s(tokens, age_s)
        return not server.report.takes_turns, server.wait_s() + moving_s

    def _least_busy(self) -> Route:
        drawn = self._names
        if len(drawn) > DRAWN_SERVERS:
            drawn = self._random.sample(drawn, DRAWN_SERVERS)
        ranked = sorted(drawn, key=lambda name: self._servers[name].busyness())
        return Route(ranked[0], "least_busy", tuple(ranked[1:]))

    # -------------------------------------------------------------------------------- who has what

    def _hold(self, session: int, server: str, tokens: int) -> None:
        """Take in that a server holds so much of a session, unless another one holds more."""
        held = self._held.get(session, _NOTHING)
        if held.server in self._servers and held.server != server and held.tokens > tokens:
            return
        changed_s = held.changed_s if held.tokens == tokens else self._clock()
        self._note(session, _Held(server, tokens, changed_s))

    def _note(self, session: int, held: "_Held") -> None:
        self._held[session] = held
        self._held.move_to_end(session)
        if len(self._held) > self._most_sessions:
            self._held.popitem(last=False)


class _Held(NamedTuple):
    """Who holds a session, how many tokens of it and since when, as far as that is known."""

    server: str
    tokens: int
    changed_s: float


_NOTHING = _Held("", 0, -inf)


@dataclass(slots=True)
class _Server:
    """A server as a router sees it: its last report, and what this router has sent since."""

    report: ServerReport = field(default_factory=ServerReport)
    num_since: int = 0  # turns that began since the report, less those that ended

    @property
    def num_turns(self) -> int:
        return max(0, self.report.num_turns + self.num_since)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_turns - self.report.num_places)

    def wait_s(self) -> float:
        """Return how long one more turn would wait for its place."""
        num_before = max(0, self.num_turns - self.report.num_places + 1)
        return num_before * self.report.turn_s / self.report.num_places

    def moving_s(self, tokens: int, age_s: float) -> float:
        """Return what it costs all turns here to have so much history that is elsewhere.

        Args:
            tokens: what another server holds.
            age_s: how long it has held that.
        """
        report = self.report
        compute_s = tokens * report.compute_s
        num_behind = self.num_waiting + report.starts_per_s * compute_s
        compute_s *= 1 + num_behind
        if report.fetch_s is None:
            return compute_s
        fetch_s = tokens * report.fetch_s
        is_stored = age_s >= report.stored_after_s + fetch_s  # that took as long
        return min(fetch_s, compute_s) if is_stored else compute_s

    def busyness(self) -> tuple[bool, float, float]:
        """Return what servers are compared by for a turn whose history is nowhere."""
        return (
            not self.report.takes_turns,
            self.wait_s(),
            self.num_turns / self.report.num_places,
        )
