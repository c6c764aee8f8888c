"""Reports on the command line: progress on stderr, tables for people, a document for scripts."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from shared.measuring.statistics import Spread
from shared.terminal.printing import console
from shared.terminal.tables import Column, fitted
from shared.types.errors import ConfigError

ONLY = "-"  # as the file of --json: only the document is printed, to stdout


class UnusableOutputError(ConfigError):
    """The JSON document cannot be written."""

    reason = "unusable_output"


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal; yield the callback for the progress."""
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda num_done: bar.update(task, completed=num_done)


def print_progress(what: str) -> None:
    """Print on stderr what is being measured."""
    typer.echo(f"measuring: {what}", err=True)


def check_json(json_to: str) -> None:
    """Raise UnusableOutputError if the file cannot be written: checked before minutes are spent."""
    path = Path(json_to)
    if json_to not in {"", ONLY} and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise UnusableOutputError(
            f"the file {json_to} cannot be written",
            "give a file in an existing directory with --json",
        )


def print_report(
    document: Mapping[str, Any],
    tables: Callable[[int], Iterable[Table]],
    json_to: str,
    notes: Iterable[str] = (),
) -> None:
    """Print the tables, and write the document if a file is named; or print the document alone.

    Args:
        document: plain values.
        tables: returns the tables for a terminal with this many columns.
        json_to: file for the document; ONLY: print it alone; "": no document.
        notes: lines after the tables. They are not wrapped, because they may be commands.

    Raises:
        UnusableOutputError: the file cannot be written.
    """
    text = json.dumps(document, indent=2)
    if json_to == ONLY:
        typer.echo(text)
        return
    if json_to:
        try:
            Path(json_to).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UnusableOutputError(
                f"the file {json_to} cannot be written ({error.strerror})",
                "give another file with --json",
            ) from error
    out = console()
    for table in tables(out.width):
        out.print(table)
        out.print()
    for note in notes:
        typer.echo(note)


def number(heading: str, rank: int = 0) -> Column:
    """Return a column of numbers; see Column for the rank."""
    return Column(heading, is_number=True, rank=rank)


def table_of(
    cells: Sequence[tuple[Column, Callable[[Any], str]]],
    found: Iterable[Any],
    width: int,
    title: str,
    caption: str = "",
) -> Table:
    """Return a table with a row for each item.

    Args:
        cells: the columns, each with the function that writes its cell of an item.
        found: the items.
        width: columns of the terminal.
        title: text above the table.
        caption: text below the table.
    """
    rows = [[write(item) for _, write in cells] for item in found]
    return fitted([column for column, _ in cells], rows, width, title, caption)


def quartiles(spread: Spread, form: str = ".2f") -> str:
    """Return quartiles as tables show them."""
    return f"{format(spread.low, form)} - {format(spread.high, form)}"


def verdict(is_met: bool) -> str:
    """Return whether a goal is met, as tables show it. A goal is shown, never asserted."""
    return "met" if is_met else "MISSED"
