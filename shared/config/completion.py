"""Completion of command lines: the words that may come next, which shells ask for at each Tab.

They are found by walking the tree of commands of the command line library, by these attributes
only: `commands` of a group, or `summaries` of a lazy one; `params`, with `name`, `opts`, `help` and
`is_flag`. Each program supplies the possible values of its options and arguments.

The shell scripts are our own (`completion_script`). Those of the command line library split words
at colons, and let zsh `eval` the result: but the ids of sessions are chosen by clients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from shared.config.lazy_commands import first_sentence, summary


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


ShellName = Annotated[Shell, typer.Argument(help="The shell.")]
TypedWords = Annotated[
    list[str] | None, typer.Argument(help="Typed so far, the last one begun.", metavar="WORDS")
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may come next.

    Attributes:
        about: its meaning, in a few words.
    """

    word: str
    about: str = ""


# Possible values of an option or argument. All typed words are passed: they name the server, too.
Values = Callable[[Any, Sequence[str]], Iterable[str]]


def print_candidates(root: Any, words: Sequence[str] | None, values: Values) -> None:
    """Print what the last word may become: a word and, after a tab, its meaning on each line."""
    for candidate in candidates(root, words or (), values):
        typer.echo(f"{candidate.word}\t{candidate.about}")


def candidates(root: Any, words: Sequence[str], values: Values) -> Iterator[Candidate]:
    """Yield what the last of the words may become.

    Args:
        root: the program's command.
        words: the words after the program's name. The last one is being typed, and may be empty.
        values: returns the values of an option or argument. Those that do not begin with the last
            word are left out.
    """
    *typed, last_word = words or ("",)
    command, num_positional, option = _walk(root, typed)
    results: Iterable[Candidate]
    if option is not None:
        results = map(Candidate, values(option, words))
    elif last_word.startswith("-") and "=" in last_word:
        name = last_word.partition("=")[0]
        option = _option(command, name)
        known = () if option is None else values(option, words)
        results = (Candidate(f"{name}={value}") for value in known)
    elif last_word.startswith("-"):
        results = _options(command)
    elif hasattr(command, "commands"):
        results = _commands(command)
    else:
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        here = arguments[num_positional : num_positional + 1]
        results = (Candidate(value) for argument in here for value in values(argument, words))
    return (candidate for candidate in results if candidate.word.startswith(last_word))


def value_of(words: Sequence[str], option: str) -> str:
    """Return the value of an option that is typed already; "" if it is not."""
    for index, word in enumerate(words[:-1]):
        if word == option and index + 1 < len(words) - 1:
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


def _commands(group: Any) -> Iterator[Candidate]:
    if hasattr(group, "summaries"):  # a lazy group has them without importing its commands
        return (Candidate(name, about) for name, about in group.summaries.items())
    commands = group.commands.items()
    return (Candidate(name, summary(sub)) for name, sub in commands if not sub.hidden)


def _walk(root: Any, typed: Sequence[str]) -> tuple[Any, int, Any]:
    """Return the typed command, its number of arguments, and the option that expects a value."""
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
_SCRIPTS: Mapping[Shell, str] = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion_script(program: str, shell: Shell) -> str:
    """Return the completion script of one of our programs."""
    function = f"_{program.replace('-', '_')}"
    if shell is Shell.ZSH:
        function = f"_{program}"  # zsh loads it from a file of this name
    return _SCRIPTS[shell].replace("FUNCTION", function).replace("PROGRAM", program)
