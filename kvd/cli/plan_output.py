"""What the plans of the command line have in common: progress, tables, JSON."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from shared.terminal.printing import console
from shared.types.errors import ConfigError

ONLY = "-"  # as the file of --json: the document goes to stdout, and nothing else


class UnusableOutputError(ConfigError):
    """The JSON document cannot be written."""

    reason = "unusable_output"


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal; what is yielded is told how much is done."""
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


def check_json(json_to: str) -> None:
    """Raise UnusableOutputError if it cannot be written: before the minutes that planning takes."""
    path = Path(json_to)
    if json_to not in {"", ONLY} and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise UnusableOutputError(
            f"{json_to} cannot be written", "name a file in a directory that exists with --json"
        )


def print_report(document: Mapping[str, Any], tables: Iterable[Table], json_to: str) -> None:
    """Print the tables, and write the document if it is asked for; or print the document alone.

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
                f"{json_to} cannot be written ({error.strerror})", "name another file with --json"
            ) from error
    out = console()
    for table in tables:
        out.print(table)
        out.print()
