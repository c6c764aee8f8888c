"""The command `kvd completion` prints a shell's script; the script calls `kvd complete`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvd.cli.filters import SortName, TierName
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.core.records import actions
from shared.config.completion import (
    Shell,
    ShellName,
    TypedWords,
    Values,
    completion_script,
    print_candidates,
    value_of,
)
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import ReportedError

# Values of options and arguments, by their names, in all commands.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "sort": tuple(SortName),
    "tier": tuple(TierName),
    "shell": tuple(Shell),
}

EVENT_NAMES = tuple(
    sorted(value for name, value in vars(actions).items() if name.isupper() and name[0] != "_")
)

# Returns stored ids of a kind ("session", "tenant", "model") that complete the last word. It gets
# all words, because they may name the runtime directory.
Ids = Callable[[str, Sequence[str]], list[str]]
MOST_IDS = 200
WAIT_S = 2.0  # users do not wait longer after pressing Tab


def completion(shell: ShellName) -> None:
    """Print a completion script: Tab then completes commands, options, sessions.

    bash: put `source <(kvd completion bash)` into ~/.bashrc. zsh: the same with zsh into ~/.zshrc,
    after compinit. fish: `kvd completion fish > ~/.config/fish/completions/kvd.fish`.
    """
    typer.echo(completion_script("kvd", shell), nl=False)


def complete(context: typer.Context, words: TypedWords = None) -> None:
    """Print what the last word may become: a line each, with what it means behind a tab."""
    print_candidates(context.find_root().command, words, values_with(_stored_ids))


def values_with(ids: Ids) -> Values:
    """Return the function that lists values of an option or argument of kvd's commands."""

    def values(param: Any, words: Sequence[str]) -> Iterable[str]:
        if param.name in CHOICES:
            return CHOICES[param.name]
        if "--name" in param.opts:
            return EVENT_NAMES
        kind = "session" if param.name == "prefix" else param.name
        return ids(kind, words) if kind in ("session", "tenant", "model") else ()

    return values


def _stored_ids(kind: str, words: Sequence[str]) -> list[str]:
    """Return ids that the running kvd has; none if it does not answer in time."""
    begun = words[-1].rpartition("=")[2]
    try:
        with open_client(_runtime_dir(words)) as client:
            if kind == "session":
                wanted = kvd_pb2.SessionFilter(tenant=value_of(words, "--tenant"), id_prefix=begun)
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
    named = value_of(words, "--runtime-dir") or os.environ.get("KVD_RUNTIME_DIR", "")
    return Path(named).expanduser() if named else None
