"""Which token slots of the write ring are free, and how many the ring has.

Keys before RoPE and values go to the ring as they are computed, and leave it as kvd gets them
(paper §3.2.2). It is bounded by what that takes, not by how long turns are. Somebody whose tokens
find no room waits until others' are stored, while any are: once nothing was for STALL_LIMIT_NS,
those who wait go on without being saved. kvd that stands still costs a later turn a recomputation,
nothing else.

Invariant (`check`): a slot is free or taken, never both, and none is given back twice.
"""

from collections.abc import Collection
from heapq import heappop, heappush

from shared.types.units import NS_PER_S

LEAST_WRITE_SLOTS = 16  # fewer would be steps, and blocks, of a few tokens
WRITE_SHARE = 5  # of all slots, the ring gets one part in so many at most, unless a setting says
STALL_LIMIT_NS = NS_PER_S  # far longer than storing a block takes


def write_slots_for(
    num_slots: int, step_tokens: int, max_running: int, group_tokens: int, block_tokens: int
) -> int:
    """Choose how many of `num_slots` token slots the write ring gets.

    What is on its way is the rate of computing times the time that storing takes. That is a step's
    tokens at most, as long as a step is stored in the time that the next one takes; with those
    that are being computed, two steps' tokens. Beside these, each request that runs has tokens
    that wait for the rest of their group, or of their block.

    Args:
        num_slots: for sequences' KV and the ring together.
        step_tokens: most prompt tokens of a step.
        max_running: most requests of a step.
        group_tokens: of a request under way, that are stored together.
        block_tokens: of a block.
    """
    wanted = 2 * step_tokens + max_running * max(group_tokens, block_tokens)
    return min(wanted, max(LEAST_WRITE_SLOTS, num_slots // WRITE_SHARE))


class WriteSlots:
    """See the module docstring.

    Attributes:
        num_slots: how many there are.
        stalled_ns: how long somebody has waited for some so far.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.stalled_ns = 0
        self._noted_ns = 0  # when somebody was last seen waiting; 0: nobody waits
        self._still_ns = 0  # since when nothing was given back while somebody waits
        self._has_moved = False
        # A heap: the lowest go first, so that tokens of one step mostly lie side by side.
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """Take slots that are free; O(n log n)."""
        assert num_slots <= self.num_free, f"{num_slots} slots of a ring with {self.num_free} free"
        return [heappop(self._free) for _ in range(num_slots)]

    def release(self, slots: Collection[int]) -> None:
        """Give slots back."""
        self._has_moved = True
        for slot in slots:
            heappush(self._free, slot)

    def note_stall(self, now_ns: int, *, is_stalled: bool) -> int | None:
        """Note whether somebody waits for slots; returns how long that is worth it, if so."""
        if self._noted_ns:
            self.stalled_ns += now_ns - self._noted_ns
        if is_stalled and (self._has_moved or not self._noted_ns):
            self._still_ns = now_ns
        self._has_moved = False
        self._noted_ns = now_ns if is_stalled else 0
        return self._still_ns + STALL_LIMIT_NS if is_stalled else None

    def check(self) -> None:
        """Raise AssertionError if the invariant is broken."""
        assert len(set(self._free)) == len(self._free) <= self.num_slots
        assert all(0 <= slot < self.num_slots for slot in self._free)
