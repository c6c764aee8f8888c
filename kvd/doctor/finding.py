"""What a check has found. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it works, but not as well, as safely or as long as it could
    PROBLEM = "problem"  # kvd, or an engine, does not start or does not do what the settings say


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        check: slug of what was looked at.
        what: what was found, one line, with values.
        remedy: what to do about it, one line; "" if it is OK.
    """

    check: str
    level: Level
    what: str
    remedy: str = ""


def ok(check: str, what: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, remedy: str) -> Finding:
    """It could be better."""
    return Finding(check, Level.WARNING, what, remedy)


def problem(check: str, what: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, Level.PROBLEM, what, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
