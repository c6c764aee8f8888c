"""Sizes, rates, shares and lists in options. Here 1 GB is 10**9 bytes. Pure.

The paper's figures, prices and disks are decimal: a plan with binary terabytes would be off by
10 %. Settings of kvd are binary (shared/types/units.py): 128 GB here are "119.2 GB" there. Binary
units have their own names here: KiB, MiB, GiB, TiB.
"""

import re
from collections.abc import Iterable

from shared.types.errors import InvalidInputError
from shared.types.units import parse_duration_s

GB = 10**9
MOST_BYTES = 10**18  # a larger size is a typing error
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES = ("B", "KB", "MB", "GB", "TB", "PB")


def parse_size(text: str) -> int:
    """Parse "128GB", "0.78 MB", "64GiB", "780000".

    Raises:
        ValueError: the text is no size; the message has the accepted forms.
    """
    match = _SIZE.match(text)
    if match is not None and (match.group(2) or not match.group(3)):
        base = 1024 if match.group(3) else 1000
        size: float = float(match.group(1)) * base ** _EXPONENTS[match.group(2).lower()]
        if size <= MOST_BYTES:
            return round(size)
    raise ValueError(f"{text!r} is not a size: write a number with KB, MB, GB or TB")


def format_size(num_bytes: float) -> str:
    """Return a size for people, with about three digits: 128e9 -> "128 GB"."""
    size, exponent = float(num_bytes), 0
    while size >= 999.5 and exponent < len(_NAMES) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.3g} {_NAMES[exponent]}"


DEFAULT_SHARES = "1%,2%,5%,10%,20%,40%"  # of the footprint, if no size is given
NEVER = "never"


class BadOptionError(InvalidInputError):
    """An option's value is invalid, or options do not go together."""

    reason = "bad_option"


def parts_of(text: str, option: str) -> list[str]:
    """Split a list "a,b".

    Raises:
        BadOptionError: the list is empty.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise BadOptionError(f"{option} {text!r} is empty", "write it as a,b,c")
    return list(dict.fromkeys(found))


def sizes_of(text: str, option: str) -> list[int]:
    """Parse a list of sizes: "128GB,256GB".

    Raises:
        BadOptionError: one of them is no size.
    """
    return [size_of(part, option) for part in parts_of(text, option)]


def size_of(text: str, option: str) -> int:
    """Parse a decimal size: "128GB".

    Raises:
        BadOptionError: the text is no size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", "write it as 128GB, for example") from error


def rate_of(text: str, option: str) -> float:
    """Parse bytes per second: "5GB/s", "5GB".

    Raises:
        BadOptionError: the text is no rate, or 0.
    """
    try:
        rate = parse_size(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", "write it as 5GB/s, for example") from error
    if not rate:
        raise BadOptionError(f"{option} {text!r} is 0", "give more, such as 5GB/s")
    return float(rate)


def numbers_of(text: str, option: str) -> list[int]:
    """Parse a list of whole numbers above 0: "1,10,100".

    Raises:
        BadOptionError: one of them is no such number.
    """
    parts = parts_of(text, option)
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise BadOptionError(
            f"{option} {text!r} contains something that is not a number", "write it as 1,10,100"
        )
    return [int(part) for part in parts]


def duration_of(text: str, option: str) -> float:
    """Parse a duration, "10m", into seconds.

    Raises:
        BadOptionError: the text is no duration.
    """
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", "write it as 10m, for example") from error


def share_of(text: str, option: str, *, most: float = 1.0) -> float:
    """Parse a share: "20%", "0.2" or "1/5".

    Raises:
        BadOptionError: the text is no share, or not between 0 and `most`.
    """
    above, has_below, below = text.strip().partition("/")
    try:
        share = float(above.removesuffix("%")) / (100 if above.endswith("%") else 1)
        share = share / float(below) if has_below else share
    except (ValueError, ZeroDivisionError) as error:
        raise BadOptionError(
            f"{option} {text!r} is not a share", "write it as 20%, 0.2 or 1/5"
        ) from error
    if not 0 <= share <= most:
        raise BadOptionError(
            f"{option} {text!r} is out of range", f"give a share from 0 to {most:.0%}"
        )
    return share


def turns_of(text: str, option: str, num_turns: int) -> int:
    """Parse a number of turns, or a share of all turns: "10000", "20%".

    Raises:
        BadOptionError: the text is neither, or no turn would be left.
    """
    text = text.strip()
    number = int(text) if text.isdecimal() else int(share_of(text, option) * num_turns)
    if number >= num_turns:
        raise BadOptionError(
            f"{option} {text} leaves none of the {num_turns} turns to be measured",
            "give a smaller share",
        )
    return number


def ttl_of(text: str, option: str) -> float | None:
    """Parse a TTL: "1h", or "never", which is None.

    Raises:
        BadOptionError: the text is no duration, or 0.
    """
    if text == NEVER:
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", f'or give "{NEVER}"') from error
    if not seconds:
        raise BadOptionError(
            f"{option} {text!r} would keep nothing", f'give a longer duration or "{NEVER}"'
        )
    return seconds


def names_of(text: str, known: Iterable[str], what: str) -> list[str]:
    """Parse a list of names, "lru,predictive", or "all"; `what` is the option's name.

    Raises:
        BadOptionError: one of them is unknown.
    """
    known = list(known)
    if text == "all":
        return known
    found = parts_of(text, f"--{what}")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise BadOptionError(
            f"there is no such {what}: {', '.join(unknown)}",
            f"give one or more of {', '.join(known)}, or all",
        )
    return found
