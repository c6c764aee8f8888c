"""kvd completion: scripts for shells, and what they ask at each Tab."""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.candidates import candidates
from kvd.cli.connection import open_client
from kvd.cli.operator_client import OperatorClient
from shared.errors import ReportedError
from shared.pb.kvd.v1 import kvd_pb2

MOST_IDS = 200
WAIT_S = 2.0  # nobody waits longer at a Tab

_BASH = """\
_kvd() {
    local cur words cword IFS=$'\\n'
    if declare -F _get_comp_words_by_ref >/dev/null; then
        _get_comp_words_by_ref -n =:@ -c cur -w words -i cword
    else
        words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]}
    fi
    COMPREPLY=($("${words[0]}" complete -- "${words[@]:1:cword}" 2>/dev/null | cut -f1))
    declare -F __ltrim_colon_completions >/dev/null && __ltrim_colon_completions "$cur"
}
complete -o default -F _kvd kvd
"""
_ZSH = """\
#compdef kvd
_kvd() {
    local -a found
    local line word about tab=$'\\t'
    for line in "${(@f)$(kvd complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        word=${${line%%$tab*}//:/\\\\:} about=${line#*$tab}
        [[ -n $word ]] && found+=("$word${about:+:$about}")
    done
    if (( $#found )); then _describe -V kvd found; else _files; fi
}
if [[ $funcstack[1] == _kvd ]]; then _kvd "$@"; else compdef _kvd kvd; fi
"""
_FISH = """\
function __kvd_complete
    set -l found (kvd complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c kvd -f -a '(__kvd_complete)'
"""


class Shell(StrEnum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_SCRIPTS = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion(shell: Annotated[Shell, typer.Argument(help="Whose script.")]) -> None:
    """Print a script for Tab: a shell then completes commands, options, stored sessions.

    bash: put `source <(kvd completion bash)` into ~/.bashrc. zsh: the same with zsh into ~/.zshrc,
    after compinit. fish: `kvd completion fish > ~/.config/fish/completions/kvd.fish`.
    """
    typer.echo(_SCRIPTS[shell], nl=False)


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
