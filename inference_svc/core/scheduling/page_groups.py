"""Groups of layers with pages of their own, so that layers with a window hold the last tokens only.

A page holds tokens of one group. A group of layers without a window has a page for every
`page_tokens` tokens. A group of layers with a window has at most `window_pages` pages, used in
turn: page *i* of the tokens lies where page *i* - `window_pages` lay, which is behind the window by
then. So a sequence's pages stay the same while its window moves.

    pages of a sequence    page 0 of its tokens: one of each group | page 1: likewise | ...
                           from page `window_pages` on: one of each group without a window

The first pages of a sequence are always those of its first tokens.

*Source:* hybrid KV cache manager: vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.types.units import ceil_div

NO_PAGE = -1  # marks a place in a sequence's pages that has no page yet


@dataclass(frozen=True)
class PageGroups:
    """The number of groups, and how their pages are arranged in a sequence.

    Attributes:
        num_full: number of groups of layers without a window; they come first.
        num_windowed: number of groups of layers with a window.
        window_pages: most pages of each group with a window.
    """

    num_full: int = 1
    num_windowed: int = 0
    window_pages: int = 0

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.num_full + self.num_windowed

    def num_pages(self, count: int) -> int:
        """Return the number of pages, of all groups, for `count` pages of tokens."""
        return count * self.num_full + min(count, self.window_pages) * self.num_windowed

    def count_in(self, num_pages: int) -> int:
        """Return how many pages of tokens fit in `num_pages` pages of all groups."""
        most = self.window_pages * self.num_groups
        if num_pages <= most or not self.num_full:
            return num_pages // self.num_groups
        return self.window_pages + (num_pages - most) // self.num_full

    def is_windowed(self, position: int) -> bool:
        """Return whether the page at this position belongs to a group with a window."""
        in_all = position < self.window_pages * self.num_groups
        return in_all and position % self.num_groups >= self.num_full

    def position(self, group: int, index: int) -> int:
        """Return the position among a sequence's pages of page `index` of a group's tokens."""
        if group >= self.num_full:
            return index % self.window_pages * self.num_groups + group
        return self.num_pages(index) + group

    def tables(self, pages: Sequence[int]) -> list[list[int]]:
        """Return, for each group, the page of each page of tokens."""
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
    """Return groups with room for `num_rows` tokens in layers with a window, however aligned."""
    return PageGroups(num_full, num_windowed, ceil_div(num_rows - 1, page_tokens) + 1)
