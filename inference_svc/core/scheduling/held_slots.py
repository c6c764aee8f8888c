"""The account of token slots by holding: how many are held, in use, shared and free.

    ContiguousSlots   a sequence's slots are contiguous, in memory of its own: they are only
                      counted. Where layers with a window hold the last tokens only, long sequences
                      take fewer slots than they have tokens
    PagedSlots        a sequence's slots are pages anywhere, of `page_tokens` slots each. Sequences
                      with a common prefix hold the same pages, and each page counts its holders.
                      Where layers with a window hold the last tokens only, a slot is a token's in
                      one group of layers (`page_groups.py`); see `paged_slots.py`

A holding is *in use* while a request, a copy or a compaction uses it. A holding that is not in use
is a resident's, and may be evicted. A page that several sequences hold is never written to: the
sequence that is about to write gets another page instead (`PagedSlots.make_private`:
copy-on-write).

Invariants (`check`): 1. no slot is counted twice, none is lost; 2. a page without holders is free,
and a page whose holders are all not in use is evictable.

*Source:* PagedAttention: vLLM (SOSP'23).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from inference_svc.core.attention_window import HeldRows

T = TypeVar("T")


@dataclass(eq=False)
class Holding:
    """The token slots of one sequence.

    Attributes:
        num_slots: number of slots.
        pages: the page numbers, in the order of tokens; empty if slots are only counted.
        num_users: number of requests, copies and compactions that use them; 0: they may be evicted.
        is_counted: whether it has slots of its own; else it only keeps pages from being reused.
    """

    num_slots: int
    pages: list[int] = field(default_factory=list)
    num_users: int = 1
    is_counted: bool = True


class PageCopy(NamedTuple):
    """A page with several holders, and the page that replaces it for the one that writes to it."""

    position: int  # index among the sequence's pages
    source: int
    target: int


class SlotTally:
    """Counts the slots that some holdings would give up together, until the account changes.

    Args:
        num_slots: number of slots without these holdings.

    Attributes:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots

    def add(self, holding: Holding) -> None:
        """Count a holding among those that give up their slots."""
        self.num_slots += holding.num_slots

    def remove(self, holding: Holding) -> None:
        """Count a holding that was added no longer."""
        self.num_slots -= holding.num_slots


class HeldSlots(Protocol):
    """The account of token slots.

    Attributes:
        num_slots: number of slots in total.
        page_tokens: slots of a page: the number of a holding's slots is a multiple of it.
        is_paged: whether holdings can share slots, and grow in place.
    """

    num_slots: int
    page_tokens: int
    is_paged: bool

    @property
    def num_groups(self) -> int:
        """Slots of one token in all layers: 1, unless pages belong to groups of layers."""

    @property
    def free_slots(self) -> int:
        """Number of slots without a holder."""

    @property
    def evictable_slots(self) -> int:
        """Number of slots that releasing every holding that is not in use would free."""

    def needed_for(self, num_tokens: int) -> int:
        """Return the number of slots of a holding for `num_tokens` tokens."""

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens a holding of `num_slots` slots has room for."""

    def take(self, num_slots: int) -> Holding:
        """Take free slots; the holding is in use from the start."""

    def add_user(self, holding: Holding) -> None:
        """Count one more user of a holding."""

    def remove_user(self, holding: Holding) -> None:
        """Count one user of a holding less; without any it may be evicted."""

    def release(self, holding: Holding) -> None:
        """Release a holding, even if it is in use."""

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Release a holding's slots beyond `num_tokens` tokens, where that is possible."""

    def make_private(
        self, holding: Holding, first_token: int, window_from: int = 0
    ) -> list[PageCopy]:
        """Replace pages that have other holders, from a token's page on; see `PagedSlots`."""

    def num_shared(self, holding: Holding, first_token: int) -> int:
        """Return how many free slots `make_private` would take."""

    def tally_released(self) -> SlotTally:
        """Begin to count the slots that releasing some holdings would free."""

    def tally_evictable(self, kept: Holding | None) -> SlotTally:
        """Begin to count the slots that would be evictable if some holdings were residents'.

        Holdings that are added have one user each, which is going to end.

        Args:
            kept: a holding that will be in use then; None: there is none.
        """

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings, or an invariant is broken."""


class ContiguousSlots:
    """Slots that are only counted; see the module docstring.

    Args:
        num_slots: number of slots.
        held_rows: what layers with a window hold; None: all tokens, or there are no such layers.
    """

    page_tokens = num_groups = 1
    is_paged = False

    def __init__(self, num_slots: int, held_rows: HeldRows | None = None) -> None:
        self.num_slots = num_slots
        self.free_slots = num_slots
        self.evictable_slots = 0
        self._held_rows = held_rows

    def needed_for(self, num_tokens: int) -> int:
        """Return the slots of a holding for `num_tokens` tokens: as many, or fewer."""
        rows = self._held_rows
        return num_tokens if rows is None else rows.slots_for(num_tokens)

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens `num_slots` slots have room for: as many, or more."""
        rows = self._held_rows
        return num_slots if rows is None else rows.tokens_in(num_slots)

    def take(self, num_slots: int) -> Holding:
        """Take free slots; the holding is in use from the start."""
        assert num_slots <= self.free_slots, "more is reserved than there is"
        self.free_slots -= num_slots
        return Holding(num_slots)

    def add_user(self, holding: Holding) -> None:
        """Count one more user of a holding."""
        if not holding.num_users:
            self.evictable_slots -= holding.num_slots
        holding.num_users += 1

    def remove_user(self, holding: Holding) -> None:
        """Count one user of a holding less; without any it may be evicted."""
        assert holding.num_users, "nobody needs it"
        holding.num_users -= 1
        if not holding.num_users:
            self.evictable_slots += holding.num_slots

    def release(self, holding: Holding) -> None:
        """Release a holding, even if it is in use."""
        if not holding.num_users:
            self.evictable_slots -= holding.num_slots
        self.free_slots += holding.num_slots
        holding.num_slots = holding.num_users = 0

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Do nothing: the slots are one piece of memory."""

    def make_private(
        self, _holding: Holding, _first_token: int, _window_from: int = 0
    ) -> list[PageCopy]:
        """Do nothing: these slots have no other holder."""
        return []

    def num_shared(self, _holding: Holding, _first_token: int) -> int:
        """Return 0: these slots have no other holder."""
        return 0

    def tally_released(self) -> SlotTally:
        """Begin to count the slots that releasing some holdings would free."""
        return SlotTally()

    def tally_evictable(self, kept: Holding | None) -> SlotTally:
        """Begin to count the slots that would be evictable; see `HeldSlots`."""
        tally = SlotTally(self.evictable_slots)
        if kept is not None and not kept.num_users:
            tally.remove(kept)
        return tally

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings, or an invariant is broken."""
        assert all(holding.num_slots > 0 for holding in holdings)
        held = sum(holding.num_slots for holding in holdings)
        assert self.free_slots + held == self.num_slots, "slots are lost, or counted twice"
        evictable = sum(holding.num_slots for holding in holdings if not holding.num_users)
        assert self.evictable_slots == evictable


def choose_victims(
    candidates: Iterable[T],
    add: Callable[[T], object],
    remove: Callable[[T], object],
    is_enough: Callable[[], bool],
) -> list[T]:
    """Choose as few holders as have to give way, in the order of candidates.

    A holder that shares its slots, or has few, may turn out to be spared by a later one that has to
    go anyway. So each of the chosen is needed: without it, the others would not be enough.

    Args:
        candidates: the holders, the one to give way first at the front.
        add: counts a holder among those that give way.
        remove: counts a holder that was added no longer.
        is_enough: whether those that were added make enough room together.

    Returns:
        The chosen holders; all candidates if even these are not enough.
    """
    chosen: list[T] = []
    for candidate in candidates:
        if is_enough():
            break
        add(candidate)
        chosen.append(candidate)
    if not is_enough():
        return chosen
    needed = []
    for candidate in reversed(chosen):
        remove(candidate)
        if not is_enough():
            add(candidate)
            needed.append(candidate)
    return needed[::-1]
