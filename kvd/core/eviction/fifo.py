"""Policy `fifo`: first in, first out. Pure; neither uses nor the queue are looked at."""

from kvd.core.eviction.ranked import ENDED, IDLE, RankedPolicy, SessionFacts
from kvd.core.eviction.session_order import Warmth
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


class FifoPolicy(RankedPolicy):
    """By when a session was first stored; one that was dropped and comes back enters anew.

    *Source:* the baseline of CachedAttention §4.3.4.
    """

    name = "fifo"
    looks_ahead = False

    def _warmth(
        self,
        key: SessionKey,  # noqa: ARG002
        facts: SessionFacts,
        tier: Tier | None,  # noqa: ARG002
    ) -> Warmth:
        return ENDED if facts.is_ended else IDLE, facts.first_use
