"""Sizes as plans write them: decimal, 1 GB = 10**9 bytes. Pure.

The paper's figures, prices and disks are decimal, and with 10 % more at a terabyte no plan would
reproduce them. Settings of kvd are binary (shared/types/units.py): 128 GB here are "119.2 GB"
there. Binary units have names of their own: KiB, MiB, GiB, TiB.
"""

import re

GB = 10**9
MOST_BYTES = 10**18  # of a size that is meant
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NAMES = ("B", "KB", "MB", "GB", "TB", "PB")


def parse_size(text: str) -> int:
    """Read "128GB", "0.78 MB", "64GiB", "780000".

    Raises:
        ValueError: with the accepted forms in its message.
    """
    match = _SIZE.match(text)
    if match is not None and (match.group(2) or not match.group(3)):
        base = 1024 if match.group(3) else 1000
        size: float = float(match.group(1)) * base ** _EXPONENTS[match.group(2).lower()]
        if size <= MOST_BYTES:
            return round(size)
    raise ValueError(f"{text!r} is not a size: write a number with KB, MB, GB or TB")


def format_size(num_bytes: float) -> str:
    """Write a size for people, in three digits or so: 128e9 -> "128 GB"."""
    size, exponent = float(num_bytes), 0
    while size >= 999.5 and exponent < len(_NAMES) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.3g} {_NAMES[exponent]}"
