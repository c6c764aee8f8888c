"""Groups of layers that take pages by themselves, so that some may hold the last tokens only. Pure.

A page holds tokens of one group. Groups of layers without a window have a page for every
`page_tokens` tokens. Those of layers with a window have `window_pages` of them at most, used in
turn: page *i* of the tokens lies where page *i* - `window_pages` lay, which is behind the window by
then. So a sequence's pages stay the same while its window moves.

    pages of a sequence    page 0 of its tokens: one of each group | page 1: likewise | ...
                           from page `window_pages` on: one of each group without a window

Its first pages are those of its first tokens, whatever their number.

*Source:* hybrid KV cache manager: vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.types.units import ceil_div

NO_PAGE = -1  # in place of a page, until there is one


@dataclass(frozen=True)
class PageGroups:
    """See the module docstring.

    Attributes:
        num_full: groups of layers without a window; they come first.
        num_windowed: groups of layers with one.
        window_pages: most pages of each of these.
    """

    num_full: int = 1
    num_windowed: int = 0
    window_pages: int = 0

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return self.num_full + self.num_windowed

    def num_pages(self, count: int) -> int:
        """Return the pages of `count` pages of tokens."""
        return count * self.num_full + min(count, self.window_pages) * self.num_windowed

    def count_in(self, num_pages: int) -> int:
        """Return for how many pages of tokens so many pages are enough."""
        most = self.window_pages * self.num_groups
        if num_pages <= most or not self.num_full:
            return num_pages // self.num_groups
        return self.window_pages + (num_pages - most) // self.num_full

    def is_windowed(self, position: int) -> bool:
        """Whether a group with a window has the page at this position."""
        in_all = position < self.window_pages * self.num_groups
        return in_all and position % self.num_groups >= self.num_full

    def position(self, group: int, index: int) -> int:
        """Return which of a sequence's pages has page `index` of its tokens, of a group."""
        if group >= self.num_full:
            return index % self.window_pages * self.num_groups + group
        return self.num_pages(index) + group

    def tables(self, pages: Sequence[int]) -> list[list[int]]:
        """Return by group on which page each page of tokens is."""
        count, every = self.count_in(len(pages)), self.num_groups
        rows = min(count, self.window_pages) * every  # of one page of each group
        full = [
            [*pages[group:rows:every], *pages[rows + group :: self.num_full]]
            for group in range(self.num_full)
        ]
        in_turn = [pages[group:rows:every] for group in range(self.num_full, every)]
        times = ceil_div(count, max(1, self.window_pages))
        return [*full, *([*found * times][:count] for found in map(list, in_turn))]


PLAIN = PageGroups()


def page_groups(num_full: int, num_windowed: int, num_rows: int, page_tokens: int) -> PageGroups:
    """Return groups with room for so many tokens in layers with a window, wherever they begin."""
    return PageGroups(num_full, num_windowed, ceil_div(num_rows - 1, page_tokens) + 1)
