"""One block of KV, and the index of all blocks by content key.

Pure. Invariants:
1. a block in the index has bytes in at least one tier, or is being read or written;
2. the index's counts equal a recount at any moment: copies are changed through the index only;
3. a block that is READING or VERIFYING has a slot whose bytes may not be used yet;
4. the token ids of a block in DRAM are known, unless it is READING; its checksums too, once it was
   hashed. Only a hashed block is in the journal, or written;
5. only an unverified block, or one that is to be verified on each load, is VERIFYING.

A stored block is hashed, then written: it is clean. A block on SSD is read, an adopted one verified
(one that is corrupt is then read, if it is on SSD), a sparse one copied together with others.
`BLOCK_MOVES` is the table of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey
from shared.types.transitions import Transitions


class BlockIo(Enum):
    """What the performer is doing with a block."""

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
    """KV of up to `block_tokens` consecutive tokens; committed, hence never changed.

    Attributes:
        tenant: whose sessions may use it, and whose quota it counts for.
        token_ids: kept while the bytes are in DRAM: what a WriteBlock needs.
        checksums: of the bytes in DRAM, as in StoredBlock; b"" if they are not hashed.
        is_unverified: adopted from an earlier kvd and not compared with its checksums yet.
        is_ahead: read into DRAM ahead of a load, and not loaded yet.
        readers: load leases on it: its slot stays.
        holders: calls and store leases that build on it: it does not leave its last tier.
        users: sessions with a span on it, in the order in which they came (a dict, for that).
        num_answer_dram: of the users, those that answer for it in DRAM; see block_users.py.
        num_answer_ssd: the same, on SSD.
        num_answer_clean: of those in DRAM, the ones that are asked for clean blocks.
        last_user: the session that used it last, as far as known. It may be gone if no other does.
        is_discarded: it has lost its last user to a discard, or is about to.
    """

    key: bytes
    num_tokens: int
    tenant: str = ""
    token_ids: bytes = b""
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
        """Whether a write of it may be asked for now."""
        is_good = bool(self.checksums) and not self.is_unverified
        return self.dirty and is_good and self.io is BlockIo.IDLE

    @property
    def clean(self) -> bool:
        """Whether it may leave DRAM at once: SSD has it, and nobody reads or moves it."""
        is_copy = self.slot_id is not None and self.extent is not None
        return is_copy and not self.readers and self.io is BlockIo.IDLE

    @property
    def is_in_dram(self) -> bool:
        """Whether the bytes are in a slot, be it unverified; what is still being read is not."""
        return self.slot_id is not None and self.io is not BlockIo.READING

    @property
    def wanted(self) -> bool:
        """Whether anybody needs the block at all."""
        return bool(self.users or self.readers or self.holders)

    def move(self, event: str) -> None:
        """Record what the performer begins or ends with the block; see BLOCK_MOVES."""
        self.io = BLOCK_MOVES.after(self.io, event)

    def num_answer(self, tier: Tier) -> int:
        """Return how many of its users answer for it in the tier."""
        return self.num_answer_dram if tier is Tier.DRAM else self.num_answer_ssd

    def newest_user(self) -> SessionKey:
        """Find the user that came last; there is one.

        A dict keeps the gaps of what was removed, and looking at its last item steps over those at
        its end each time. To pop the item drops them for good, so that this is O(1) in the long
        run.
        """
        key, _ = self.users.popitem()
        self.users[key] = None
        return key

    def resides(self, tier: Tier) -> bool:
        """Whether the block has a place in the tier."""
        return (self.slot_id if tier is Tier.DRAM else self.extent) is not None

    def may_vanish(self) -> bool:
        """Whether its last copy may go: nobody reads it, builds on it or moves it."""
        return not self.readers and not self.holders and self.io is BlockIo.IDLE


class BlockIndex:
    """All blocks by content key, with their counts."""

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
        """Find a block."""
        return self._blocks.get(key)

    def holds(self, block: Block) -> bool:
        """Whether this very block (not a later one of the same key) is in the index."""
        return self._blocks.get(block.key) is block

    def add(self, block: Block) -> None:
        """Take a new block in, with the places that it has already."""
        assert block.key not in self._blocks, "a block key is indexed once"
        self._blocks[block.key] = block
        self._recount(block, 1)

    def remove(self, block: Block) -> None:
        """Forget a block that has lost its places."""
        assert not any(map(block.resides, Tier)), "a block leaves its tiers first"
        del self._blocks[block.key]

    def enter_dram(self, block: Block, slot_id: int, generation: int) -> None:
        """Give the block a slot."""
        self._recount(block, -1)
        block.slot_id, block.generation = slot_id, generation
        self._recount(block, 1)

    def leave_dram(self, block: Block) -> int:
        """Take the block's slot away and return it."""
        assert block.slot_id is not None, "only a block with a slot can lose it"
        slot_id = block.slot_id
        self._recount(block, -1)
        block.slot_id, block.token_ids, block.checksums = None, b"", b""
        block.is_unverified = block.is_ahead = False
        self._recount(block, 1)
        return slot_id

    def enter_ssd(self, block: Block, extent: int) -> None:
        """Record that the block is durable."""
        self._recount(block, -1)
        block.extent = extent
        self._recount(block, 1)

    def leave_ssd(self, block: Block) -> int:
        """Take the block's extent away and return it."""
        assert block.extent is not None, "only a block with an extent can lose it"
        extent = block.extent
        self._recount(block, -1)
        block.extent = None
        self._recount(block, 1)
        return extent

    def set_contents(self, block: Block, token_ids: bytes, checksums: bytes) -> None:
        """Record what the bytes in the block's slot are."""
        self._recount(block, -1)
        block.token_ids, block.checksums = token_ids, checksums
        self._recount(block, 1)

    def set_unverified(self, block: Block, *, is_unverified: bool) -> None:
        """Record whether the bytes in the block's slot are still to be verified."""
        self._recount(block, -1)
        block.is_unverified = is_unverified
        self._recount(block, 1)

    def _recount(self, block: Block, sign: int) -> None:
        self.num_dram += sign * (block.slot_id is not None)
        self.num_ssd += sign * (block.extent is not None)
        self.num_dirty += sign * block.dirty
        self.num_unhashed += sign * block.unhashed
        self.num_unverified += sign * block.is_unverified
