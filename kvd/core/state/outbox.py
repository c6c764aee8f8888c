"""Outgoing actions, counters and histograms of one cache engine. Pure.

Counters say how often something happened. `CacheHistograms` say how long things took or rested, by
bucket, and why loads missed. Times are of kvd's own clock.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvd.core.records.actions import Action, Emit, FetchEnded, SpaceFreed
from kvd.core.records.tier import Tier
from kvd.core.state.index_line import IndexLine
from kvd.core.state.session import Session
from shared.types.histogram import LATENCY_BOUNDS_S, REST_BOUNDS_S, Histogram, Tally
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MOST_EVICTED = 10_000  # sessions whose eviction is remembered until a load asks for them
# Monotonic counters since the start; each name is an entry of LayoutStats.counters.
COUNTERS = (
    "load_hits",  # loads answered with at least one span, reads included
    "load_misses",  # loads answered with none, "busy" excluded
    "loads_busy",  # loads that found no slot to read into
    "load_tokens_dram",  # tokens granted that were in DRAM
    "load_tokens_ssd",  # tokens granted that were read from SSD for the load
    "load_states",  # states granted, of models with recurrent layers
    "load_windows",  # windows of blocks granted, of models with layers that have one
    "stores",  # completed store leases, and stores that found everything stored
    "store_tokens",  # tokens published
    "store_states",  # states published, of models with recurrent layers
    "store_windows",  # windows of blocks published, of models with layers that have one
    "stores_waited",  # answers "wait"
    "stores_refused",  # answers "no_space", "gap" and "quota"
    "discards",  # of stored sessions
    "discarded_tokens",  # stored tokens
    "grafts",  # that gave a session at least one token
    "grafted_tokens",
    "compactions",  # runs of a session's spans that were put together
    "compacted_tokens",
    "compacted_blocks",  # blocks made by compactions
    "compactions_given_up",  # because the session was used, or a source block was gone
    "prefetch_blocks",  # reads begun ahead of a load
    "prefetch_tokens",  # of these blocks
    "prefetch_hits",  # of these blocks, found in DRAM by a load
    "prefetch_late",  # of these blocks, still being read when a load came for them
    "prefetch_wasted",  # of these blocks, gone from DRAM before any load came
    "prefetch_cancelled",  # sessions whose turn left the queue before all of them was read
    "evictions_dram",  # blocks that left DRAM to make room
    "evictions_ssd",  # blocks that left SSD to make room
    "evictions_quota",  # blocks that went because of their tenant's quota
    "sessions_dropped",  # sessions that lost all their blocks to make room
    "sessions_expired",
    "sessions_flushed",
    "sessions_wanted",  # needed by waiting turns, not or only partly stored, and so asked for
    # Loads that waited for such a session to be fetched, by how that ended:
    "fetch_waits_fetched",
    "fetch_waits_absent",  # the fetcher reported that the session does not come
    "fetch_waits_unanswered",  # no report came
    "fetch_waits_late",  # no part of it came before the load's deadline
    "fetch_waits_partly",  # a part came before the deadline, or before fetching failed
    "retentions",  # requests of clients to keep a session for a while
    "retentions_cut",  # of these, shortened to what the settings allow, perhaps to nothing
    "awaits",  # answers that call tools, as reported by engines
    "supersedes",  # sessions replaced by another session, as reported by engines
    # Turns that arrived for stored sessions, by the farthest tier that held a part of the session:
    "returns_dram",
    "returns_ssd",
    "returns_gone",  # no longer in any tier
    "tool_returns_dram",  # of these turns, those of sessions that awaited tools
    "tool_returns_ssd",
    "tool_returns_gone",
    "blocks_corrupt",  # copies whose bytes were not those stored: the sum of the next two
    "blocks_corrupt_dram",
    "blocks_corrupt_ssd",
    "verified_blocks",  # copies in DRAM that were compared with their checksums, and were intact
    "adopted_blocks",  # blocks found in an arena of an earlier kvd
    "hash_errors",
    "read_errors",
    "write_errors",
    "demotions",  # blocks written because their room in DRAM was needed
    "ssd_read_bytes",  # read into DRAM, in whole sectors; failed reads included
    "ssd_written_bytes",  # in whole sectors, as they lie on SSD
    "relocated_bytes",  # copied within SSD because the tier became smaller, in whole sectors
    "ssd_refused",  # blocks that found no extent and stay in DRAM only
    "leases_lost",  # completions of leases that no longer existed
)


class Outbox:
    """Collects actions and counters during calls.

    Args:
        sessions: all sessions, whose entries the index has to be given.

    Attributes:
        index: changes that wait to be written to the index.
        num_freed: how often `on_space_freed` was called.
        num_waits: how often `request_wake` was called.
        awaited: sessions that are being fetched from elsewhere while loads wait for them.
    """

    def __init__(self, sessions: Mapping[SessionKey, Session]) -> None:
        self._actions: list[Action] = []
        self.index = IndexLine(sessions)
        self._wake_wanted = False
        self.num_freed = 0
        self.num_waits = 0
        self.awaited: set[SessionKey] = set()
        self.counters = dict.fromkeys(COUNTERS, 0)

    def add(self, action: Action) -> None:
        """Queue an action. Actions of the index go to `index` instead."""
        self._actions.append(action)

    def emit(
        self, name: str, key: SessionKey | None, fields: Mapping[str, str | int] | None = None
    ) -> None:
        """Queue an event. Its values are converted to text."""
        text = {field: str(value) for field, value in (fields or {}).items()}
        self.add(Emit(name, key, text))

    def count(self, counter: str, increment: int = 1) -> None:
        """Add to one of COUNTERS."""
        self.counters[counter] += increment

    def request_wake(self) -> None:
        """Record a caller that was answered "wait": the next freed space emits SpaceFreed."""
        self.num_waits += 1
        self._wake_wanted = True

    def on_space_freed(self) -> None:
        """Record that a slot became free, or that a block became evictable."""
        self.num_freed += 1
        if self._wake_wanted:
            self._wake_wanted = False
            self.add(SpaceFreed())

    def on_fetch_end(self, key: SessionKey) -> None:
        """Have loads that wait for a session to be fetched ask again, if there are any."""
        if key in self.awaited:
            self.awaited.discard(key)
            self.add(FetchEnded())

    def drain(self) -> list[Action]:
        """Return all actions since the last drain, without those of the index."""
        actions, self._actions = self._actions, []
        return actions


class CacheHistograms:
    """How long things take and rest in the cache, and why loads missed.

    Attributes:
        load_s: seconds from the grant of a load lease to its completion.
        store_s: seconds from the grant of a store lease to its completion.
        fetch_wait_s: seconds that loads waited for sessions to be fetched, by how that ended.
        misses: loads that were granted nothing, by reason.
        rest_before_evict_s: seconds from a session's last use until the last of it left a tier, by
            tier.
        gone_before_asked_s: seconds from then until a load asked for the session, by tier.
    """

    def __init__(self) -> None:
        self.load_s = Histogram(LATENCY_BOUNDS_S)
        self.store_s = Histogram(LATENCY_BOUNDS_S)
        self.fetch_wait_s = Histogram(LATENCY_BOUNDS_S)
        self.misses = Tally()
        self.rest_before_evict_s = Histogram(REST_BOUNDS_S)
        self.gone_before_asked_s = Histogram(REST_BOUNDS_S)
        self._gone: OrderedDict[SessionKey, tuple[Tier, int]] = OrderedDict()  # oldest first

    def on_evict(self, key: SessionKey, tier: Tier, last_access_ns: int, now_ns: int) -> None:
        """Record that a session has left a tier to make room; O(1)."""
        self.rest_before_evict_s.observe((now_ns - last_access_ns) / NS_PER_S, tier.value)
        self._gone.pop(key, None)
        self._gone[key] = (tier, now_ns)
        if len(self._gone) > MOST_EVICTED:
            self._gone.popitem(last=False)

    def on_load(self, key: SessionKey, now_ns: int) -> None:
        """Record that a load asks for a session. It may have been evicted before."""
        gone = self._gone.pop(key, None)
        if gone is not None:
            tier, since_ns = gone
            self.gone_before_asked_s.observe((now_ns - since_ns) / NS_PER_S, tier.value)
