"""Policy `lru`: least recently used first. Pure; neither the queue nor the future is looked at."""

from kvd.core.eviction.ranked import ENDED, IDLE, RankedPolicy, SessionFacts
from kvd.core.eviction.session_order import Warmth
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


class LruPolicy(RankedPolicy):
    """Least recently used first.

    *Source:* the baseline of CachedAttention §4.3.4.
    """

    name = "lru"
    looks_ahead = False

    def _warmth(
        self,
        key: SessionKey,  # noqa: ARG002
        facts: SessionFacts,
        tier: Tier | None,  # noqa: ARG002
    ) -> Warmth:
        return ENDED if facts.is_ended else IDLE, facts.last_use
