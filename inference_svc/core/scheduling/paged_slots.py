"""Token slots in pages, which sequences may share; a page belongs to one group of layers.

Pages of groups without a window are counted once, however many sequences hold them: they are shared
when they are full, and do not change any more. Pages of groups with a window are written to again
and again, and a sequence that is about to write to a shared one gets another page in its place.
They are therefore counted once for each holder, so that this page is always free. Sharing them
saves their computation, but no room.

A holder that only keeps pages from being reused (a load) counts where there is no other holder.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from inference_svc.core.scheduling.held_slots import Holding, PageCopy, SlotTally
from inference_svc.core.scheduling.page_groups import NO_PAGE, PLAIN, PageGroups
from shared.types.units import ceil_div


class PagedSlots:
    """The account of pages: who holds them, who uses them, which are free.

    Free pages are chosen so that sequences are read without being gathered: the page after the
    sequence's last one if it is free, else the lowest free page.
    """

    is_paged = True

    def __init__(self, num_pages: int, page_tokens: int, groups: PageGroups = PLAIN) -> None:
        self.num_slots = num_pages * page_tokens
        self.page_tokens = page_tokens
        self.groups = groups
        self._num_pages = num_pages
        self._num_holders = [0] * num_pages  # by page
        self._num_users = [0] * num_pages
        # Of these: the holders for each of which the page is counted.
        self._num_counted = [0] * num_pages
        self._num_counted_users = [0] * num_pages
        self._num_held = 0  # pages, as often as they are counted, that have holders …
        self._num_in_use = 0  # … and that are in use
        # A heap of what may be free: every free page is in it, and some that were taken since.
        self._lowest = list(range(num_pages))

    @property
    def num_groups(self) -> int:
        """Number of slots that a token has, one for each group."""
        return self.groups.num_groups

    @property
    def free_slots(self) -> int:
        """Slots of pages without a holder, except pages reserved to replace shared ones."""
        return (self._num_pages - self._num_held) * self.page_tokens

    @property
    def evictable_slots(self) -> int:
        """Slots of pages that are held, but not in use."""
        return (self._num_held - self._num_in_use) * self.page_tokens

    def needed_for(self, num_tokens: int) -> int:
        """Return the slots of a holding for `num_tokens` tokens: those of whole pages."""
        return self.groups.num_pages(ceil_div(num_tokens, self.page_tokens)) * self.page_tokens

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens a holding of `num_slots` slots has room for."""
        return self.groups.count_in(num_slots // self.page_tokens) * self.page_tokens

    def take(self, num_slots: int) -> Holding:
        """Take free pages; the holding is in use from the start."""
        holding = Holding(0)
        self.extend(holding, num_slots)
        return holding

    def extend(self, holding: Holding, num_slots: int) -> None:
        """Add free pages to a holding that is in use; first fill its places without a page."""
        assert num_slots <= self.free_slots, "more is reserved than there is"
        lacking: list[int] = []
        if len(holding.pages) * self.page_tokens > holding.num_slots:
            lacking = [at for at, page in enumerate(holding.pages) if page == NO_PAGE]
        for number in range(num_slots // self.page_tokens):
            at = lacking[number] if number < len(lacking) else len(holding.pages)
            self._put(holding, at, self._free_page(after=holding.pages[at - 1] if at else NO_PAGE))

    def share(self, holding: Holding, num_tokens: int, window_from: int = 0) -> Holding:
        """Hold the pages of another holding's first tokens, too; in use from the start.

        Args:
            holding: the other holding.
            num_tokens: number of first tokens, which fill whole pages.
            window_from: first token with KV in layers with a window. Places whose pages have no
                token behind it stay empty, for `extend` to fill: they are written to next.
        """
        count = num_tokens // self.page_tokens
        kept = range(window_from // self.page_tokens, count)
        shared = Holding(0)
        for at, page in enumerate(holding.pages[: self.groups.num_pages(count)]):
            self._put(shared, at, page if self._is_kept(at, kept) else NO_PAGE)
        return shared

    def shared_slots(self, num_tokens: int) -> int:
        """Return how many slots a sequence saves by sharing the pages of `num_tokens` tokens."""
        return num_tokens // self.page_tokens * self.groups.num_full * self.page_tokens

    def hold(self, holding: Holding) -> Holding:
        """Keep a holding's pages from being reused until the returned holding is released."""
        held = Holding(0, is_counted=False)
        for at, page in enumerate(holding.pages):
            self._put(held, at, page)
        return held

    def make_private(
        self, holding: Holding, first_token: int, window_from: int = 0
    ) -> list[PageCopy]:
        """Replace pages that have other holders, from a token's page on, by free ones.

        Args:
            holding: the holding.
            first_token: the first token that will be written.
            window_from: first token with KV in layers with a window.

        Returns:
            The replaced pages. If their content is still needed, the caller copies it.
        """
        first = first_token // self.page_tokens
        kept = range(window_from // self.page_tokens, first)
        start = self.groups.num_pages(first)
        copies = []
        for at, page in enumerate(holding.pages):
            is_window = self.groups.is_windowed(at)
            is_written = not self._is_kept(at, kept) if is_window else at >= start
            if is_written and self._is_shared(page, is_window=is_window):
                copies.append(self._replace(holding, at))
        return copies

    def make_window_private(self, holding: Holding, first_token: int, end_token: int) -> bool:
        """Replace shared pages of groups with a window that tokens are about to be written to.

        Their content is not needed: it is behind the window of the sequence that writes.

        Returns:
            Whether a page was replaced.
        """
        groups, size = self.groups, self.page_tokens
        is_other = False
        for index in range(first_token // size, ceil_div(end_token, size)):
            for group in range(groups.num_full, groups.num_groups):
                at = groups.position(group, index)
                if self._is_shared(holding.pages[at], is_window=True):
                    assert index * size >= first_token, "a page that others hold is half full"
                    self._replace(holding, at)
                    is_other = True
        return is_other

    def num_shared(self, holding: Holding, first_token: int) -> int:
        """Return the free slots that `make_private` takes: for pages that are counted once."""
        start = self.groups.num_pages(first_token // self.page_tokens)
        found = sum(
            self._num_holders[page] > 1
            for at, page in enumerate(holding.pages[start:], start)
            if not self.groups.is_windowed(at)
        )
        return found * self.page_tokens

    def trim(self, holding: Holding, num_tokens: int) -> None:
        """Release the pages behind the last one that has some of `num_tokens` tokens."""
        num_pages = self.groups.num_pages(ceil_div(num_tokens, self.page_tokens))
        for at, page in enumerate(holding.pages[num_pages:], num_pages):
            self._drop(page, self._counts(holding, at), holding.num_users)
            holding.num_slots -= self.page_tokens
        del holding.pages[num_pages:]

    def add_user(self, holding: Holding) -> None:
        """Count one more user of a holding."""
        if not holding.num_users:
            for page, counts in self.entries(holding):
                self._add_page_user(page, counts)
        holding.num_users += 1

    def remove_user(self, holding: Holding) -> None:
        """Count one user of a holding less; without any it may be evicted."""
        assert holding.num_users, "nobody needs it"
        holding.num_users -= 1
        if not holding.num_users:
            for page, counts in self.entries(holding):
                self._remove_page_user(page, counts)

    def release(self, holding: Holding) -> None:
        """Release a holding, even if it is in use."""
        self.trim(holding, 0)
        holding.num_users = 0

    def tally_released(self) -> "PageTally":
        """Begin to count the slots that releasing some holdings would free."""
        return PageTally(self, self._freed_of)

    def tally_evictable(self, kept: Holding | None) -> "PageTally":
        """Begin to count the slots that would be evictable; see `HeldSlots`."""
        tally = PageTally(self, self._spared_of, self.evictable_slots)
        if kept is not None and not kept.num_users:
            tally.remove(kept)
        return tally

    def check(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError if these are not all holdings, or an invariant is broken."""
        held, counted = self._tallies(holdings)
        needed, counted_needed = self._tallies([h for h in holdings if h.num_users])
        for page, number in enumerate(self._num_holders):
            assert number == held[page], f"page {page} has {number} holders of {held[page]}"
            assert self._num_users[page] == needed[page], f"page {page} is needed wrongly"
            assert self._num_counted[page] == counted[page], f"page {page} is counted wrongly"
            assert self._num_counted_users[page] == counted_needed[page]
        free = {page for page, number in enumerate(self._num_holders) if not number}
        assert free <= set(self._lowest), "a free page will never be found"
        assert self._num_held == sum(map(self._times_held, held)) <= self._num_pages
        assert self._num_in_use == sum(map(self._times_in_use, needed))
        for holding in holdings:
            assert holding.num_slots == len(holding.pages) * self.page_tokens
            assert len(set(holding.pages)) == len(holding.pages), "a page is there twice"

    def _free_page(self, after: int) -> int:
        """Return a free page; it stays free until it is held."""
        if 0 < after + 1 < len(self._num_holders) and not self._num_holders[after + 1]:
            return after + 1
        while self._num_holders[self._lowest[0]]:
            heappop(self._lowest)
        return self._lowest[0]

    def _is_kept(self, at: int, kept: range) -> bool:
        """Return whether a page stays: in a group with a window, if it has tokens of `kept`.

        Args:
            at: the page's position in the sequence.
            kept: the pages of tokens, by index, that layers with a window still need.
        """
        groups = self.groups
        if not groups.is_windowed(at):
            return True
        return (at // groups.num_groups - kept.start) % groups.window_pages < len(kept)

    def _is_shared(self, page: int, *, is_window: bool) -> bool:
        return (self._num_counted if is_window else self._num_holders)[page] > 1

    def _replace(self, holding: Holding, at: int) -> PageCopy:
        page, counts = holding.pages[at], self._counts(holding, at)
        self._drop(page, counts, holding.num_users)
        target = self._free_page(after=holding.pages[at - 1] if at else NO_PAGE)
        self._hold(target, counts, holding.num_users)
        holding.pages[at] = target
        return PageCopy(at, page, target)

    def _put(self, holding: Holding, at: int, page: int) -> None:
        if at == len(holding.pages):
            holding.pages.append(page)
        holding.pages[at] = page
        if page != NO_PAGE:
            self._hold(page, self._counts(holding, at), holding.num_users)
            holding.num_slots += self.page_tokens

    def _counts(self, holding: Holding, at: int) -> bool:
        """Return whether a page is counted for this holder in addition to others."""
        return holding.is_counted and self.groups.is_windowed(at)

    def entries(self, holding: Holding) -> Iterator[tuple[int, bool]]:
        """Yield a holding's pages, and whether each is counted for it."""
        for at, page in enumerate(holding.pages):
            if page != NO_PAGE:
                yield page, self._counts(holding, at)

    def _tallies(self, holdings: Sequence[Holding]) -> tuple[Counter[int], Counter[int]]:
        """Count by page how many of these hold it, and for how many it is counted."""
        entries = [entry for holding in holdings for entry in self.entries(holding)]
        return Counter(page for page, _ in entries), Counter(page for page, own in entries if own)

    def _freed_of(self, page: int, num_holders: int, num_counted: int) -> int:
        """Return how often a page is held less without so many holders, counted and not."""
        left = self._num_holders[page] - num_holders, self._num_counted[page] - num_counted
        return self._times_held(page) - _counted(*left)

    def _spared_of(self, page: int, num_users: int, num_counted: int) -> int:
        """Return how often a page is in use less without so many users, counted and not."""
        left = self._num_users[page] - num_users, self._num_counted_users[page] - num_counted
        return self._times_in_use(page) - _counted(*left)

    def _times_held(self, page: int) -> int:
        return _counted(self._num_holders[page], self._num_counted[page])

    def _times_in_use(self, page: int) -> int:
        return _counted(self._num_users[page], self._num_counted_users[page])

    def _hold(self, page: int, counts: bool, num_users: int) -> None:
        before = self._times_held(page)
        self._num_holders[page] += 1
        self._num_counted[page] += counts
        self._num_held += self._times_held(page) - before
        if num_users:
            self._add_page_user(page, counts)

    def _drop(self, page: int, counts: bool, num_users: int) -> None:
        if num_users:
            self._remove_page_user(page, counts)
        before = self._times_held(page)
        self._num_holders[page] -= 1
        self._num_counted[page] -= counts
        self._num_held += self._times_held(page) - before
        if not self._num_holders[page]:
            heappush(self._lowest, page)
            if len(self._lowest) > 2 * len(self._num_holders):  # pages that were freed often
                self._lowest = [p for p, number in enumerate(self._num_holders) if not number]
                heapify(self._lowest)

    def _add_page_user(self, page: int, counts: bool) -> None:
        before = self._times_in_use(page)
        self._num_users[page] += 1
        self._num_counted_users[page] += counts
        self._num_in_use += self._times_in_use(page) - before

    def _remove_page_user(self, page: int, counts: bool) -> None:
        before = self._times_in_use(page)
        self._num_users[page] -= 1
        self._num_counted_users[page] -= counts
        self._num_in_use += self._times_in_use(page) - before


class PageTally(SlotTally):
    """Counts the slots of pages that only holdings which were added hold, or use.

    Args:
        slots: the account of pages.
        given_up: returns how often a page counts, given how many of its holders, or users, were
            added, and for how many of these it is counted.
        num_slots: number of slots without these holdings.
    """

    def __init__(
        self, slots: PagedSlots, given_up: Callable[[int, int, int], int], num_slots: int = 0
    ) -> None:
        super().__init__(num_slots)
        self._slots = slots
        self._given_up = given_up
        self._num_added: Counter[int] = Counter()  # by page
        self._num_counted: Counter[int] = Counter()

    def add(self, holding: Holding) -> None:
        """Count a holding among those that give up their slots."""
        self._change(holding, 1)

    def remove(self, holding: Holding) -> None:
        """Count a holding that was added no longer."""
        self._change(holding, -1)

    def _change(self, holding: Holding, sign: int) -> None:
        given_up, added, counted = self._given_up, self._num_added, self._num_counted
        num_pages = 0
        for page, counts in self._slots.entries(holding):
            num_pages -= given_up(page, added[page], counted[page])
            added[page] += sign
            counted[page] += sign * counts
            num_pages += given_up(page, added[page], counted[page])
        self.num_slots += num_pages * self._slots.page_tokens


def _counted(num_holders: int, num_counted: int) -> int:
    """Return how often a page counts: once for each counted holder, once for any others."""
    return max(num_counted, min(1, num_holders))
