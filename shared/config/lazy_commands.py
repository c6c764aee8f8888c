"""Commands whose modules are imported when they run, so that `--help` and `version` are quick.

A group knows the name and the summary of each command, and where its function is (or the Typer app
of a group inside it). The command itself is made when it is first needed. The group's --help lists
commands under headings, each with its whole first sentence; examples and exit codes may follow.
"""

import importlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

NO_HEADING = "Commands"
_HELP_WIDTH = 74


class WholeHelp(TyperGroup):
    """A group whose help has the whole summary of each command, however narrow the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of --help."""
        write_commands(formatter, self._rows(ctx))

    def _rows(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        """Yield heading, name and summary of each command."""
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                yield heading or NO_HEADING, name, summary(command)


def write_commands(formatter: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    """Write a list of commands. Those under one heading are put together.

    Args:
        formatter: the help formatter of the command line library.
        rows: heading, name and summary of each command.
    """
    ordered = list(rows)
    headings = list(dict.fromkeys(heading for heading, _, _ in ordered))
    ordered.sort(key=lambda row: headings.index(row[0]))
    widest = max((len(name) for _, name, _ in ordered), default=0)
    for heading, found in groupby(ordered, key=itemgetter(0)):
        with formatter.section(heading):
            # Padded to one width, so that the second columns of all sections are aligned.
            formatter.write_dl([(name.ljust(widest), f"{text}.") for _, name, text in found])


def summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return first_sentence(command.help or "")


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, without its full stop."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return paragraph.split(". ")[0].removesuffix(".")


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is not imported yet.

    Attributes:
        target: "module:name" of its function, or of the Typer app of a group.
        summary: the first sentence of its help, without the full stop.
        hidden: whether it is left out of --help.
        heading: its heading in the list of --help.
    """

    target: str
    summary: str = ""
    hidden: bool = False
    heading: str = NO_HEADING


Prepare = Callable[[typer.Typer], None]


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name, each made at its first use.

    Args:
        lazy: the commands by name.
        prepare: called with an app that has the command, before the command is made.
    """

    def __init__(self, lazy: Mapping[str, LazyCommand], prepare: Prepare) -> None:
        self._lazy = lazy
        self._prepare = prepare
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name, self._lazy[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._lazy, **self._made})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._lazy or name in self._made

    def _make(self, name: str, lazy: LazyCommand) -> Any:
        module, _, attribute = lazy.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.callback()(lambda: None)  # a group, even of one command
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, hidden=lazy.hidden, cls=_Command)(found)
        self._prepare(app)
        group: Any = typer.main.get_command(app)
        return group.commands[name]


def lazy_group(
    lazy: Mapping[str, LazyCommand], prepare: Prepare = lambda _app: None
) -> type[TyperGroup]:
    """Return the class of a group with these commands: `typer.Typer(cls=lazy_group(…))`."""

    class LazyGroup(TyperGroup):
        """A group that lists its commands without making them."""

        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = LazyCommands(lazy, prepare)

        def get_params(self, ctx: Any) -> list[Any]:
            """Return its options, with --help."""
            return _keep_defaults(super().get_params(ctx))

        @property
        def summaries(self) -> Mapping[str, str]:
            """Summaries of the commands that are not hidden, without making them."""
            return {name: command.summary for name, command in lazy.items() if not command.hidden}

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            """Write the list of commands of --help."""
            del ctx
            summaries = self.summaries.items()
            write_commands(
                formatter, ((lazy[name].heading, name, text) for name, text in summaries)
            )

    return LazyGroup


class _Option(TyperOption):
    """An option that takes its own default, and a plain word, without checking them.

    Typer imports pydantic to check a value, which takes longer than all that `kvd ls` does.
    """

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value that the function gets."""
        if _is_own_default(self, ctx, value):
            return value
        plain = _plain_kind(self, value)
        return super().process_value(ctx, value) if plain is None else plain(value)


class _Argument(TyperArgument):
    """An argument that does the same as _Option."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value that the function gets."""
        if _is_own_default(self, ctx, value):
            return value
        plain = _plain_kind(self, value)
        return super().process_value(ctx, value) if plain is None else plain(value)


def _is_own_default(param: Any, ctx: Any, value: Any) -> bool:
    """Whether no value was given, and the default needs no conversion.

    The default of a list is converted to a list, and a word may be converted to an enum member.
    """
    source = ctx.get_parameter_source(param.name)
    if source is None or source.name != "DEFAULT" or param.required:
        return False
    if param.nargs != 1 or param.multiple:
        return False
    return isinstance(value, Enum) or type(value) in {type(None), str, int, float}


def _plain_kind(param: Any, value: Any) -> type[str] | type[Path] | None:
    """Return str or Path if a word is converted to it without any check; None otherwise."""
    declared = getattr(param, "type_descriptor", None)  # older releases of typer need no pydantic
    if declared is None or type(value) is not str or param.callback is not None:
        return None
    info = declared.parameter_info
    if info.parser is not None:
        return None
    if declared.annotation is str:
        return str
    checks = (info.exists, info.readable, info.writable, info.resolve_path, info.allow_dash)
    may_be_either = info.file_okay and info.dir_okay
    if declared.annotation is Path and may_be_either and info.path_type is None and not any(checks):
        return Path
    return None


def _keep_defaults(params: Iterable[Any]) -> list[Any]:
    """Make the parameters of a command take their own defaults as they are; return them."""
    kinds: dict[type[Any], type[Any]] = {TyperOption: _Option, TyperArgument: _Argument}
    found = list(params)
    for param in found:
        param.__class__ = kinds.get(type(param), type(param))
    return found


class _Command(TyperCommand):
    """A command that imports nothing to check its own defaults."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its arguments and options, with --help."""
        return _keep_defaults(super().get_params(ctx))


def examples_adder(examples: Mapping[str, tuple[str, ...]]) -> Prepare:
    """Return a function that puts the examples under the help of an app's commands.

    Args:
        examples: lines, by the words of a command after the program's name.
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
    """Return the table for --help. Its first character tells the library not to reflow it."""
    lines = []
    for code, meaning in codes.items():
        first, *more = textwrap.wrap(meaning, _HELP_WIDTH - 5)
        lines += [f"{code:>5}  {first}", *(f"       {line}" for line in more)]
    return "\n".join(("\b", "Exit codes:", *lines))
