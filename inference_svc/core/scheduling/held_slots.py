"""Who holds token slots of working KV, and what would be free if somebody let go.

    ContiguousSlots   a sequence's slots lie side by side, in memory of its own: they are counted.
                      Where layers with a window hold the last tokens only, long sequences take
                      fewer slots than they have tokens
    PagedSlots        they are pages anywhere, of `page_tokens` slots each; sequences whose KV
                      begins alike hold the same pages, and each page counts who holds it

A holding is *needed* while a request, a copy or a compaction uses it. One that is not is a
resident's, and may be evicted. Nobody writes to a page that somebody else holds: whoever is about
to gets another one in its place (`PagedSlots.own`: copy-on-write).

Invariants (`check`): 1. no slot is counted twice, none is lost; 2. a page is free if nobody holds
it, and evictable if nobody who holds it needs it.

*Source:* PagedAttention: vLLM (SOSP'23).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from inference_svc.core.attention_window import HeldRows
from shared.types.units import ceil_div


@dataclass(eq=False)
class Holding:
    """The token slots of one sequence.

    Attributes:
        num_slots: how many.
        pages: which pages they are, in the order of tokens; none if slots are only counted.
        num_needing: how many need them; 0: they may be evicted.
    """

    num_slots: int
    pages: list[int] = field(default_factory=list)
    num_needing: int = 1


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

    def need(self, holding: Holding) -> None:
        """Note one more who needs a holding."""

    def spare(self, holding: Holding) -> None:
        """Note that one of those who need a holding does no longer."""

    def release(self, holding: Holding) -> None:
        """Release a holding, whoever needs it."""

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Release what a holding has beyond so many tokens, if it can be released by itself."""

    def own(self, holding: Holding, first_slot: int) -> list[PageCopy]:
        """Replace what others hold too, from the page of `first_slot` on; see `PagedSlots`."""

    def num_shared(self, holding: Holding, first_slot: int) -> int:
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

    page_tokens = 1
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

    def need(self, holding: Holding) -> None:
        """Note one more who needs a holding."""
        if not holding.num_needing:
            self.evictable_slots -= holding.num_slots
        holding.num_needing += 1

    def spare(self, holding: Holding) -> None:
        """Note that one of those who need a holding does no longer."""
        assert holding.num_needing, "nobody needs it"
        holding.num_needing -= 1
        if not holding.num_needing:
            self.evictable_slots += holding.num_slots

    def release(self, holding: Holding) -> None:
        """Release a holding, whoever needs it."""
        if not holding.num_needing:
            self.evictable_slots -= holding.num_slots
        self.free_slots += holding.num_slots
        holding.num_slots = holding.num_needing = 0

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Do nothing: the slots are one piece of memory."""

    def own(self, _holding: Holding, _first_slot: int) -> list[PageCopy]:
        """Do nothing: nobody else holds these slots."""
        return []

    def num_shared(self, _holding: Holding, _first_slot: int) -> int:
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
        stays = 0 if kept is None or kept.num_needing else kept.num_slots
        return self.evictable_slots + sum(holding.num_slots for holding in spared) - stays

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings there are."""
        assert all(holding.num_slots > 0 for holding in holdings)
        held = sum(holding.num_slots for holding in holdings)
        assert self.free_slots + held == self.num_slots, "slots are lost, or counted twice"
        evictable = sum(holding.num_slots for holding in holdings if not holding.num_needing)
        assert self.evictable_slots == evictable


class PagedSlots:
    """Slots in pages, which sequences may share; see the module docstring.

    Of free pages the next one after a sequence's last is taken if it can be, then the lowest:
    pages side by side are read without being gathered.
    """

    is_paged = True

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_slots = num_pages * page_tokens
        self.page_tokens = page_tokens
        self._num_holding = [0] * num_pages  # by page
        self._num_needing = [0] * num_pages
        self._num_free = num_pages
        self._num_needed = 0  # pages that somebody needs
        # A heap of what may be free: every free page is in it, and some that were taken since.
        self._lowest = list(range(num_pages))

    @property
    def free_slots(self) -> int:
        """Slots of pages that nobody holds."""
        return self._num_free * self.page_tokens

    @property
    def evictable_slots(self) -> int:
        """Slots of pages that are held, and that nobody needs."""
        return self.num_slots - (self._num_free + self._num_needed) * self.page_tokens

    def needed_for(self, num_tokens: int) -> int:
        """Return the slots of a holding for so many tokens: those of whole pages."""
        return ceil_div(num_tokens, self.page_tokens) * self.page_tokens

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens a holding of so many slots has room for: as many."""
        return num_slots

    def take(self, num_slots: int) -> Holding:
        """Take free pages; they are needed from the start."""
        holding = Holding(0)
        self.extend(holding, num_slots)
        return holding

    def extend(self, holding: Holding, num_slots: int) -> None:
        """Add free pages to a holding that is needed."""
        assert num_slots <= self.free_slots, "more is reserved than there is"
        for _ in range(num_slots // self.page_tokens):
            self._add(holding, self._free_page(after=holding.pages[-1] if holding.pages else -1))

    def share(self, holding: Holding, num_slots: int) -> Holding:
        """Hold the first pages of a holding too; they are needed from the start."""
        shared = Holding(0)
        for page in holding.pages[: num_slots // self.page_tokens]:
            self._add(shared, page)
        return shared

    def own(self, holding: Holding, first_slot: int) -> list[PageCopy]:
        """Replace pages that others hold too, from that of `first_slot` on, by free ones.

        Returns:
            What was replaced; who still wants what is in these pages copies it.
        """
        copies = []
        for index in range(first_slot // self.page_tokens, len(holding.pages)):
            page = holding.pages[index]
            if self._num_holding[page] > 1:
                target = self._free_page(after=holding.pages[index - 1] if index else -1)
                copies.append(PageCopy(index, page, target))
                self._drop(page, holding.num_needing)
                self._hold(target, holding.num_needing)
                holding.pages[index] = target
        return copies

    def num_shared(self, holding: Holding, first_slot: int) -> int:
        """Return how many slots `own` takes: those of pages that others hold too."""
        pages = holding.pages[first_slot // self.page_tokens :]
        return sum(self._num_holding[page] > 1 for page in pages) * self.page_tokens

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Release the pages behind the first `num_tokens` slots."""
        num_pages = ceil_div(num_tokens, self.page_tokens)
        for page in holding.pages[num_pages:]:
            self._drop(page, holding.num_needing)
        del holding.pages[num_pages:]
        holding.num_slots = len(holding.pages) * self.page_tokens

    def need(self, holding: Holding) -> None:
        """Note one more who needs a holding."""
        if not holding.num_needing:
            for page in holding.pages:
                self._need(page)
        holding.num_needing += 1

    def spare(self, holding: Holding) -> None:
        """Note that one of those who need a holding does no longer."""
        assert holding.num_needing, "nobody needs it"
        holding.num_needing -= 1
        if not holding.num_needing:
            for page in holding.pages:
                self._spare(page)

    def release(self, holding: Holding) -> None:
        """Release a holding, whoever needs it."""
        self.trim(holding, 0)
        holding.num_needing = 0

    def freed_by(self, holdings: Sequence[Holding]) -> int:
        """Return the slots of pages that nobody else holds than these."""
        held = Counter(page for holding in holdings for page in holding.pages)
        freed = sum(self._num_holding[page] == number for page, number in held.items())
        return freed * self.page_tokens

    def evictable_after(self, spared: Sequence[Holding], kept: Holding | None) -> int:
        """Return the evictable slots there would be if `spared` were residents, and `kept` stayed.

        Args:
            spared: holdings that one needs each.
            kept: one that is needed then; None: none is.
        """
        needed = Counter(page for holding in spared for page in holding.pages)
        freed = {page for page, number in needed.items() if self._num_needing[page] == number}
        stay = [] if kept is None else kept.pages
        num_staying = sum(not self._num_needing[page] or page in freed for page in stay)
        return self.evictable_slots + (len(freed) - num_staying) * self.page_tokens

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings there are."""
        held = Counter(page for holding in holdings for page in holding.pages)
        needed = Counter(page for h in holdings if h.num_needing for page in h.pages)
        for page, number in enumerate(self._num_holding):
            assert number == held[page], f"page {page} has {number} holders of {held[page]}"
            assert self._num_needing[page] == needed[page], f"page {page} is needed wrongly"
        free = {page for page, number in enumerate(self._num_holding) if not number}
        assert free <= set(self._lowest), "a free page will never be found"
        assert self._num_free == len(free)
        assert self._num_needed == len(needed)
        for holding in holdings:
            assert holding.num_slots == len(holding.pages) * self.page_tokens
            assert len(set(holding.pages)) == len(holding.pages), "a page is there twice"

    def _free_page(self, after: int) -> int:
        """Choose a free page, which it is until it is held."""
        if 0 < after + 1 < len(self._num_holding) and not self._num_holding[after + 1]:
            return after + 1
        while self._num_holding[self._lowest[0]]:
            heappop(self._lowest)
        return self._lowest[0]

    def _add(self, holding: Holding, page: int) -> None:
        self._hold(page, holding.num_needing)
        holding.pages.append(page)
        holding.num_slots += self.page_tokens

    def _hold(self, page: int, num_needing: int) -> None:
        if not self._num_holding[page]:
            self._num_free -= 1
        self._num_holding[page] += 1
        if num_needing:
            self._need(page)

    def _drop(self, page: int, num_needing: int) -> None:
        if num_needing:
            self._spare(page)
        self._num_holding[page] -= 1
        if not self._num_holding[page]:
            self._num_free += 1
            heappush(self._lowest, page)
            if len(self._lowest) > 2 * len(self._num_holding):  # pages that were freed often
                self._lowest = [p for p, number in enumerate(self._num_holding) if not number]
                heapify(self._lowest)

    def _need(self, page: int) -> None:
        self._num_needed += not self._num_needing[page]
        self._num_needing[page] += 1

    def _spare(self, page: int) -> None:
        self._num_needing[page] -= 1
        self._num_needed -= not self._num_needing[page]
