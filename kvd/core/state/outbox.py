"""Actions on their way out, and what is counted and measured on the way. Pure.

Counters say how often; `CacheHistograms` how long things take and rest, by bucket, and why loads
missed. Times are of kvd's own clock.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvd.core.records.actions import Action, Emit, FetchEnded, SpaceFreed
from kvd.core.records.records import Tier
from kvd.core.state.index_line import IndexLine
from kvd.core.state.session import Session
from shared.types.histogram import LATENCY_BOUNDS_S, REST_BOUNDS_S, Histogram, Tally
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MOST_EVICTED = 10_000  # sessions whose eviction is kept until a load asks for them
# Monotonic counters since start; each name is an entry of LayoutStats.counters.
COUNTERS = (
    "load_hits",  # loads answered with at least one span, reads included
    "load_misses",  # loads answered with none, "busy" excluded
    "loads_busy",  # loads that found no slot to read into
    "load_tokens_dram",  # tokens granted that were in DRAM
    "load_tokens_ssd",  # tokens granted that were read from SSD for it
    "load_states",  # states granted, of models with recurrent layers
    "load_windows",  # windows of blocks granted, of models with layers that have one
    "stores",  # completed store leases, and stores that found everything stored
    "store_tokens",  # tokens published
    "store_states",  # states published, of models with recurrent layers
    "store_windows",  # windows of blocks published, of models with layers that have one
    "stores_waited",  # answers "wait"
    "stores_refused",  # answers "no_space", "gap" and "quota"
    "discards",  # of sessions that are stored
    "discarded_tokens",  # stored ones
    "grafts",  # that gave a session anything
    "grafted_tokens",
    "compactions",  # runs of a session's spans that were put together
    "compacted_tokens",
    "compacted_blocks",  # blocks that were made by it
    "compactions_given_up",  # because the session came into use, or a source was gone
    "prefetch_blocks",  # reads begun ahead of a load
    "prefetch_tokens",  # of these blocks
    "prefetch_hits",  # of these blocks, found in DRAM by a load
    "prefetch_late",  # of these blocks, still being read when a load came for them
    "prefetch_wasted",  # of these blocks, gone from DRAM before any load came
    "prefetch_cancelled",  # sessions whose turn left the queue before all of them was read
    "evictions_dram",  # blocks that left DRAM for room
    "evictions_ssd",  # blocks that left SSD for room
    "evictions_quota",  # blocks that went because of their tenant's quota
    "sessions_dropped",  # sessions that lost all their blocks to make room
    "sessions_expired",
    "sessions_flushed",
    "sessions_wanted",  # by turns that wait, and not stored, or in part: asked for
    # Loads that waited for such a session to be fetched, by how that ended:
    "fetch_waits_fetched",
    "fetch_waits_absent",  # whoever fetches said that it does not come
    "fetch_waits_unanswered",  # nobody said anything
    "fetch_waits_late",  # nothing of it came in the time that the load had
    "fetch_waits_partly",  # some of it did, or came before it could not be fetched further
    "retentions",  # wishes of clients that a session be kept for a while
    "retentions_cut",  # of these, cut to what the settings allow, perhaps to nothing
    "awaits",  # answers that call tools, as engines said
    "supersedes",  # sessions in whose place others go on, as engines said
    # Turns that arrived of sessions that were stored, by where all of it was, or the farthest:
    "returns_dram",
    "returns_ssd",
    "returns_gone",  # in no tier any more
    "tool_returns_dram",  # of these, those of sessions that awaited tools
    "tool_returns_ssd",
    "tool_returns_gone",
    "blocks_corrupt",  # copies whose bytes were not the ones stored: the sum of the next two
    "blocks_corrupt_dram",
    "blocks_corrupt_ssd",
    "verified_blocks",  # copies in DRAM that were compared with their checksums, and good
    "adopted_blocks",  # found in an arena that an earlier kvd left
    "hash_errors",
    "read_errors",
    "write_errors",
    "demotions",  # blocks written because their room in DRAM was wanted
    "ssd_read_bytes",  # of reads into DRAM, by whole sectors; failed ones too
    "ssd_written_bytes",  # by whole sectors, as they lie on SSD
    "ssd_refused",  # blocks that found no extent and stay in DRAM only
    "leases_lost",  # completions of leases that were gone
)


class Outbox:
    """Collects actions and counters.

    Args:
        sessions: those that there are, whose rows the index is to be told.

    Attributes:
        index: what is to be written to the index.
        num_freed: how often `space_freed` was called.
        num_waits: how often `want_wake` was.
        awaited: sessions that loads wait for while they are fetched from elsewhere.
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
        """Queue an action, but for those of the index."""
        self._actions.append(action)

    def emit(
        self, name: str, key: SessionKey | None, fields: Mapping[str, str | int] | None = None
    ) -> None:
        """Queue an event; values become text."""
        text = {field: str(value) for field, value in (fields or {}).items()}
        self.add(Emit(name, key, text))

    def count(self, counter: str, increment: int = 1) -> None:
        """Add to a counter of COUNTERS."""
        self.counters[counter] += increment

    def want_wake(self) -> None:
        """Count a caller that was answered "wait": the next `space_freed` emits SpaceFreed."""
        self.num_waits += 1
        self._wake_wanted = True

    def space_freed(self) -> None:
        """Record that a slot came free, or that a block may be evicted that could not be."""
        self.num_freed += 1
        if self._wake_wanted:
            self._wake_wanted = False
            self.add(SpaceFreed())

    def fetch_ended(self, key: SessionKey) -> None:
        """Have those ask again who wait for a session to be fetched, if anybody does."""
        if key in self.awaited:
            self.awaited.discard(key)
            self.add(FetchEnded())

    def drain(self) -> list[Action]:
        """Return every action since the last drain, but for those of the index."""
        actions, self._actions = self._actions, []
        return actions


class CacheHistograms:
    """How long things take and rest in the cache, and why loads missed.

    Attributes:
        load_s: seconds from the grant of a load lease to its completion.
        store_s: seconds from the grant of a store lease to its completion.
        fetch_wait_s: seconds that loads waited for sessions to be fetched, by how that ended.
        misses: loads answered with nothing, by reason.
        rest_before_evict_s: by tier: how long a session had not been used when the last of it left.
        gone_before_asked_s: by tier: how long it was gone when it was asked for again.
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
        """Record that a load asks for a session, which may have left before."""
        gone = self._gone.pop(key, None)
        if gone is not None:
            tier, since_ns = gone
            self.gone_before_asked_s.observe((now_ns - since_ns) / NS_PER_S, tier.value)
