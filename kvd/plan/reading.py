"""Reads from SSD, on demand and as prefetches. Pure.

The channel does one read at a time, and finishes what it began. Demands are read in the order in
which they came. A prefetch begins only while nothing else is to be read, so it is chosen as late
as possible.

At most one session is prefetched at a time, chosen when the channel becomes idle: the first one in
the queue's order, within the window, that is on SSD only and can be read before its turn starts
(PrefetchOrder); while no turn waits, one that is likely to return. Only sessions of a lower rank
make room for it.

*Source:* look-ahead prefetching, CachedAttention §3.3.1.
"""

from collections.abc import Callable
from itertools import islice

from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.records.tier import Tier
from kvd.plan.channel import Channel, Transfer
from kvd.plan.tiers import Tiers
from shared.types.session_key import SessionKey

MOST_RETURNING = 4  # sessions likely to return that are considered at a time


class Reading:
    """The reads of one server.

    Args:
        placement: the queue and the prefetch order.
        tiers: the sessions in DRAM and on SSD.
        channel: the SSD.
        dram_bytes: size of DRAM, which limits the prefetch window.
        wanted_bytes: returns the bytes of a session that its next turn needs.
    """

    def __init__(
        self,
        placement: SessionPlacement,
        tiers: Tiers,
        channel: Channel,
        dram_bytes: int,
        wanted_bytes: Callable[[SessionKey], int],
    ) -> None:
        self._placement = placement
        self._tiers = tiers
        self._channel = channel
        self._dram_bytes = dram_bytes
        self._wanted_bytes = wanted_bytes
        self._wanted: dict[int, Transfer] = {}  # by session: its read, under way or waiting

    # ----------------------------------------------------------------------------- demands

    def expected_ns(self, key: SessionKey, num_bytes: int, now_ns: int) -> int:
        """Return how long a turn would wait for a read of its session."""
        if _session_of(key) in self._wanted:
            return self._channel.remaining_ns(now_ns)
        return self._channel.waits_ns(now_ns) + self._channel.duration_ns(num_bytes)

    def demand(self, key: SessionKey, num_bytes: int, now_ns: int) -> None:
        """Read a session for its turn, unless it is being prefetched already."""
        session = _session_of(key)
        if session not in self._wanted:
            self._tiers.begin_reading(key)
            self._wanted[session] = self._channel.move(session, num_bytes, now_ns)

    def cancel(self, key: SessionKey) -> None:
        """Give up the read of a session; what is being read is not kept."""
        self._wanted.pop(_session_of(key), None)

    def on_end(self, key: SessionKey, read: Transfer) -> bool:
        """Record that a read has ended; return whether it is still wanted."""
        if self._wanted.get(read.session) != read:
            return False
        del self._wanted[read.session]
        self._tiers.end_reading(key)
        return True

    # ----------------------------------------------------------------------------- prefetches

    def look_ahead(self, now_ns: int) -> None:
        """Begin a prefetch, if the channel is idle and a session is worth it."""
        if not self._placement.policy.looks_ahead or not self._channel.is_idle:
            return
        window = max(1, self._placement.window(self._dram_bytes))
        prefetching = self._placement.prefetching
        while (key := prefetching.pick(window, self._is_in_time)) is not None:
            if self._tiers.find(key) is Tier.SSD:
                if self._read_ahead(key, now_ns):
                    prefetching.settle(key)
                return
            prefetching.settle(key)
        if len(self._placement.queue):
            return
        for key in [*islice(self._placement.policy.returning(now_ns), MOST_RETURNING)]:
            if self._tiers.find(key) is Tier.SSD and self._read_ahead(key, now_ns):
                return

    def _read_ahead(self, key: SessionKey, now_ns: int) -> bool:
        if not self._tiers.reserve(key, now_ns):
            return False
        session = _session_of(key)
        self._wanted[session] = self._channel.move(session, self._wanted_bytes(key), now_ns)
        return True

    def _is_in_time(self, key: SessionKey, starts_in_ns: int) -> bool:
        return not starts_in_ns or (
            self._channel.duration_ns(self._wanted_bytes(key)) <= starts_in_ns
        )


def _session_of(key: SessionKey) -> int:
    return int(key.session_id)
