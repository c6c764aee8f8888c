"""The list of commands in a group's --help: under headings, each with its whole first sentence."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from typer.core import TyperGroup

NO_HEADING = "Commands"


class WholeHelp(TyperGroup):
    """A group whose help says of each command what it does, however narrow the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of --help."""
        write_commands(formatter, self._rows(ctx))

    def _rows(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        """Heading, name and summary of each command."""
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                yield heading or NO_HEADING, name, summary(command)


def write_commands(formatter: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    """Write a list of commands; what is under one heading stands together.

    Args:
        formatter: of the command line library.
        rows: heading, name and summary of each.
    """
    ordered = list(rows)
    headings = list(dict.fromkeys(heading for heading, _, _ in ordered))
    ordered.sort(key=lambda row: headings.index(row[0]))
    widest = max((len(name) for _, name, _ in ordered), default=0)
    for heading, found in groupby(ordered, key=itemgetter(0)):
        with formatter.section(heading):
            # As wide in each section: their second columns stand below each other.
            formatter.write_dl([(name.ljust(widest), f"{text}.") for _, name, text in found])


def summary(command: Any) -> str:
    """The first sentence of a command's help."""
    return first_sentence(command.help or "")


def first_sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return paragraph.split(". ")[0].removesuffix(".")
