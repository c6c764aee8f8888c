"""What may stand where a command line is being typed: commands, options, choices, ids. Pure.

Walks the tree of commands as the command line library has it, by its attributes only: `commands` of
a group, or `summaries` of a lazy one; `params`, with `name`, `opts`, `help`, `is_flag`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.cli.filters import SortName, TierName
from kvd.core.records import actions
from shared.config.group_help import first_sentence, summary

SHELLS = ("bash", "zsh", "fish")
# What an option or argument of this name may be, in all commands.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "sort": tuple(SortName),
    "tier": tuple(TierName),
    "shell": SHELLS,
}

EVENT_NAMES = tuple(
    sorted(value for name, value in vars(actions).items() if name.isupper() and name[0] != "_")
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may come next.

    Attributes:
        about: what it means, in a few words.
    """

    word: str
    about: str = ""


Ids = Callable[[str, Sequence[str]], list[str]]


def candidates(root: Any, words: Sequence[str], ids: Ids) -> Iterator[Candidate]:
    """Yield what the last of the words may become.

    Args:
        root: the program's command.
        words: typed after its name; the last one is being typed, and may be empty.
        ids: gives stored ids of a kind ("session", "tenant", "model") that start with a word; it
            gets all words, for they say where kvd is.
    """
    *typed, begun = words or ("",)
    command, num_positional, option = _walk(root, typed)
    if option is not None:
        values = _values(option, begun, words, ids)
    elif begun.startswith("-") and "=" in begun:
        name, _, begun_value = begun.partition("=")
        option = _option(command, name)
        found = () if option is None else _values(option, begun_value, words, ids)
        values = (Candidate(f"{name}={value.word}", value.about) for value in found)
    elif begun.startswith("-"):
        values = _options(command)
    elif hasattr(command, "commands"):
        values = _commands(command)
    else:
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        values = iter(())
        if num_positional < len(arguments):
            values = _values(arguments[num_positional], begun, words, ids)
    return (value for value in values if value.word.startswith(begun))


def _commands(group: Any) -> Iterator[Candidate]:
    if hasattr(group, "summaries"):  # a lazy group says them without importing its commands
        return (Candidate(name, about) for name, about in group.summaries.items())
    commands = group.commands.items()
    return (Candidate(name, summary(sub)) for name, sub in commands if not sub.hidden)


def _walk(root: Any, typed: Sequence[str]) -> tuple[Any, int, Any]:
    """The command that is typed, how many arguments it has, and the option whose value comes."""
    command, num_positional, option = root, 0, None
    for word in typed:
        if option is not None:
            option = None
        elif word.startswith("-"):
            named = _option(command, word)
            option = None if named is None or named.is_flag else named
        elif word in getattr(command, "commands", {}):
            command, num_positional = command.commands[word], 0
        else:
            num_positional += 1
    return command, num_positional, option


def _option(command: Any, name: str) -> Any:
    options = (param for param in command.params if param.param_type_name == "option")
    return next((param for param in options if name in param.opts), None)


def _options(command: Any) -> Iterator[Candidate]:
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            longest = max(param.opts, key=len)
            yield Candidate(longest, first_sentence(param.help or ""))
    yield Candidate("--help", "Show what there is to know")


def _values(param: Any, begun: str, words: Sequence[str], ids: Ids) -> Iterator[Candidate]:
    """What an option or argument may be."""
    if param.name in CHOICES:
        return (Candidate(word) for word in CHOICES[param.name])
    kind = "session" if param.name == "prefix" else param.name
    if kind == "name":
        return (Candidate(name) for name in EVENT_NAMES)
    if kind in ("session", "tenant", "model"):
        return (Candidate(word) for word in ids(kind, words) if word.startswith(begun))
    return iter(())
