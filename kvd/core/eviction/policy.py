"""EvictionPolicy: what ranks sessions, per tier.

Pure. A policy knows nothing of blocks, bytes in a tier or leases. For each tier it keeps an order
of the sessions that may have bytes there. Being in an order without bytes is allowed (who makes
room takes such a session out when it meets it), having bytes and no user in the order is not.

One order more is of the sessions that may have *clean* bytes in DRAM: those that are on SSD too
and not in use, so that they may go at once. Who makes room without writing looks at these only, and
not at every session that has nothing to give just then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvd.core.eviction.queue_window import QueuePlace, QueueWindow
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at.

    Attributes:
        queue: of all engines.
        eviction_window: the paper's L_ew, in jobs, now.
    """

    queue: QueueWindow
    eviction_window: Callable[[], int]


class EvictionPolicy(Protocol):
    """Ranks sessions, coldest first, per tier.

    Every call is O(log sessions), and so is each session that `victims` yields.
    """

    @property
    def name(self) -> str:
        """Name it is configured by."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether sessions that wait, or are likely to return, are read from SSD in advance."""
        ...

    # ------------------------------------------------------------------------- a session's life

    def arrived(self, key: SessionKey, now_ns: int) -> None:
        """Note that a turn of the session was submitted; perhaps nothing is stored of it."""
        ...

    def engaged(
        self, key: SessionKey, place: QueuePlace | None, now_ns: int, *, is_running: bool
    ) -> None:
        """Note where its first waiting turn stands (None: none waits), and whether one runs.

        A running session's KV is in the engine's memory: in DRAM it goes before others. In SSD it
        does not, it may be the only copy.
        """
        ...

    def touched(self, key: SessionKey, now_ns: int) -> None:
        """Note that the session is used now; it enters the order of every tier."""
        ...

    def sized(self, key: SessionKey, num_tokens: int) -> None:
        """Note how much is stored of the session, after it was stored."""
        ...

    def ended(self, key: SessionKey) -> None:
        """Note that the session will not come back: first victim, until touched again."""
        ...

    def guarded(self, key: SessionKey, *, is_guarded: bool) -> None:
        """Rank the session after all that are not guarded, from now on (or no longer)."""
        ...

    def removed(self, key: SessionKey) -> None:
        """Take the session out of every order: it is dropped, or hard-pinned."""
        ...

    # ------------------------------------------------------------------------------- its bytes

    def restored(self, keys: Sequence[SessionKey]) -> None:
        """Take in sessions of an earlier kvd, coldest first, all with bytes on SSD.

        Before any other call. What is known of one beyond its place follows, as `guarded`, `ended`
        and `entered`.
        """
        ...

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """Note bytes in this tier without a use (a late write, a shared block it answers for)."""
        ...

    def left(self, key: SessionKey, tier: Tier) -> None:
        """Note that nothing of it is to be had in this tier."""
        ...

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """Whether the session is in this tier's order."""
        ...

    def offered(self, key: SessionKey) -> None:
        """Note that the session, which is in the order of DRAM, has clean bytes there."""
        ...

    def spent(self, key: SessionKey) -> None:
        """Note that it has none that it could give, until they are offered again."""
        ...

    def offers(self, key: SessionKey) -> bool:
        """Whether the session is in the order of those that may have clean bytes."""
        ...

    # ----------------------------------------------------------------------------------- asked

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,
        *,
        colder_than: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """Yield sessions coldest first; None: over all tiers. No other call meanwhile.

        With `clean`, which is for DRAM, only those that may have clean bytes there.
        With `colder_than`, only those that may give way to this session, which need not be in the
        order itself: none that is needed sooner.
        """
        ...

    def returning(self, now_ns: int) -> Iterator[SessionKey]:
        """Yield sessions on SSD and not in DRAM that are likely to return soon, likeliest first.

        Sessions of which a turn waits or runs are not among them. No other call meanwhile.
        """
        ...
