"""The exit codes of `kvd`, in one place: for its help, its man pages and the docs."""

import textwrap
from collections.abc import Mapping

EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "something was found that is not as it should be: corrupt copies that verify could not put "
    "right, problems that doctor found; or the command itself failed",
    2: "bad usage or value, or a question that was not answered with yes",
    3: "unknown session or model, or a process that holds no lease",
    4: "in use: an engine works with it just now",
    5: "not as things stand now: what was asked for does not fit what there is",
    6: "a bound is reached: another verify runs, or too many watch already",
    7: "not allowed: no or a wrong token or certificate, or not this role or tenant",
    8: "not done within the time there is for a call",
    69: "kvd is not running, or does not answer",
    70: "kvd stopped because of a bug",
    78: "the settings cannot be used, or the start was refused",
    130: "interrupted with Ctrl-C",
}

_HELP_WIDTH = 74


def exit_codes_help() -> str:
    """The table for --help; its first character has the command line library leave it as it is."""
    lines = []
    for code, meaning in EXIT_CODES.items():
        first, *others = textwrap.wrap(meaning, _HELP_WIDTH - 5)
        lines += [f"{code:>5}  {first}", *(f"       {line}" for line in others)]
    return "\n".join(("\b", "Exit codes:", *lines))
