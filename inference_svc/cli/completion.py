"""`inference-svc completion`: completion scripts, and `inference-svc complete`, which they call."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from shared.config.completion import (
    Shell,
    ShellName,
    TypedWords,
    completion_script,
    print_candidates,
)

# The values of options and arguments by their names, the same in all commands.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": ("auto", "torch", "triton", "cpp"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_policy": ("auto", "always", "never"),
    "log_format": ("auto", "json", "text"),
    "log_level": ("debug", "info", "warning", "error"),
    "mode": ("cached", "recompute"),
    "saving": ("async", "sync", "off"),
    "shell": tuple(Shell),
}


def completion(shell: ShellName) -> None:
    """Print a completion script: Tab then completes commands, options and values.

    bash: put `source <(inference-svc completion bash)` into ~/.bashrc. zsh: the same with zsh into
    ~/.zshrc, after compinit. fish: `inference-svc completion fish >
    ~/.config/fish/completions/inference-svc.fish`.
    """
    typer.echo(completion_script("inference-svc", shell), nl=False)


def complete(context: typer.Context, words: TypedWords = None) -> None:
    """Print what the last word may become: a line each, with what it means behind a tab."""
    print_candidates(context.find_root().command, words, _values)


def _values(param: Any, _words: Sequence[str]) -> Sequence[str]:
    return CHOICES.get(param.name, ())
