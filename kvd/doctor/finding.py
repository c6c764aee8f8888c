"""The finding of a check. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it works, but could be faster, safer or more durable
    PROBLEM = "problem"  # kvd or an engine does not start, or does not do what the settings say


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: the name of the check, a slug.
        level: its severity.
        what: what was found, in one line, with values.
        remedy: what to do about it, in one line; "" if the level is OK.
    """

    check: str
    level: Level
    what: str
    remedy: str = ""


def ok(check: str, what: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Return a finding that something could be better."""
    return Finding(check, Level.WARNING, what, remedy)


def problem(check: str, what: str, remedy: str) -> Finding:
    """Return a finding that something does not work."""
    return Finding(check, Level.PROBLEM, what, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings; OK if there are none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
