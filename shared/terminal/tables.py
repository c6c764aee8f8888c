"""Tables that fit a terminal: the least important columns are cut or left out. Pure."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2  # terminal columns between two columns of a table
MIN_CUT = 8  # least terminal columns of a column that is cut


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its heading.
        is_number: whether its cells are right-aligned.
        rank: 0: always shown; of the others the highest rank is left out first.
        may_be_cut: whether its cells may be cut, with "…" at their end.
        least: if it may be cut, the width below which columns with a rank are left out first.
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
    """Return a table of at most `width` terminal columns, or as few more as possible.

    Title and caption use the terminal's width, even if the table is narrower.
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
    """Whether a table fits with nothing left out or cut."""
    return _total(_widths(columns, rows), range(len(columns))) <= width


def facts(rows: Iterable[tuple[str, str]], width: int, title: str = "") -> Table:
    """Return a table of names and texts; long texts are wrapped in their column."""
    table = _plain_table(title, width)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(title: str, width: int) -> Table:
    """Return an empty table without borders."""
    return Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        title=_lines(title, width, "table.title") if title else None,
        title_justify="left",
    )


def _lines(text: str, width: int, style: str) -> Text:
    """Return a text wrapped to the terminal's width; rich would wrap it to the table's."""
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
    """Return each column's width, the least important columns cut first, down to their `least`.

    If that is still too wide they are cut down to MIN_CUT.
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
