"""Slots of the arena: which are free, which are being filled, which hold a committed block.

Pure. Invariants:
1. a slot's generation grows with each allocation, so that a late reader notices;
2. the bytes of a COMMITTED slot never change (D9), unless they are found corrupt and read again;
3. after `mark_unwiped` a slot that was free or WRITING then stays known as unwiped, whatever it is
   used for meanwhile, until `take_unwiped` returns it.

A slot is WRITING while a store lease fills it, and also while an SSD read fills it or it is wiped:
then the performer is its writer.
"""

from collections.abc import Iterable
from enum import Enum

from kvd.core.records.actions import WriteJournal
from kvd.core.records.entries import CommittedSlot, SlotRecord, WritingSlot
from kvd.core.state.block import Block
from shared.types.transitions import Transitions


class SlotState(Enum):
    """What a slot holds, and so who may use it."""

    FREE = "free"
    WRITING = "writing"
    COMMITTED = "committed"


SLOT_MOVES = Transitions(
    {
        SlotState.FREE: {
            "allocate": SlotState.WRITING,
            "adopt": SlotState.COMMITTED,
            "quarantine": SlotState.WRITING,
        },
        SlotState.WRITING: {"commit": SlotState.COMMITTED, "free": SlotState.FREE},
        SlotState.COMMITTED: {"rewrite": SlotState.WRITING, "free": SlotState.FREE},
    }
)


class Journal:
    """What the journal says of each slot, so that the next kvd can take over the arena.

    Attributes:
        states: states of the slots that hold something; a mirror of the journal.
    """

    def __init__(self) -> None:
        self.states: dict[int, SlotState] = {}
        self._changes: dict[int, SlotRecord | None] = {}  # not written yet; only the last of a slot

    def drain(self) -> list[WriteJournal]:
        """Return the action that writes all changes since the last drain, if there are any."""
        changes, self._changes = self._changes, {}
        return [WriteJournal(changes)] if changes else []

    def put_writing(self, slots: Iterable[tuple[int, int]], lease_id: int, engine_id: int) -> None:
        """Record that an engine writes to slots, (slot id, generation) each, under a lease."""
        for slot_id, generation in slots:
            self.states[slot_id] = SlotState.WRITING
            self._changes[slot_id] = WritingSlot(generation, lease_id, engine_id)

    def put_block(self, block: Block) -> None:
        """Record that a slot holds a hashed block, which the next kvd may adopt."""
        assert block.slot_id is not None, "only a block in DRAM is in the journal"
        assert block.checksums, "only a hashed block is in the journal"
        self.states[block.slot_id] = SlotState.COMMITTED
        self._changes[block.slot_id] = CommittedSlot(
            block.generation, block.key, block.num_tokens, block.token_ids, block.checksums
        )

    def clear(self, slot_id: int) -> None:
        """Record that a slot holds nothing valid."""
        if self.states.pop(slot_id, None) is not None:
            self._changes[slot_id] = None


class SlotTable:
    """State and generation of each slot of the arena."""

    def __init__(self, num_slots: int) -> None:
        self._states: list[SlotState] = []
        self._generations: list[int] = []
        self._free: list[int] = []  # a stack: low slots are allocated first
        self._unwiped: list[int] = []  # more free slots, allocated only if there are no others
        self._unwiped_in_use: set[int] = set()
        self.add(num_slots)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Number of slots that can be allocated now."""
        return len(self._free) + len(self._unwiped)

    @property
    def num_unwiped(self) -> int:
        """Number of free slots that are to be zeroed."""
        return len(self._unwiped)

    def add(self, num_slots: int) -> None:
        """Add the slots of a new arena. The table must be empty."""
        assert not self._states, "an arena is made once"
        self._states = [SlotState.FREE] * num_slots
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def drop(self) -> None:
        """Remove the arena's slots. All must be free."""
        assert self.num_free == len(self), "an arena is dropped when its slots are free"
        self._states, self._generations, self._free, self._unwiped = [], [], [], []

    def adopt(self, slot_id: int, generation: int, *, is_committed: bool) -> None:
        """Take over a slot that an earlier kvd had allocated; call `finish_adoption` at the end.

        A slot that is not committed is in quarantine: its engine may still be writing to it.
        """
        self._move(slot_id, "adopt" if is_committed else "quarantine")
        self._generations[slot_id] = generation

    def finish_adoption(self) -> None:
        """Rebuild the list of free slots after all adoptions: O(slots)."""
        free = (i for i, state in enumerate(self._states) if state is SlotState.FREE)
        self._free = sorted(free, reverse=True)

    def allocate(self) -> tuple[int, int]:
        """Allocate a free slot for writing. The caller has checked that there is one.

        Returns:
            Slot id, and the slot's new generation.
        """
        if self._free:
            slot_id = self._free.pop()
        else:
            slot_id = self._unwiped.pop()
            self._unwiped_in_use.add(slot_id)
        self._move(slot_id, "allocate")
        self._generations[slot_id] += 1
        return slot_id, self._generations[slot_id]

    def mark_unwiped(self) -> None:
        """Mark all slots to be zeroed that are free, or that are WRITING, once these are free."""
        self._unwiped, self._free = [*self._free, *self._unwiped], []
        writing = (i for i, state in enumerate(self._states) if state is SlotState.WRITING)
        self._unwiped_in_use.update(writing)

    def take_unwiped(self, max_slots: int) -> list[int]:
        """Take free slots out of use to be zeroed; `free` gives each back."""
        taken, self._unwiped = self._unwiped[:max_slots], self._unwiped[max_slots:]
        for slot_id in taken:
            self._move(slot_id, "allocate")
            self._generations[slot_id] += 1
        return taken

    def commit(self, slot_id: int) -> None:
        """Record that the slot's bytes are complete."""
        self._move(slot_id, "commit")

    def rewrite(self, slot_id: int) -> None:
        """Let a corrupt slot's bytes be read again. Its generation stays."""
        self._move(slot_id, "rewrite")

    def free(self, slot_id: int) -> None:
        """Free a slot."""
        self._move(slot_id, "free")
        if slot_id in self._unwiped_in_use:
            self._unwiped_in_use.remove(slot_id)
            self._unwiped.append(slot_id)
        else:
            self._free.append(slot_id)

    def state(self, slot_id: int) -> SlotState:
        """Return the state of a slot."""
        return self._states[slot_id]

    def _move(self, slot_id: int, event: str) -> None:
        self._states[slot_id] = SLOT_MOVES.after(self._states[slot_id], event)
