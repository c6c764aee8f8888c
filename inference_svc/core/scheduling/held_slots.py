"""Who holds token slots of working KV, and what would be free if somebody let go.

    ContiguousSlots   a sequence's slots lie side by side, in memory of its own: they are counted.
                      Where layers with a window hold the last tokens only, long sequences take
                      fewer slots than they have tokens
    PagedSlots        they are pages anywhere, of `page_tokens` slots each; sequences whose KV
                      begins alike hold the same pages, and each page counts who holds it. Where
                      layers with a window hold the last tokens only, a slot is a token's in one
                      group of layers (`page_groups.py`); see `paged_slots.py`

A holding is *needed* while a request, a copy or a compaction uses it. One that is not is a
resident's, and may be evicted. Nobody writes to a page that somebody else holds: whoever is about
to gets another one in its place (`PagedSlots.own`: copy-on-write).

Invariants (`check`): 1. no slot is counted twice, none is lost; 2. a page is free if nobody holds
it, and evictable if nobody who holds it needs it.

*Source:* PagedAttention: vLLM (SOSP'23).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from inference_svc.core.attention_window import HeldRows


@dataclass(eq=False)
class Holding:
    """The token slots of one sequence.

    Attributes:
        num_slots: how many.
        pages: which pages they are, in the order of tokens; none if slots are only counted.
        num_users: how many need them; 0: they may be evicted.
        is_counted: whether it has slots of its own; else it only keeps pages from others.
    """

    num_slots: int
    pages: list[int] = field(default_factory=list)
    num_users: int = 1
    is_counted: bool = True


class PageCopy(NamedTuple):
    """A page that several hold, and the one that takes its place for who writes to it."""

    position: int  # which page of the sequence
    source: int
    target: int


class HeldSlots(Protocol):
    """The account of token slots.

    Attributes:
        num_slots: how many there are.
        page_tokens: a holding has so many slots, or a multiple of that.
        is_paged: whether holdings share slots, and grow where they are.
    """

    num_slots: int
    page_tokens: int
    is_paged: bool

    @property
    def num_groups(self) -> int:
        """Slots of one token in all layers; 1, unless pages are of groups of layers."""

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""

    @property
    def evictable_slots(self) -> int:
        """Slots that would be free too, if every holding that nobody needs were released."""

    def needed_for(self, num_tokens: int) -> int:
        """Return the slots of a holding for so many tokens."""

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens a holding of so many slots has room for."""

    def take(self, num_slots: int) -> Holding:
        """Take free slots; they are needed from the start."""

    def add_user(self, holding: Holding) -> None:
        """Note one more who needs a holding."""

    def remove_user(self, holding: Holding) -> None:
        """Note that one of those who need a holding does no longer."""

    def release(self, holding: Holding) -> None:
        """Release a holding, whoever needs it."""

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Release what a holding has beyond so many tokens, if it can be released by itself."""

    def own(self, holding: Holding, first_token: int, window_from: int = 0) -> list[PageCopy]:
        """Replace what others hold too, from the page of a token on; see `PagedSlots`."""

    def num_shared(self, holding: Holding, first_token: int) -> int:
        """Return how many free slots `own` takes."""

    def freed_by(self, holdings: Sequence[Holding]) -> int:
        """Return how many slots would be free if all of these were released."""

    def evictable_after(self, spared: Sequence[Holding], kept: Holding | None) -> int:
        """Return the evictable slots there would be if `spared` were residents, and `kept` stayed.

        Args:
            spared: holdings that one needs each.
            kept: one that is needed then; None: none is.
        """

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings there are."""


class ContiguousSlots:
    """Slots that are only counted; see the module docstring.

    Args:
        num_slots: how many there are.
        held_rows: what layers with a window hold; None: all tokens, or there are none.
    """

    page_tokens = num_groups = 1
    is_paged = False

    def __init__(self, num_slots: int, held_rows: HeldRows | None = None) -> None:
        self.num_slots = num_slots
        self.free_slots = num_slots
        self.evictable_slots = 0
        self._held_rows = held_rows

    def needed_for(self, num_tokens: int) -> int:
        """Return the slots of a holding for so many tokens: as many, or fewer."""
        rows = self._held_rows
        return num_tokens if rows is None else rows.slots_for(num_tokens)

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens a holding of so many slots has room for: as many, or more."""
        rows = self._held_rows
        return num_slots if rows is None else rows.tokens_in(num_slots)

    def take(self, num_slots: int) -> Holding:
        """Take free slots; they are needed from the start."""
        assert num_slots <= self.free_slots, "more is reserved than there is"
        self.free_slots -= num_slots
        return Holding(num_slots)

    def add_user(self, holding: Holding) -> None:
        """Note one more who needs a holding."""
        if not holding.num_users:
            self.evictable_slots -= holding.num_slots
        holding.num_users += 1

    def remove_user(self, holding: Holding) -> None:
        """Note that one of those who need a holding does no longer."""
        assert holding.num_users, "nobody needs it"
        holding.num_users -= 1
        if not holding.num_users:
            self.evictable_slots += holding.num_slots

    def release(self, holding: Holding) -> None:
        """Release a holding, whoever needs it."""
        if not holding.num_users:
            self.evictable_slots -= holding.num_slots
        self.free_slots += holding.num_slots
        holding.num_slots = holding.num_users = 0

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Do nothing: the slots are one piece of memory."""

    def own(self, _holding: Holding, _first_token: int, _window_from: int = 0) -> list[PageCopy]:
        """Do nothing: nobody else holds these slots."""
        return []

    def num_shared(self, _holding: Holding, _first_token: int) -> int:
        """Return 0: nobody else holds these slots."""
        return 0

    def freed_by(self, holdings: Sequence[Holding]) -> int:
        """Return how many slots would be free if all of these were released."""
        return sum(holding.num_slots for holding in holdings)

    def evictable_after(self, spared: Sequence[Holding], kept: Holding | None) -> int:
        """Return the evictable slots there would be if `spared` were residents, and `kept` stayed.

        Args:
            spared: holdings that one needs each.
            kept: one that is needed then; None: none is.
        """
        stays = 0 if kept is None or kept.num_users else kept.num_slots
        return self.evictable_slots + sum(holding.num_slots for holding in spared) - stays

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings there are."""
        assert all(holding.num_slots > 0 for holding in holdings)
        held = sum(holding.num_slots for holding in holdings)
        assert self.free_slots + held == self.num_slots, "slots are lost, or counted twice"
        evictable = sum(holding.num_slots for holding in holdings if not holding.num_users)
        assert self.evictable_slots == evictable
