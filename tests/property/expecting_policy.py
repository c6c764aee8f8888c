"""A policy for tests of reading ahead of turns that are only likely."""

from collections.abc import Iterator

from kvd.core.eviction.policies import LookaheadQueuePolicy
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey


class ExpectingPolicy(LookaheadQueuePolicy):
    """Expects every idle session that is on SSD only to return soon."""

    name = "expecting"

    def returning(self, now_ns: int) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        for key in super().victims(Tier.SSD, now_ns):
            is_busy = self._queue.is_queued(key) or self._queue.is_running(key)
            if not is_busy and not self.ranks(key, Tier.DRAM):
                yield key
