"""Policy `lookahead_queue`: idle sessions go first, then the queue, tail first. Pure."""

from kvd.core.eviction.queue_window import QueuePlace
from kvd.core.eviction.ranked import END, ENDED, IDLE, QUEUED, RUNNING, RankedPolicy, SessionFacts
from kvd.core.eviction.session_order import Warmth
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


class LookaheadQueuePolicy(RankedPolicy):
    """Look-ahead eviction over the whole queue; sessions with no turn in it go least recently used.

    A running session is in the engine's memory: its copy in DRAM is of no use before it is stored
    again. Elsewhere it counts as just used, for that copy may be the only one.

    *Source:* CachedAttention §3.3.2, without the limit of its window: beyond a window, least
    recently used first takes exactly the queued sessions that are needed next.
    """

    name = "lookahead_queue"
    looks_ahead = True

    def _warmth(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> Warmth:
        place = self._place_of(key)
        if place is not None:
            return QUEUED, *later_first(place)
        if self._queue.is_running(key):
            return (RUNNING if tier is Tier.DRAM else IDLE), END, facts.last_use
        return ENDED if facts.is_ended else IDLE, facts.last_use

    def _place_of(self, key: SessionKey) -> QueuePlace | None:
        """The place that a session is kept for, if there is one."""
        return self._queue.place(key)


def later_first(place: QueuePlace) -> Warmth:
    """Numbers that sort places from the tail of the queue to its head."""
    priority, tag, number = place.rank
    return -place.starts_at_ns, -place.owner, -priority, -tag, -number
