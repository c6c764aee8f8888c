"""Sessions moving between servers, through a store that all of them can reach. Pure.

A server stores a session there, as far as the store does not have it, when the session has been
quiet for a while after its turn, when it is evicted, or when the server drains. When a turn arrives
whose session a server does not have, the server asks the store, and fetches what is there. Each
direction moves one session after another. The store keeps a session for its TTL, fetched or not.
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

CHUNK_BYTES = 8 << 20  # of an object, as in kvd.remote


class Stored(NamedTuple):
    """What was stored of a session after a turn.

    Attributes:
        kept: its tokens, and states or windows.
        number: the turn's number: of two versions, that of the later turn is valid.
        expires_ns: when it expires; None: never.
    """

    kept: Kept
    number: int
    expires_ns: int | None


class RemoteStore:
    """The sessions in the remote store."""

    def __init__(self) -> None:
        self._stored: dict[int, Stored] = {}

    def find(self, session: int, now_ns: int) -> Kept:
        """Return what is stored of a session."""
        found = self._stored.get(session)
        if found is None or (found.expires_ns is not None and found.expires_ns <= now_ns):
            return NOTHING
        return found.kept

    def put(self, session: int, stored: Stored) -> None:
        """Store a version of a session, unless there is a later one: then the writer is fenced."""
        remote = self._stored.get(session)
        if remote is None or remote.number < stored.number:
            self._stored[session] = stored


class Fetch(NamedTuple):
    """A server's fetch of a session.

    Attributes:
        kept: what it brings.
        tokens: tokens that can be loaded with it.
        transfer: its transfer.
    """

    kept: Kept
    tokens: int
    transfer: Transfer


class Mover:
    """Moves one server's sessions to and from the store.

    Args:
        store: the remote store.
        costs: bytes and times of turns.
        bytes_per_s: bandwidth in each direction.
        quiet_s: seconds without a turn after which a session is pushed; None: only when draining.
        takes_evicted: push sessions that are evicted, too; kvd reports them in time.
        waits: turns wait for what is fetched.

    Attributes:
        is_draining: push sessions as soon as their turns have ended.
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
        self._due: deque[tuple[int, int, int]] = deque()  # time, session, its turn's number
        self._kept: dict[int, Stored] = {}  # unpushed sessions that have no turn here
        self._pushing: dict[Transfer, Stored] = {}
        self._fetches: dict[int, Fetch] = {}

    def totals(self) -> Totals:
        """Return the counters of traffic to and from the store."""
        return Totals(
            bytes_pushed=self._out.bytes_moved,
            bytes_fetched=self._in.bytes_moved,
            store_puts=self._num_puts,
            store_gets=self._num_gets,
        )

    @property
    def fetch_s(self) -> float | None:
        """Seconds that a turn waits for each token that is fetched; None: it does not wait."""
        if not self._waits:
            return None
        return self._costs.loaded_bytes(1) / self._in.bytes_per_s

    @property
    def stored_after_s(self) -> float:
        """Seconds after its turn at which a session is pushed."""
        return inf if self._quiet_ns is None else self._quiet_ns / NS_PER_S

    # --------------------------------------------------------------------------------- to the store

    def on_store(self, session: int, stored: Stored, now_ns: int) -> None:
        """Record that a session was stored here after a turn."""
        self._kept[session] = stored
        if self.is_draining:
            self.push(session, now_ns)
        elif self._quiet_ns is not None:
            self._due.append((now_ns + self._quiet_ns, session, stored.number))

    def on_run(self, session: int) -> None:
        """Record that a session has a turn here: its last version is not pushed any more."""
        self._kept.pop(session, None)

    def pop_due(self, now_ns: int) -> int | None:
        """Return a session that has been quiet long enough, to be pushed; None: there is none."""
        while self._due and self._due[0][0] <= now_ns:
            _, session, number = self._due.popleft()
            if session in self._kept and self._kept[session].number == number:
                return session
        return None

    def on_evict(self, key: SessionKey, now_ns: int) -> None:
        """Record that a session is being evicted from all tiers."""
        if self._takes_evicted:
            self.push(int(key.session_id), now_ns)

    def push(self, session: int, now_ns: int) -> None:
        """Send what the store lacks of a session."""
        stored, remote = self._kept.pop(session, None), self._store.find(session, now_ns)
        if stored is None:
            return
        kept = stored.kept
        clean = Kept(min(remote.num_tokens, kept.num_tokens), remote.ends_in(kept))
        num_bytes = sum(self._costs.new_bytes(kept, clean))
        self._num_puts += _num_requests(num_bytes)
        self._pushing[self._out.move(session, num_bytes, now_ns)] = stored

    @property
    def unpushed(self) -> list[int]:
        """Sessions that were stored here and not pushed since."""
        return [*self._kept]

    # ------------------------------------------------------------------------------- from the store

    def fetch(self, session: int, history_tokens: int, now_ns: int) -> None:
        """Fetch what a turn can load of its session; the server holds none of it."""
        kept = self._store.find(session, now_ns).within(history_tokens)
        tokens = self._costs.loadable(kept)
        self._num_gets += 1
        if not tokens:
            return
        num_bytes = self._costs.loaded_bytes(tokens)
        self._num_gets += _num_requests(num_bytes) - 1
        self._fetches[session] = Fetch(kept, tokens, self._in.move(session, num_bytes, now_ns))

    def fetch_of(self, session: int, now_ns: int) -> Fetch | None:
        """Return the fetch that a turn can use or wait for; None: there is none."""
        fetch = self._fetches.get(session)
        if fetch is None or self._waits or fetch.transfer.ends_ns <= now_ns:
            return fetch
        return None

    def drop_fetch(self, session: int) -> None:
        """Drop the fetch of a session, whose turn does not need it any more."""
        self._fetches.pop(session, None)

    # ----------------------------------------------------------------------------------------- time

    def next_ns(self) -> Iterable[int | None]:
        """Return when the next push ends, the next fetch ends, and the next session is due."""
        return self._out.next_ns(), self._in.next_ns(), self._due[0][0] if self._due else None

    def step(self, now_ns: int) -> int | None:
        """End one transfer that is due now; return the session that was fetched, if one was."""
        if (sent := self._out.end(now_ns)) is not None:
            self._store.put(sent.session, self._pushing.pop(sent))
            return None
        arrived = self._in.end(now_ns)
        if arrived is not None and (fetch := self._fetches.get(arrived.session)) is not None:
            return arrived.session if fetch.transfer == arrived else None
        return None


def _num_requests(num_bytes: int) -> int:
    """Return the requests that move so many bytes: one per object, and one for the manifest."""
    return ceil_div(num_bytes, CHUNK_BYTES) + 1
