"""Actions: what the cache engine asks of the world, as frozen values from `CacheEngine.drain`.

Pure. The performer carries them out and reports their completion through `read_done`,
`verify_done`, `hash_done`, `write_done`, `drop_done`, `relocate_done`, `replace_done`,
`compact_done`, `wipe_done` and `index_committed`.

Invariants that the performer keeps:
1. index actions (PutBlock, ReplaceBlock, PutSession, PutUse, DropSession, DropBlock, CommitIndex)
   reach the index in the order in which they were drained;
2. `drop_done` and `replace_done` are reported only after the change of the entry is committed,
   because the extent that it named is reused then;
3. WriteJournal is carried out before the call that caused it is answered;
4. every action with an `op_id` is completed exactly once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

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

EVICTED = "evicted"  # reason for a cut or drop: to make room


class IoOutcome(Enum):
    """How an SSD read or write ended."""

    OK = "ok"
    CORRUPT = "corrupt"  # of a read: the bytes are not those that were written
    TRANSIENT = "transient"  # EIO and the like: the bytes may still be there, and intact
    FULL = "full"  # of a write: the file system has no space


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read an extent into a slot and verify its header and each layer slice; then `read_done`.

    Attributes:
        layered: it is part of a large load, which is read layer by layer over all its blocks, so
            that the engine can start on layer 0 before the last layer is read.
        ahead: no load waits for it. A load that comes to wait names it in TrackLoad.
    """

    op_id: int
    key: bytes
    extent: int
    slot_id: int
    num_tokens: int
    layered: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class HashSlots:
    """Compute the checksums of committed slots; then `hash_done`.

    Attributes:
        slots: (slot id, number of tokens) of each.
    """

    op_id: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class VerifySlot:
    """Compare a slot's bytes with their checksums; then `verify_done`."""

    op_id: int
    slot_id: int
    num_tokens: int
    checksums: bytes
    urgent: bool  # whether a load waits for it


@dataclass(frozen=True, slots=True)
class VerifyExtent:
    """Read an extent, verify it and discard the bytes; then `verify_done`."""

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
    tenant: str  # owner of the block, whose key seals it


@dataclass(frozen=True, slots=True)
class RelocateBlock:
    """Copy an extent to another, as it is, and make the copy durable; then `relocate_done`."""

    op_id: int
    source: int
    extent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SourceSlot:
    """A slot from which KV is copied, and the checksums that its bytes must have."""

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
    """Verify the sources, copy their KV together and hash the new blocks; then `compact_done`."""

    op_id: int
    sources: tuple[SourceSlot, ...]
    blocks: tuple[DenseBlock, ...]


@dataclass(frozen=True, slots=True)
class WipeSlots:
    """Zero unused slots, and their journal records; then `wipe_done`."""

    op_id: int
    slot_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Record in the journal what slots hold now, for the next kvd.

    It comes before other actions: a slot is not read into, or wiped, while the journal still says
    that it holds a block.

    Attributes:
        records: by slot; None: the slot holds nothing.
    """

    records: Mapping[int, SlotRecord | None]


@dataclass(frozen=True, slots=True)
class TrackLoad:
    """Publish the progress of a pending load: the fewest layers that any of these operations has.

    It comes after the operations themselves. Those that have not begun become urgent. A second one
    for the same lease replaces the first, when a corrupt copy in DRAM has to be read from SSD. An
    operation that fails and is not replaced fails the load.
    """

    lease_id: int
    engine_id: int
    op_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UntrackLoad:
    """End the tracking of a load: its progress word is free again."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class PutBlock:
    """Write a block's entry. The data to which it points is durable already."""

    block: BlockRecord


@dataclass(frozen=True, slots=True)
class ReplaceBlock:
    """Have a block's entry name another extent, and commit; then `replace_done`.

    The data there is durable already.
    """

    op_id: int
    block: BlockRecord


@dataclass(frozen=True, slots=True)
class PutSession:
    """Write or replace a session's entry.

    Its spans may name blocks that are not on SSD, or not yet: recovery cuts it there.
    """

    session: SessionRecord


@dataclass(frozen=True, slots=True)
class PutUse:
    """Write the time of a session's last use. Nothing else of its entry has changed."""

    key: SessionKey
    last_access_ns: int


@dataclass(frozen=True, slots=True)
class DropSession:
    """Remove a session's entry."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class DropBlock:
    """Remove a block's entry and commit; then `drop_done`."""

    op_id: int
    key: bytes


@dataclass(frozen=True, slots=True)
class CommitIndex:
    """Commit all entries that were written or removed before; then `index_committed`."""

    op_id: int


@dataclass(frozen=True, slots=True)
class LeaseReady:
    """Report that a pending load lease is filled, or lost; `loads.state_of` says which."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SpaceFreed:
    """Report that slots may be free: callers that were answered "wait" or "busy" ask again."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Report that a session for which loads wait has changed, or will not come: they ask again."""


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for WatchEvents and the log."""

    name: str
    key: SessionKey | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


Action = (
    ReadBlock
    | HashSlots
    | VerifySlot
    | VerifyExtent
    | WriteBlock
    | RelocateBlock
    | CompactTokens
    | WipeSlots
    | WriteJournal
    | TrackLoad
    | UntrackLoad
    | PutBlock
    | ReplaceBlock
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
