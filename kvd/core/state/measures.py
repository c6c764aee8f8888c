"""How long things take and rest in the cache, by bucket, and why loads missed. Pure.

Beside the counters of `outbox.py`, which say how often. Times are of kvd's own clock.
"""

from collections import OrderedDict

from kvd.core.records.records import Tier
from shared.types.histogram import LATENCY_BOUNDS_S, REST_BOUNDS_S, Histogram, Tally
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MOST_EVICTED = 10_000  # sessions whose eviction is remembered until they are asked for


class Measures:
    """See the module docstring.

    Attributes:
        load_s: from the grant of a load lease to its completion.
        store_s: of a store lease, the same.
        misses: loads answered with nothing, by reason.
        rest_before_evict_s: by tier: how long a session had not been used when the last of it left.
        gone_before_asked_s: by tier: how long it was gone when it was asked for again.
    """

    def __init__(self) -> None:
        self.load_s = Histogram(LATENCY_BOUNDS_S)
        self.store_s = Histogram(LATENCY_BOUNDS_S)
        self.misses = Tally()
        self.rest_before_evict_s = Histogram(REST_BOUNDS_S)
        self.gone_before_asked_s = Histogram(REST_BOUNDS_S)
        self._gone: OrderedDict[SessionKey, tuple[Tier, int]] = OrderedDict()  # oldest first

    def evicted(self, key: SessionKey, tier: Tier, last_access_ns: int, now_ns: int) -> None:
        """A session has left a tier to make room."""
        self.rest_before_evict_s.observe((now_ns - last_access_ns) / NS_PER_S, tier.value)
        self._gone.pop(key, None)
        self._gone[key] = (tier, now_ns)
        if len(self._gone) > MOST_EVICTED:
            self._gone.popitem(last=False)

    def asked(self, key: SessionKey, now_ns: int) -> None:
        """A load asks for a session."""
        gone = self._gone.pop(key, None)
        if gone is not None:
            tier, since_ns = gone
            self.gone_before_asked_s.observe((now_ns - since_ns) / NS_PER_S, tier.value)
