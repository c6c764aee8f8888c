"""Sessions on their way between servers, by a store that all of them reach. Pure.

A server stores a session there once it has been left alone for a while after its turn, as it is
evicted, or when the server drains: only what the store does not have of it. As a turn arrives of
whose session a server has nothing, it asks the store, and fetches what is there; both ways one
session after another. What the store has stays for the session's TTL, and whoever fetches it leaves
it there.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from kvd.plan.channel import Channel, Transfer
from kvd.plan.hardware import Costs
from kvd.plan.kept import NOTHING, Kept
from kvd.plan.outcome import Totals
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S, ceil_div

CHUNK_BYTES = 8 << 20  # of an object, as kvd.remote has them


class Stored(NamedTuple):
    """What a turn has left of a session.

    Attributes:
        number: of the turn: of two states of a session that of the later turn counts.
        expires_ns: None: never.
    """

    kept: Kept
    number: int
    expires_ns: int | None


class RemoteStore:
    """What is stored outside of the servers."""

    def __init__(self) -> None:
        self._stored: dict[int, Stored] = {}

    def find(self, session: int, now_ns: int) -> Kept:
        """Return what is stored of a session."""
        found = self._stored.get(session)
        if found is None or (found.expires_ns is not None and found.expires_ns <= now_ns):
            return NOTHING
        return found.kept

    def put(self, session: int, stored: Stored) -> None:
        """Have this of a session, unless something later is there: who is late is fenced."""
        there = self._stored.get(session)
        if there is None or there.number < stored.number:
            self._stored[session] = stored


class Fetch(NamedTuple):
    """What a server fetches of a session.

    Attributes:
        tokens: how many tokens can be loaded then.
    """

    kept: Kept
    tokens: int
    transfer: Transfer


class Mover:
    """One server's way to the store, and from it.

    Args:
        quiet_s: how long a session is left alone before it is stored; None: until a drain.
        takes_evicted: whether what is evicted is stored, too: kvd says so in time.
        waits: whether turns wait for what is fetched.

    Attributes:
        is_draining: sessions are stored as soon as their turns are over.
    """

    def __init__(
        self,
        store: RemoteStore,
        costs: Costs,
        bytes_per_s: float,
        quiet_s: float | None,
        *,
        takes_evicted: bool = False,
        waits: bool = True,
    ) -> None:
        self.is_draining = False
        self._takes_evicted = takes_evicted
        self._store = store
        self._costs = costs
        self._waits = waits
        self._quiet_ns = None if quiet_s is None else round(quiet_s * NS_PER_S)
        self._num_puts = 0
        self._num_gets = 0
        self._out = Channel(bytes_per_s)
        self._in = Channel(bytes_per_s)
        self._due: deque[tuple[int, int, int]] = deque()  # when, session, number of its turn
        self._kept: dict[int, Stored] = {}  # of sessions that have no turn here
        self._pushing: dict[Transfer, Stored] = {}
        self._fetches: dict[int, Fetch] = {}

    def totals(self) -> Totals:
        """Return what was sent to the store, and what came from it."""
        return Totals(
            bytes_pushed=self._out.bytes_moved,
            bytes_fetched=self._in.bytes_moved,
            store_puts=self._num_puts,
            store_gets=self._num_gets,
        )

    @property
    def fetch_s(self) -> float | None:
        """Time for which a turn waits for a token that is fetched; None: it does not."""
        if not self._waits:
            return None
        return self._costs.loaded_bytes(1) / self._in.bytes_per_s

    @property
    def stored_after_s(self) -> float:
        """How long after its turn a session is stored."""
        return inf if self._quiet_ns is None else self._quiet_ns / NS_PER_S

    # --------------------------------------------------------------------------------- to the store

    def kept(self, session: int, stored: Stored, now_ns: int) -> None:
        """Hear that a session was stored here after a turn."""
        self._kept[session] = stored
        if self.is_draining:
            self.push(session, now_ns)
        elif self._quiet_ns is not None:
            self._due.append((now_ns + self._quiet_ns, session, stored.number))

    def runs(self, session: int) -> None:
        """Hear that a session has a turn here: as it was it is not pushed any more."""
        self._kept.pop(session, None)

    def due(self, now_ns: int) -> int | None:
        """Take a session that was left alone for long enough, to be pushed; None: there is none."""
        while self._due and self._due[0][0] <= now_ns:
            _, session, number = self._due.popleft()
            if session in self._kept and self._kept[session].number == number:
                return session
        return None

    def evicted(self, key: SessionKey, now_ns: int) -> None:
        """Hear that a session goes from all tiers to make room."""
        if self._takes_evicted:
            self.push(int(key.session_id), now_ns)

    def push(self, session: int, now_ns: int) -> None:
        """Send what the store does not have of a session."""
        stored, there = self._kept.pop(session, None), self._store.find(session, now_ns)
        if stored is None:
            return
        kept = stored.kept
        clean = Kept(min(there.num_tokens, kept.num_tokens), there.ends_in(kept))
        num_bytes = sum(self._costs.new_bytes(kept, clean))
        self._num_puts += _num_requests(num_bytes)
        self._pushing[self._out.move(session, num_bytes, now_ns)] = stored

    @property
    def unpushed(self) -> list[int]:
        """The sessions of which something was stored here and not pushed since."""
        return [*self._kept]

    # ------------------------------------------------------------------------------- from the store

    def fetch(self, session: int, history_tokens: int, now_ns: int) -> None:
        """Fetch what a turn can load of its session, of which nothing is held here."""
        kept = self._store.find(session, now_ns).within(history_tokens)
        tokens = self._costs.loadable(kept)
        self._num_gets += 1
        if not tokens:
            return
        num_bytes = self._costs.loaded_bytes(tokens)
        self._num_gets += _num_requests(num_bytes) - 1
        self._fetches[session] = Fetch(kept, tokens, self._in.move(session, num_bytes, now_ns))

    def fetched(self, session: int, now_ns: int) -> Fetch | None:
        """Return what a turn has of its session from the store, or waits for; None: nothing."""
        fetch = self._fetches.get(session)
        if fetch is None or self._waits or fetch.transfer.ends_ns <= now_ns:
            return fetch
        return None

    def forget(self, session: int) -> None:
        """Hear that a session's turn has what it wanted."""
        self._fetches.pop(session, None)

    # ----------------------------------------------------------------------------------------- time

    def next_ns(self) -> Iterable[int | None]:
        """Return when a push ends next, when a fetch does, and when a session is due."""
        return self._out.next_ns(), self._in.next_ns(), self._due[0][0] if self._due else None

    def step(self, now_ns: int) -> int | None:
        """Let one transfer end that ends now; returns the session that was fetched, if one was."""
        if (sent := self._out.end(now_ns)) is not None:
            self._store.put(sent.session, self._pushing.pop(sent))
            return None
        came = self._in.end(now_ns)
        if came is not None and (fetch := self._fetches.get(came.session)) is not None:
            return came.session if fetch.transfer == came else None
        return None


def _num_requests(num_bytes: int) -> int:
    """Return how many objects so much of a session is, with what names them."""
    return ceil_div(num_bytes, CHUNK_BYTES) + 1
