"""Slots of the arena: which are free, which a store lease fills, which hold a committed block.

Pure. Invariants: 1. a slot's generation grows with each allocation, so that a late reader notices;
2. a COMMITTED slot's bytes never change (D9), except that a copy found corrupt is read again.

A slot that an SSD read fills, or that is wiped, is WRITING too: its writer is the performer.
"""

from collections.abc import Callable
from enum import Enum

from kvd.core.records.actions import ClearSlot, PutSlot
from kvd.core.records.entries import CommittedSlot, SlotRecord, WritingSlot
from kvd.core.state.block import Block
from shared.types.transitions import Transitions


class SlotState(Enum):
    """What a slot's bytes are, and so who may use it."""

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
    """What the journal says of each slot, so that a next kvd may take the arena over.

    Args:
        note: hands an action out that notes a change.

    Attributes:
        states: of slots that hold something; a mirror.
    """

    def __init__(self, note: Callable[[PutSlot | ClearSlot], None]) -> None:
        self._note = note
        self.states: dict[int, SlotState] = {}

    def put(self, slot_id: int, record: SlotRecord) -> None:
        """Record what a slot holds."""
        is_writing = isinstance(record, WritingSlot)
        self.states[slot_id] = SlotState.WRITING if is_writing else SlotState.COMMITTED
        self._note(PutSlot(slot_id, record))

    def put_block(self, block: Block) -> None:
        """Record that a slot holds a hashed block: a next kvd may adopt it."""
        assert block.slot_id is not None, "only a block in DRAM is in the journal"
        assert block.checksums, "only a hashed block is in the journal"
        record = CommittedSlot(
            block.generation, block.key, block.num_tokens, block.token_ids, block.checksums
        )
        self.put(block.slot_id, record)

    def clear(self, slot_id: int) -> None:
        """Record that nothing in a slot counts."""
        if self.states.pop(slot_id, None) is not None:
            self._note(ClearSlot(slot_id))


class SlotTable:
    """State and generation of each slot."""

    def __init__(self, num_slots: int) -> None:
        self._states: list[SlotState] = []
        self._generations: list[int] = []
        self._free: list[int] = []  # popped from its end: low slots first
        self.add(num_slots)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    def add(self, num_slots: int) -> None:
        """Take the slots of a new arena in; there are none before."""
        assert not self._states, "an arena is made once"
        self._states = [SlotState.FREE] * num_slots
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def drop(self) -> None:
        """Give the arena up; nobody uses a slot."""
        assert self.num_free == len(self), "an arena is dropped when its slots are free"
        self._states, self._generations, self._free = [], [], []

    def adopt(self, slot_id: int, generation: int, *, is_committed: bool) -> None:
        """Take over a slot that an earlier kvd had given away; end with `adopted`.

        One that is not committed is in quarantine: its engine may still be writing to it.
        """
        self._move(slot_id, "adopt" if is_committed else "quarantine")
        self._generations[slot_id] = generation

    def adopted(self) -> None:
        """Find the free slots anew, after all adoptions: O(slots)."""
        free = (i for i, state in enumerate(self._states) if state is SlotState.FREE)
        self._free = sorted(free, reverse=True)

    def allocate(self) -> tuple[int, int]:
        """Take a free slot for writing; the caller has made sure there is one.

        Returns:
            Slot id and its new generation.
        """
        slot_id = self._free.pop()
        self._move(slot_id, "allocate")
        self._generations[slot_id] += 1
        return slot_id, self._generations[slot_id]

    def take_free(self, max_slots: int) -> list[int]:
        """Take slots out of use, those that have been free longest; `free` gives each back."""
        taken, self._free = self._free[:max_slots], self._free[max_slots:]
        for slot_id in taken:
            self._move(slot_id, "allocate")
            self._generations[slot_id] += 1
        return taken

    def commit(self, slot_id: int) -> None:
        """Record that the slot's bytes are complete."""
        self._move(slot_id, "commit")

    def rewrite(self, slot_id: int) -> None:
        """Have a corrupt slot's bytes read again; its generation stays."""
        self._move(slot_id, "rewrite")

    def free(self, slot_id: int) -> None:
        """Give a slot back."""
        self._move(slot_id, "free")
        self._free.append(slot_id)

    def state(self, slot_id: int) -> SlotState:
        """Look at a slot."""
        return self._states[slot_id]

    def _move(self, slot_id: int, event: str) -> None:
        self._states[slot_id] = SLOT_MOVES.after(self._states[slot_id], event)
