"""kvd completion: scripts for shells, and what they ask at each Tab."""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.candidates import candidates
from kvd.cli.completion_scripts import COMPLETIONS
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import ReportedError

MOST_IDS = 200
WAIT_S = 2.0  # nobody waits longer at a Tab


class Shell(StrEnum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Whose script.")]) -> None:
    """Print a script for Tab: a shell then completes commands, options, stored sessions.

    bash: put `source <(kvd completion bash)` into ~/.bashrc. zsh: the same with zsh into ~/.zshrc,
    after compinit. fish: `kvd completion fish > ~/.config/fish/completions/kvd.fish`.
    """
    typer.echo(COMPLETIONS[shell], nl=False)


def complete(
    words: Annotated[list[str] | None, typer.Argument(help="Typed so far, the last one begun.")],
) -> None:
    """Print what the last word may become: a line each, with what it means behind a tab."""
    from kvd.cli.main import root_command

    for found in candidates(root_command(), words or [""], _stored_ids):
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
    """The value of an option that is typed already."""
    for index, word in enumerate(words[:-1]):
        if word == option and index + 1 < len(words) - 1:
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
