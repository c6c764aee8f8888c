"""One block of KV, and the index of all blocks by content key.

Pure. Invariants:
1. a block in the index has bytes in at least one tier, or is being read or written;
2. the counts of the index equal a recount at any moment: places are changed by the index only;
3. a block that is READING or VERIFYING has a slot whose bytes may not be used yet;
4. the token ids of a block in DRAM are known, unless it is READING. Its checksums are known too,
   once it was hashed. Only a hashed block is in the journal, or written to SSD;
5. a block is VERIFYING only if it is unverified, or if each load has to verify it.

The life of a block: a stored block is hashed, then written to SSD, and is clean from then on. A
block on SSD is read; an adopted block is verified (and read, if it is corrupt and on SSD); a sparse
block is copied into a new one together with others. `BLOCK_MOVES` is the table of transitions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvd.core.records.entries import Span
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey
from shared.types.transitions import Transitions


class BlockIo(Enum):
    """What the performer does with a block at the moment."""

    IDLE = "idle"
    READING = "reading"  # extent -> slot
    VERIFYING = "verifying"  # the slot's bytes are compared with their checksums
    HASHING = "hashing"  # the slot may be read meanwhile
    WRITING = "writing"  # slot -> extent; the slot may be read meanwhile
    COPYING = (
        "copying"  # tokens of it -> other slots (compacting.py); the slot may be read meanwhile
    )

    @property
    def is_arriving(self) -> bool:
        """Whether the slot's bytes may not be used yet."""
        return self is BlockIo.READING or self is BlockIo.VERIFYING


BLOCK_MOVES = Transitions(
    {
        BlockIo.IDLE: {
            "hash": BlockIo.HASHING,
            "write": BlockIo.WRITING,
            "read": BlockIo.READING,
            "verify": BlockIo.VERIFYING,
            "copy": BlockIo.COPYING,
        },
        BlockIo.HASHING: {"hash_done": BlockIo.IDLE},
        BlockIo.WRITING: {"write_done": BlockIo.IDLE},
        BlockIo.READING: {"read_done": BlockIo.IDLE},
        BlockIo.VERIFYING: {"verify_done": BlockIo.IDLE},
        BlockIo.COPYING: {"compact_done": BlockIo.IDLE},
    }
)


@dataclass(slots=True, eq=False)
class Block:
    """KV of up to `block_tokens` consecutive tokens. It is committed, so it never changes.

    Attributes:
        tenant: the tenant whose sessions may use it, and whose quota it counts for.
        token_ids: kept while the bytes are in DRAM, because a WriteBlock needs them.
        parent: the parent key in its own key, once that was computed here; b"": not known. With
            it, comparing token ids proves as much as computing the key again.
        checksums: checksums of the bytes in DRAM, as in StoredBlock; b"" if they are not hashed.
        is_unverified: adopted from an earlier kvd, and not compared with its checksums yet.
        is_ahead: read into DRAM ahead of a load, and not loaded yet.
        readers: number of load leases on it. While there are any it keeps its slot.
        holders: number of calls and store leases that build on it. While there are any it does not
            leave its last tier.
        users: sessions with a span on it, oldest first (a dict keeps that order).
        num_answer_dram: how many of the users answer for it in DRAM; see block_users.py.
        num_answer_ssd: how many answer for it on SSD.
        num_answer_clean: how many of those in DRAM answer for clean blocks.
        last_user: the session that used it last, as far as known. May be gone if no user is left.
        is_discarded: its last user has lost it to a discard, or is about to.
    """

    key: bytes
    num_tokens: int
    tenant: str = ""
    token_ids: bytes = b""
    parent: bytes = b""
    slot_id: int | None = None
    generation: int = 0
    extent: int | None = None
    checksums: bytes = b""
    is_unverified: bool = False
    is_ahead: bool = False
    io: BlockIo = BlockIo.IDLE
    readers: int = 0
    holders: int = 0
    users: dict[SessionKey, None] = field(default_factory=dict)
    num_answer_dram: int = 0
    num_answer_ssd: int = 0
    num_answer_clean: int = 0
    last_user: SessionKey | None = None
    is_discarded: bool = False

    @property
    def dirty(self) -> bool:
        """Whether DRAM holds the only copy."""
        return self.slot_id is not None and self.extent is None

    @property
    def unhashed(self) -> bool:
        """Whether DRAM holds the only copy and its checksums are not known."""
        return self.dirty and not self.checksums

    @property
    def writable(self) -> bool:
        """Whether it can be written to SSD now."""
        is_good = bool(self.checksums) and not self.is_unverified
        return self.dirty and is_good and self.io is BlockIo.IDLE

    @property
    def clean(self) -> bool:
        """Whether it can leave DRAM at once: it is on SSD, and neither read nor moved."""
        is_copy = self.slot_id is not None and self.extent is not None
        return is_copy and not self.readers and self.io is BlockIo.IDLE

    @property
    def is_in_dram(self) -> bool:
        """Whether the bytes are in a slot, verified or not. Not while they are being read."""
        return self.slot_id is not None and self.io is not BlockIo.READING

    @property
    def is_needed(self) -> bool:
        """Whether a session, load or store needs the block."""
        return bool(self.users or self.readers or self.holders)

    def move(self, event: str) -> None:
        """Record that an operation on the block begins or ends; see BLOCK_MOVES."""
        self.io = BLOCK_MOVES.after(self.io, event)

    def num_answer(self, tier: Tier) -> int:
        """Return how many of its users answer for it in the tier."""
        return self.num_answer_dram if tier is Tier.DRAM else self.num_answer_ssd

    def newest_user(self) -> SessionKey:
        """Return the user that was added last. The block must have one.

        Python's dict keeps the gaps of removed items, and looking up the last item steps over the
        gaps at its end each time. Popping the item removes them for good, so this is amortized
        O(1).
        """
        key, _ = self.users.popitem()
        self.users[key] = None
        return key

    def resides(self, tier: Tier) -> bool:
        """Whether the block has a place in the tier."""
        return (self.slot_id if tier is Tier.DRAM else self.extent) is not None

    def may_vanish(self) -> bool:
        """Whether its last copy may be removed: it is not read, built on or moved."""
        return not self.readers and not self.holders and self.io is BlockIo.IDLE


class BlockIndex:
    """All blocks by content key, with the counts of blocks in each state."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self.num_dram = 0
        self.num_ssd = 0
        self.num_dirty = 0
        self.num_unhashed = 0
        self.num_unverified = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __getitem__(self, key: bytes) -> Block:
        return self._blocks[key]

    def get(self, key: bytes) -> Block | None:
        """Return a block; None if there is none of this key."""
        return self._blocks.get(key)

    def set_last_user(self, spans: Sequence[Span], key: SessionKey) -> None:
        """Record that a session is the last one that used the blocks of its spans."""
        blocks = self._blocks  # a session may have thousands
        for span in spans:
            blocks[span.block_key].last_user = key

    def holds(self, block: Block) -> bool:
        """Whether this very object (not a later block of the same key) is in the index."""
        return self._blocks.get(block.key) is block

    def add(self, block: Block) -> None:
        """Add a new block, with the places that it already has."""
        assert block.key not in self._blocks, "a block key is indexed once"
        self._blocks[block.key] = block
        self._recount(block, 1)

    def remove(self, block: Block) -> None:
        """Remove a block, which must have lost all its places."""
        assert not any(map(block.resides, Tier)), "a block leaves its tiers first"
        del self._blocks[block.key]

    def enter_dram(self, block: Block, slot_id: int, generation: int) -> None:
        """Record the slot of a block."""
        self._recount(block, -1)
        block.slot_id, block.generation = slot_id, generation
        self._recount(block, 1)

    def leave_dram(self, block: Block) -> int:
        """Take the block's slot from it, and return the slot."""
        assert block.slot_id is not None, "only a block with a slot can lose it"
        slot_id = block.slot_id
        self._recount(block, -1)
        block.slot_id, block.token_ids, block.checksums = None, b"", b""
        block.is_unverified = block.is_ahead = False
        self._recount(block, 1)
        return slot_id

    def enter_ssd(self, block: Block, extent: int) -> None:
        """Record the extent of a block: it is durable now."""
        self._recount(block, -1)
        block.extent = extent
        self._recount(block, 1)

    def leave_ssd(self, block: Block) -> int:
        """Take the block's extent from it, and return the extent."""
        assert block.extent is not None, "only a block with an extent can lose it"
        extent = block.extent
        self._recount(block, -1)
        block.extent = None
        self._recount(block, 1)
        return extent

    def set_contents(self, block: Block, token_ids: bytes, checksums: bytes) -> None:
        """Record the token ids and checksums of the bytes in the block's slot."""
        self.num_unhashed -= block.unhashed  # the only count that depends on them
        block.token_ids, block.checksums = token_ids, checksums
        self.num_unhashed += block.unhashed

    def set_unverified(self, block: Block, *, is_unverified: bool) -> None:
        """Record whether the bytes in the block's slot have yet to be verified."""
        self._recount(block, -1)
        block.is_unverified = is_unverified
        self._recount(block, 1)

    def _recount(self, block: Block, sign: int) -> None:
        """Add a block to the counts, or take it out before one of its places changes."""
        has_slot, has_extent = block.slot_id is not None, block.extent is not None
        is_dirty = has_slot and not has_extent  # as `dirty` and `unhashed` say, without calls
        self.num_dram += sign * has_slot
        self.num_ssd += sign * has_extent
        self.num_dirty += sign * is_dirty
        self.num_unhashed += sign * (is_dirty and not block.checksums)
        self.num_unverified += sign * block.is_unverified
