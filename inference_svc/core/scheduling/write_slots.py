"""The account of the write ring: which of its token slots are free, and how many it has.

Keys before RoPE and values are written to the ring as they are computed, and leave it as kvd gets
them (paper §3.2.2). Its size follows from the time that this takes, not from the length of turns. A
request whose tokens find no room waits while other requests' tokens are being stored. Once no
token was stored for STALL_LIMIT_NS, the waiting requests continue without being saved. So a kvd
that stands still costs a later turn a recomputation, and nothing else.

Invariant (`check`): a slot is either free or taken, and none is released twice.
"""

from collections.abc import Collection
from heapq import heappop, heappush

from shared.types.units import NS_PER_S

LEAST_WRITE_SLOTS = 16  # fewer would be steps, and blocks, of a few tokens
WRITE_SHARE = 5  # the ring gets at most a fifth of all slots, unless a setting says otherwise
STALL_LIMIT_NS = NS_PER_S  # far longer than storing a block takes


def write_slots_for(
    num_slots: int, step_tokens: int, max_running: int, group_tokens: int, block_tokens: int
) -> int:
    """Choose how many of `num_slots` token slots the write ring gets.

    The tokens on their way to kvd are the rate of computing times the time of storing. That is at
    most a step's tokens, if a step is stored in the time that the next one takes; with the tokens
    that are being computed, it is those of two steps. In addition each running request has tokens
    that wait for the rest of their group, or of their block.

    Args:
        num_slots: token slots for sequences' KV and the ring together.
        step_tokens: most prompt tokens of a step.
        max_running: most requests of a step.
        group_tokens: tokens of a running request that are stored together.
        block_tokens: tokens of a block.
    """
    wanted = 2 * step_tokens + max_running * max(group_tokens, block_tokens)
    return min(wanted, max(LEAST_WRITE_SLOTS, num_slots // WRITE_SHARE))


class WriteSlots:
    """The free slots of the write ring.

    Attributes:
        num_slots: number of slots of the ring.
        stalled_ns: time in which at least one request has waited for slots so far.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.stalled_ns = 0
        self._noted_ns = 0  # when a request was last seen waiting; 0: none waits
        self._still_ns = 0  # since when no slot was released while a request waits
        self._has_moved = False
        # A heap: the lowest go first, so that tokens of one step mostly lie side by side.
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """Take free slots; O(n log n)."""
        assert num_slots <= self.num_free, f"{num_slots} slots of a ring with {self.num_free} free"
        return [heappop(self._free) for _ in range(num_slots)]

    def release(self, slots: Collection[int]) -> None:
        """Release slots."""
        self._has_moved |= bool(slots)  # a release of none is no progress
        for slot in slots:
            heappush(self._free, slot)

    def note_stall(self, now_ns: int, *, is_stalled: bool) -> int | None:
        """Record whether a request waits for slots now.

        Returns:
            The time until which it should wait; None: no request waits.
        """
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
