"""What the help of both programs says besides options and commands: examples, and exit codes."""

import textwrap
from collections.abc import Mapping

import typer

from shared.config.lazy_commands import Prepare

_WIDTH = 74


def adding_examples(examples: Mapping[str, tuple[str, ...]]) -> Prepare:
    """Return what puts the examples under the help of an app's commands.

    Args:
        examples: the words of a command behind the program's name → lines.
    """

    def add(app: typer.Typer, prefix: str = "") -> None:
        for command in app.registered_commands:
            lines = examples.get(f"{prefix}{command.name}", ())
            block = "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
            command.epilog = block if lines else None
        for group in app.registered_groups:
            if group.typer_instance is not None:
                add(group.typer_instance, f"{prefix}{group.name} ")

    return add


def exit_codes_help(codes: Mapping[int, str]) -> str:
    """The table for --help; its first character has the command line library leave it as it is."""
    lines = []
    for code, meaning in codes.items():
        first, *others = textwrap.wrap(meaning, _WIDTH - 5)
        lines += [f"{code:>5}  {first}", *(f"       {line}" for line in others)]
    return "\n".join(("\b", "Exit codes:", *lines))
