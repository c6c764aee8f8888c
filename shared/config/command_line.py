"""A command line whose connection options may stand before or after the command's name. Pure.

It walks the tree of commands of the command line library by these attributes only: `get_command` of
a group; `params`, with `opts` and `is_flag`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shared.types.errors import InvalidInputError

END = "--"  # no word after it is an option


class UnreadableArgumentError(InvalidInputError):
    """A word of the command line is not UTF-8, so it can be no name and no value."""

    reason = "unreadable_argument"


def arrange_options(root: Any, words: Sequence[str], movable: Iterable[str]) -> list[str]:
    """Move each movable option to where it is defined: at the program, or at the command.

    An option that is defined at neither goes to the command, so that the library complains.

    Args:
        root: the program's command.
        words: the words typed after the program's name.
        movable: long names of the options to move; each takes a value.

    Raises:
        UnreadableArgumentError: a word is not UTF-8.
    """
    _check_readable(words)
    typed = list(words)
    tail = [typed.pop() for _ in range(len(typed) - typed.index(END))] if END in typed else []
    path, moved, kept = [root], [], []
    index_of_command = 0
    for option, values in _parts(path, typed, frozenset(movable)):
        if option in movable:
            moved.append((option, values))
            continue
        kept += values
        if len(path) - 1 > index_of_command:  # this word was a command's name
            index_of_command = len(path) - 1
            at_command = len(kept)
    if len(path) == 1:
        return list(words)
    for option, values in reversed(moved):
        if option not in _options(path[-1]) and option in _options(root):
            kept[:0] = values
            at_command += len(values)
        else:
            kept[at_command:at_command] = values
    return kept + tail[::-1]


def _check_readable(words: Sequence[str]) -> None:
    """Check that no word has bytes that are not UTF-8, which Python turns into surrogates."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UnreadableArgumentError(
                f"the argument {word[:80]!r} is not UTF-8", "write it in UTF-8"
            ) from error


def _parts(
    path: list[Any], typed: Sequence[str], movable: frozenset[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values, and each other word with "" for the option's name.

    Commands are added to `path` as they come.
    """
    waiting = list(reversed(typed))
    while waiting:
        word = waiting.pop()
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            command = _command(path[-1], word)
            if command is not None:
                path.append(command)
            yield "", [word]
        elif not equals and waiting and (name in movable or _takes_value(path, name)):
            yield name, [word, waiting.pop()]
        else:
            yield name, [word]


def _command(group: Any, name: str) -> Any:
    return group.get_command(None, name) if hasattr(group, "get_command") else None


def _options(command: Any) -> set[str]:
    return {name for param in command.params for name in param.opts}


def _takes_value(path: Sequence[Any], name: str) -> bool:
    return any(
        name in param.opts and not param.is_flag
        for param in path[-1].params
        if param.param_type_name == "option"
    )
