"""The commands of a program as pages: the source of man pages and Markdown. Pure."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config.lazy_commands import summary


@dataclass(frozen=True)
class Entry:
    """An argument or option.

    Attributes:
        name: with its value: "--idle TIME".
        facts: default, environment variable, whether it may be repeated.
    """

    name: str
    text: str
    facts: str


@dataclass(frozen=True)
class Page:
    """A command.

    Attributes:
        words: those of the program and the command: ("kvd", "config", "show").
        usage: the text behind the words.
        paragraphs: of its description, each on one line.
        commands: those of a group, with their summaries.
    """

    words: tuple[str, ...]
    summary: str
    usage: str
    paragraphs: tuple[str, ...]
    arguments: tuple[Entry, ...]
    options: tuple[Entry, ...]
    examples: tuple[str, ...]
    commands: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """Return the name of its man page."""
        return "-".join(self.words)


def pages(
    command: Any,
    words: tuple[str, ...],
    examples: Mapping[str, Sequence[str]],
    choices: Mapping[str, Sequence[str]],
) -> Iterator[Page]:
    """Yield the page of a command, and those of the commands in it.

    Args:
        examples: words behind the program's name → lines.
        choices: name of an option or argument → its values.
    """
    commands = {name: c for name, c in getattr(command, "commands", {}).items() if not c.hidden}
    arguments = tuple(
        _argument(p, choices) for p in command.params if p.param_type_name == "argument"
    )
    shown = (p for p in command.params if p.param_type_name == "option" and not p.hidden)
    options = tuple(_option(p, choices) for p in shown if p.name != "help")
    text = inspect.cleandoc(command.help or "")
    usage = ["[OPTIONS]"] if options else []
    usage += [argument.name for argument in arguments]
    usage += ["COMMAND"] if commands else []
    yield Page(
        words,
        summary(command),
        " ".join(usage),
        tuple(" ".join(paragraph.split()) for paragraph in text.split("\n\n")),
        arguments,
        options,
        tuple(examples.get(" ".join(words[1:]), ())),
        tuple((name, summary(sub)) for name, sub in commands.items()),
    )
    for name, sub in commands.items():
        yield from pages(sub, (*words, name), examples, choices)


def _argument(param: Any, choices: Mapping[str, Sequence[str]]) -> Entry:
    name = param.metavar or (param.name or "").upper()
    if param.name in choices:
        name = "|".join(choices[param.name])
    return Entry(name if param.required else f"[{name}]", _sentence(param.help), _facts(param))


def _option(param: Any, choices: Mapping[str, Sequence[str]]) -> Entry:
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names += f", {', '.join(param.secondary_opts)}"
    if not param.is_flag:
        longest = max(param.opts, key=len).removeprefix("--")
        value = param.metavar or longest.upper().replace("-", "_")
        names += f" {'|'.join(choices.get(param.name, ())) or value}"
    return Entry(names, _sentence(param.help), _facts(param))


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _facts(param: Any) -> str:
    default = getattr(param.default, "value", param.default)
    variables = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    facts = []
    if default not in (None, "", False, ()) and not callable(default):
        facts.append(f"Default: {default}.")
    if param.multiple:
        facts.append("May be repeated.")
    if variables:
        facts.append(f"Environment: {', '.join(variables)}.")
    return " ".join(facts)
