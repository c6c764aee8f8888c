"""What the cache engine asks of the world: frozen values, returned by `CacheEngine.drain`.

Pure. The performer carries them out and reports back through `read_done`, `verify_done`,
`hash_done`, `write_done`, `drop_done`, `compact_done`, `wipe_done` and `index_committed`.

Invariants the performer keeps:
1. index actions (PutBlock, PutSession, PutUse, DropSession, DropBlock, CommitIndex) reach the index
   in the order they were drained;
2. `drop_done` is reported only once the removal of the entry is committed, because the extent is
   reused after it;
3. journal actions (PutSlot, ClearSlot) are done before the call that caused them is answered;
4. every action with an `op_id` is answered exactly once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvd.core.records.entries import BlockRecord, SessionRecord, SlotRecord
from shared.types.session_key import SessionKey

# Names of events, for Emit.
SESSION_STORED = "session_stored"
SESSION_CUT = "session_cut"
SESSION_DROPPED = "session_dropped"
SESSION_EXPIRED = "session_expired"
SESSION_FLUSHED = "session_flushed"
SESSION_ENDED = "session_ended"
SESSION_AWAITING = "session_awaiting"
SESSION_SUPERSEDED = "session_superseded"
SESSION_DISCARDED = "session_discarded"
SESSION_GRAFTED = "session_grafted"
SESSION_COMPACTED = "session_compacted"
BLOCK_CORRUPT = "block_corrupt"
READ_FAILED = "read_failed"
SSD_DEGRADED = "ssd_degraded"
SSD_RECOVERED = "ssd_recovered"
OWNER_GONE = "owner_gone"
OWNER_DETACHED = "owner_detached"
OWNER_REATTACHED = "owner_reattached"
SCRUBBED = "scrubbed"
RESTORED = "restored"
SESSION_READ_AHEAD = "session_read_ahead"
SESSION_WANTED = "session_wanted"
SESSION_NEAR_EVICTION = "session_near_eviction"

EVICTED = "evicted"  # why a session was cut or dropped: to make room


class IoOutcome(Enum):
    """How an SSD read or write ended."""

    OK = "ok"
    CORRUPT = "corrupt"  # read: the bytes are not the ones written
    TRANSIENT = "transient"  # EIO and the like: the bytes may still be there, and good
    FULL = "full"  # write: no space in the file system


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read an extent into a slot and verify its header and each layer slice; then `read_done`.

    Attributes:
        layered: part of a large load: layer by layer over all its blocks, so that the engine can
            start on layer 0 before the last layer is there.
        ahead: no load waits for it; one that comes to wait names it in TrackLoad.
    """

    op_id: int
    key: bytes
    extent: int
    slot_id: int
    num_tokens: int
    layered: bool = False
    ahead: bool = False


class HashSlot(NamedTuple):
    """Compute the checksums of a committed slot; then `hash_done`."""

    op_id: int
    slot_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class VerifySlot:
    """Compare a slot's bytes with their checksums; then `verify_done`."""

    op_id: int
    slot_id: int
    num_tokens: int
    checksums: bytes
    urgent: bool  # a load waits for it


@dataclass(frozen=True, slots=True)
class VerifyExtent:
    """Read an extent to nowhere and verify it; then `verify_done`."""

    op_id: int
    key: bytes
    extent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a slot to an extent, with its header, and make it durable; then `write_done`."""

    op_id: int
    key: bytes
    slot_id: int
    extent: int
    num_tokens: int
    token_ids: bytes
    checksums: bytes
    tenant: str  # whose block it is, and whose key seals it


@dataclass(frozen=True, slots=True)
class SourceSlot:
    """A slot that KV is copied from, and what its bytes must be."""

    slot_id: int
    num_tokens: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The KV of tokens [start, start + num_tokens) of a slot."""

    slot_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """A slot to be filled with runs of tokens, one after the other."""

    slot_id: int
    num_tokens: int
    runs: tuple[TokenRun, ...]


@dataclass(frozen=True, slots=True)
class CompactTokens:
    """Verify the sources, copy their KV together, hash what was made; then `compact_done`."""

    op_id: int
    sources: tuple[SourceSlot, ...]
    blocks: tuple[DenseBlock, ...]


@dataclass(frozen=True, slots=True)
class WipeSlots:
    """Zero slots that nobody uses, and their journal records; then `wipe_done`."""

    op_id: int
    slot_ids: tuple[int, ...]


class PutSlot(NamedTuple):
    """Record in the journal what a slot holds, for the next kvd."""

    slot_id: int
    record: SlotRecord


class ClearSlot(NamedTuple):
    """Record in the journal that a slot holds nothing."""

    slot_id: int


@dataclass(frozen=True, slots=True)
class TrackLoad:
    """Publish how many layers of a pending load are ready: the least of these operations.

    It comes after the operations themselves; one that is not begun yet is now urgent. A second one
    for the same lease replaces the first: a copy in DRAM was corrupt and is read from SSD. An
    operation that fails and is not replaced fails the load.
    """

    lease_id: int
    engine_id: int
    op_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UntrackLoad:
    """The load is over: its progress word is free."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class PutBlock:
    """Write an index entry; the data it points to is durable already."""

    block: BlockRecord


@dataclass(frozen=True, slots=True)
class PutSession:
    """Write or replace a session's entry.

    Its spans may name blocks that are not on SSD (yet): recovery cuts it there.
    """

    session: SessionRecord


@dataclass(frozen=True, slots=True)
class PutUse:
    """Write when a session was last used; of its entry nothing else has changed."""

    key: SessionKey
    last_access_ns: int


@dataclass(frozen=True, slots=True)
class DropSession:
    """Remove a session's entry."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class DropBlock:
    """Remove a block's entry and commit; answer with `drop_done`."""

    op_id: int
    key: bytes


@dataclass(frozen=True, slots=True)
class CommitIndex:
    """Commit all entries that were put or removed before; answer with `index_committed`."""

    op_id: int


@dataclass(frozen=True, slots=True)
class LeaseReady:
    """A pending load lease has all its reads behind it, or is lost: ask `lease_state`."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SpaceFreed:
    """Slots may be had again: who was answered "wait" (or "busy") asks again."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A session that loads wait for has changed, or does not come: they ask again."""


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for WatchEvents and the log."""

    name: str
    key: SessionKey | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


Action = (
    ReadBlock
    | HashSlot
    | VerifySlot
    | VerifyExtent
    | WriteBlock
    | CompactTokens
    | WipeSlots
    | PutSlot
    | ClearSlot
    | TrackLoad
    | UntrackLoad
    | PutBlock
    | PutSession
    | PutUse
    | DropSession
    | DropBlock
    | CommitIndex
    | LeaseReady
    | SpaceFreed
    | FetchEnded
    | Emit
)
