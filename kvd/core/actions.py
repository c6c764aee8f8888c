"""What the cache engine asks of the world: frozen values, handed out by `CacheEngine.drain`.

Pure. The performer carries them out and reports back through `read_done`, `write_done` and
`drop_done`.

Invariants the performer keeps:
1. index actions (PutBlock, PutSession, DropSession, DropBlock) reach the index in the order they
   were drained;
2. `drop_done` is reported only once the removal of the row is committed, because the extent is
   reused after it;
3. every action with an `op_id` is answered exactly once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvd.core.records import BlockRecord, SessionRecord
from shared.session_key import SessionKey

# Names of events, for Emit.
SESSION_STORED = "session_stored"
SESSION_CUT = "session_cut"
SESSION_DROPPED = "session_dropped"
SESSION_EXPIRED = "session_expired"
SESSION_FLUSHED = "session_flushed"
SESSION_ENDED = "session_ended"
BLOCK_CORRUPT = "block_corrupt"
READ_FAILED = "read_failed"
SSD_DEGRADED = "ssd_degraded"
SSD_RECOVERED = "ssd_recovered"
OWNER_GONE = "owner_gone"
RESTORED = "restored"


class IoOutcome(Enum):
    """How an SSD read or write ended."""

    OK = "ok"
    CORRUPT = "corrupt"  # read: the bytes are not the ones written
    TRANSIENT = "transient"  # EIO and the like: the bytes may still be there
    FULL = "full"  # write: no space in the file system


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read an extent into a slot and verify each layer slice; answer with `read_done`."""

    op_id: int
    extent: int
    slot_id: int
    num_tokens: int
    checksums: tuple[int, ...]  # one per layer slice, as `write_done` reported them


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Hash a slot's layer slices, write it to an extent, make it durable; then `write_done`."""

    op_id: int
    slot_id: int
    extent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PutBlock:
    """Write an index row; the data it points to is durable already."""

    block: BlockRecord


@dataclass(frozen=True, slots=True)
class PutSession:
    """Write or replace a session's row.

    Its spans may name blocks that are not on SSD (yet): recovery cuts it there.
    """

    session: SessionRecord


@dataclass(frozen=True, slots=True)
class DropSession:
    """Remove a session's row."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class DropBlock:
    """Remove a block's row and commit; answer with `drop_done`."""

    op_id: int
    key: bytes


@dataclass(frozen=True, slots=True)
class LeaseReady:
    """A pending load lease has all its reads behind it, or is lost: ask `lease_state`."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SpaceFreed:
    """Slots may be had again: who was answered "wait" (or "busy") asks again."""


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for WatchEvents and the log."""

    name: str
    key: SessionKey | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


Action = (
    ReadBlock
    | WriteBlock
    | PutBlock
    | PutSession
    | DropSession
    | DropBlock
    | LeaseReady
    | SpaceFreed
    | Emit
)
