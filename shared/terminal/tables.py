"""Tables that fit: what matters least is left out where a terminal is narrow. Pure."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns of a terminal between two of a table
MIN_CUT = 8  # terminal columns that stay of one that is cut


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        rank: 0: always there; of the others the highest goes first.
        may_be_cut: its cells may end with "…", rather than that the table is too wide.
        least: so many terminal columns of it are worth more than columns of a rank; if it is cut.
    """

    heading: str
    is_number: bool = False
    rank: int = 0
    may_be_cut: bool = False
    least: int = 8


def fitted(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    title: str = "",
    caption: str = "",
) -> Table:
    """Make a table of so many terminal columns, or as few more as can be.

    Title and caption are as wide as the terminal, however narrow the table is.
    """
    widths = _widths(columns, rows)
    kept = _kept(columns, widths, width)
    fit = _cut(columns, widths, kept, width)
    table = _plain_table(title, width)
    if caption:
        table.caption, table.caption_justify = _lines(caption, width, "table.caption"), "left"
    for index in kept:
        column, most = columns[index], fit[index]
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(
            column.heading, justify=justify, no_wrap=True, overflow="ellipsis", width=most
        )
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether nothing of a table has to be left out or cut."""
    return _total(_widths(columns, rows), range(len(columns))) <= width


def facts(rows: Iterable[tuple[str, str]], width: int, title: str = "") -> Table:
    """Make a table of names, and beside each what is to be said; it goes on below itself."""
    table = _plain_table(title, width)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(title: str, width: int) -> Table:
    return Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        title=_lines(title, width, "table.title") if title else None,
        title_justify="left",
    )


def _lines(text: str, width: int, style: str) -> Text:
    """Text of as many lines as a terminal needs for it; rich would wrap it to the table's width."""
    wrapped = "\n".join(textwrap.fill(line, width) for line in text.split("\n"))
    return Text(wrapped, style, no_wrap=True, overflow="ignore")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return each column's full width."""
    return [
        max([cell_len(column.heading), *(cell_len(row[index]) for row in rows)])
        for index, column in enumerate(columns)
    ]


def _kept(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Return the indices of the columns that are shown."""
    kept = list(range(len(columns)))
    while _total(_least(columns, widths), kept) > width:
        index = max(reversed(kept), key=lambda index: columns[index].rank)
        if not columns[index].rank:
            break
        kept.remove(index)
    return kept


def _cut(
    columns: Sequence[Column], widths: Sequence[int], kept: Sequence[int], width: int
) -> list[int]:
    """Return each column's width: what matters least is cut first, and none below its least.

    If that is too wide still, columns that are always there are cut below it.
    """
    fit = list(widths)
    ordered = sorted(kept, key=lambda index: columns[index].rank, reverse=True)
    for least in (_least(columns, widths), [min(MIN_CUT, width) for width in widths]):
        for index in ordered:
            num_over = _total(fit, kept) - width
            if num_over > 0 and columns[index].may_be_cut:
                fit[index] = max(min(fit[index], least[index]), fit[index] - num_over)
    return fit


def _least(columns: Sequence[Column], widths: Sequence[int]) -> list[int]:
    """Return the least width of each column."""
    return [
        min(width, column.least) if column.may_be_cut else width
        for column, width in zip(columns, widths, strict=True)
    ]


def _total(widths: Sequence[int], kept: Iterable[int]) -> int:
    chosen = [widths[index] for index in kept]
    return sum(chosen) + _GAP * max(0, len(chosen) - 1)
