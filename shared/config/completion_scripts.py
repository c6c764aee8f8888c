"""What each shell evaluates at its start, so that Tab asks the program's hidden command `complete`.

Of our own, because the command line library's scripts split words at colons and have zsh `eval`
what comes back: the ids of sessions are chosen by clients.
"""

from collections.abc import Mapping
from enum import StrEnum

_BASH = """\
FUNCTION() {
    local cur words cword IFS=$'\\n'
    if declare -F _get_comp_words_by_ref >/dev/null; then
        _get_comp_words_by_ref -n =:@ -c cur -w words -i cword
    else
        words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]}
    fi
    COMPREPLY=($("${words[0]}" complete -- "${words[@]:1:cword}" 2>/dev/null | cut -f1))
    declare -F __ltrim_colon_completions >/dev/null && __ltrim_colon_completions "$cur"
}
complete -o default -F FUNCTION PROGRAM
"""
_ZSH = """\
#compdef PROGRAM
FUNCTION() {
    local -a found
    local line word about tab=$'\\t'
    for line in "${(@f)$(PROGRAM complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        word=${${line%%$tab*}//:/\\\\:} about=${line#*$tab}
        [[ -n $word ]] && found+=("$word${about:+:$about}")
    done
    if (( $#found )); then _describe -V PROGRAM found; else _files; fi
}
if [[ $funcstack[1] == FUNCTION ]]; then FUNCTION "$@"; else compdef FUNCTION PROGRAM; fi
"""
_FISH = """\
function _FUNCTION_complete
    set -l found (PROGRAM complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c PROGRAM -f -a '(_FUNCTION_complete)'
"""


class Shell(StrEnum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_SCRIPTS: Mapping[Shell, str] = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion_script(program: str, shell: Shell) -> str:
    """Return the script of one of our programs."""
    function = f"_{program.replace('-', '_')}"
    if shell is Shell.ZSH:
        function = f"_{program}"  # a file of this name has it
    return _SCRIPTS[shell].replace("FUNCTION", function).replace("PROGRAM", program)
