"""What each shell evaluates at its start, so that Tab asks `kvd complete`."""

from collections.abc import Mapping

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

COMPLETIONS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
