"""What may come next on a command line: what shells ask for at each Tab.

It is found by walking the tree of commands as the command line library has it, by its attributes
only: `commands` of a group, or `summaries` of a lazy one; `params`, with `name`, `opts`, `help`,
`is_flag`. What an option or argument may be, each program says for itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shared.config.completion_scripts import Shell
from shared.config.lazy_commands import first_sentence, summary

ShellName = Annotated[Shell, typer.Argument(help="Whose script.")]
TypedWords = Annotated[
    list[str] | None, typer.Argument(help="Typed so far, the last one begun.", metavar="WORDS")
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may come next.

    Attributes:
        about: what it means, in a few words.
    """

    word: str
    about: str = ""


# What an option or argument may be. It gets all words that are typed: they say, too, who is asked.
Values = Callable[[Any, Sequence[str]], Iterable[str]]


def print_candidates(root: Any, words: Sequence[str] | None, values: Values) -> None:
    """Print what the last word may become: a line each, with what it means behind a tab."""
    for found in candidates(root, words or (), values):
        typer.echo(f"{found.word}\t{found.about}")


def candidates(root: Any, words: Sequence[str], values: Values) -> Iterator[Candidate]:
    """Yield what the last of the words may become.

    Args:
        root: the program's command.
        words: typed after its name; the last one is being typed, and may be empty.
        values: what an option or argument may be; what does not begin as the word does is left out.
    """
    *typed, begun = words or ("",)
    command, num_positional, option = _walk(root, typed)
    found: Iterable[Candidate]
    if option is not None:
        found = map(Candidate, values(option, words))
    elif begun.startswith("-") and "=" in begun:
        name = begun.partition("=")[0]
        option = _option(command, name)
        known = () if option is None else values(option, words)
        found = (Candidate(f"{name}={value}") for value in known)
    elif begun.startswith("-"):
        found = _options(command)
    elif hasattr(command, "commands"):
        found = _commands(command)
    else:
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        here = arguments[num_positional : num_positional + 1]
        found = (Candidate(value) for argument in here for value in values(argument, words))
    return (candidate for candidate in found if candidate.word.startswith(begun))


def value_of(words: Sequence[str], option: str) -> str:
    """Return the value of an option that is typed already, "" if it is not."""
    for index, word in enumerate(words[:-1]):
        if word == option and index + 1 < len(words) - 1:
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


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
