"""A command line whose options of connection may stand before or after the command's name. Pure.

Walks the tree of commands as the command line library has it, by its attributes only: `get_command`
of a group; `params`, with `opts`, `is_flag`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

END = "--"  # what follows is no option, whatever it looks like


def arranged(root: Any, words: Sequence[str], movable: Iterable[str]) -> list[str]:
    """Put each movable option where it is one: at the program, or at the command.

    What no command of the line knows stays where it is, for the library to complain about.

    Args:
        root: the program's command.
        words: typed after its name.
        movable: long names of options, each with a value.
    """
    typed = list(words)
    rest = [typed.pop() for _ in range(len(typed) - typed.index(END))] if END in typed else []
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
    return kept + rest[::-1]


def _parts(
    path: list[Any], typed: Sequence[str], movable: frozenset[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield options with their values, and other words; commands are added to `path` as they come.

    Of other words the name of the option is "".
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
