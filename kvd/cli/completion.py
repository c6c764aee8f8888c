"""`kvd completion`: scripts for shells, and what they ask `kvd complete` at each Tab.

What may come next is found by walking the tree of commands as the command line library has it, by
its attributes only: `commands` of a group, or `summaries` of a lazy one; `params`, with `name`,
`opts`, `help`, `is_flag`.

Of our own, because the library's scripts split words at colons and have zsh `eval` what comes back:
the ids of sessions are chosen by clients.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvd.cli.completion_scripts import COMPLETIONS
from kvd.cli.filters import SortName, TierName
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.core.records import actions
from shared.config.lazy_commands import first_sentence, summary
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import ReportedError


class Shell(StrEnum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# What an option or argument of this name may be, in all commands.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "sort": tuple(SortName),
    "tier": tuple(TierName),
    "shell": tuple(Shell),
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
    """Return what an option or argument may be."""
    if param.name in CHOICES:
        return (Candidate(word) for word in CHOICES[param.name])
    kind = "session" if param.name == "prefix" else param.name
    if kind == "name":
        return (Candidate(name) for name in EVENT_NAMES)
    if kind in ("session", "tenant", "model"):
        return (Candidate(word) for word in ids(kind, words) if word.startswith(begun))
    return iter(())


MOST_IDS = 200
WAIT_S = 2.0  # nobody waits longer at a Tab


def completion(shell: Annotated[Shell, typer.Argument(help="Whose script.")]) -> None:
    """Print a script for Tab: a shell then completes commands, options, stored sessions.

    bash: put `source <(kvd completion bash)` into ~/.bashrc. zsh: the same with zsh into ~/.zshrc,
    after compinit. fish: `kvd completion fish > ~/.config/fish/completions/kvd.fish`.
    """
    typer.echo(COMPLETIONS[shell], nl=False)


def complete(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(help="Typed so far, the last one begun.")],
) -> None:
    """Print what the last word may become: a line each, with what it means behind a tab."""
    for found in candidates(context.find_root().command, words or [""], _stored_ids):
        typer.echo(f"{found.word}\t{found.about}")


def _stored_ids(kind: str, words: Sequence[str]) -> list[str]:
    """Ids that the running kvd has; none if it does not answer at once."""
    begun = words[-1].rpartition("=")[2]
    try:
        with open_client(_runtime_dir(words)) as client:
            if kind == "session":
                wanted = kvd_pb2.SessionFilter(tenant=_said(words, "--tenant"), id_prefix=begun)
                return list(dict.fromkeys(client.session_ids(wanted, MOST_IDS, WAIT_S)))
            return _of_stats(client, kind)
    except ReportedError:
        return []


def _of_stats(client: OperatorClient, kind: str) -> list[str]:
    layouts = client.stats(timeout_s=WAIT_S).layouts
    if kind == "model":
        return sorted({layout.model for layout in layouts})
    return sorted({usage.tenant for layout in layouts for usage in layout.tenants})


def _runtime_dir(words: Sequence[str]) -> Path | None:
    said = _said(words, "--runtime-dir") or os.environ.get("KVD_RUNTIME_DIR", "")
    return Path(said).expanduser() if said else None


def _said(words: Sequence[str], option: str) -> str:
    """Return the value of an option that is typed already."""
    for index, word in enumerate(words[:-1]):
        if word == option and index + 1 < len(words) - 1:
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
