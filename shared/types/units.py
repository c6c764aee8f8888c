"""Bytes and durations: parsing and formatting; rounding up of integers.

Pure. Byte units are binary (1 GB = 1 GiB = 2**30), as memory is sold; durations are seconds.
"""

import re

_BYTE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# "8m27s": each with its unit. No more digits than a double has, so that no result is infinite.
_DURATION_PARTS = re.compile(r"(\d{1,17}(?:\.\d+)?)\s*(ms|[smhd])\s*", re.ASCII)
_NUMBER_UNIT = re.compile(r"^\s*(\d{1,17}(?:\.\d+)?)\s*([a-zA-Z]*)\s*$", re.ASCII)

# From how many seconds on, and two neighbouring units. Rounding must not give "60s" or "24h".
_UNIT_PAIRS = ((86370.0, "d", 3600, "h", 24), (3599.5, "h", 60, "m", 60), (0.0, "m", 1, "s", 60))

NS_PER_S = 1_000_000_000
MIB = 1 << 20
GIB = 1 << 30
SECTOR_BYTES = 4096  # page size, and the alignment that direct I/O requires


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """Round up to the next multiple of `alignment`."""
    return ceil_div(value, alignment) * alignment


def parse_bytes(text: str) -> int:
    """Parse "512MB", "1.5 GiB", "4096".

    Raises:
        ValueError: the text is not a size; the message lists the accepted forms.
    """
    match = _NUMBER_UNIT.match(text)
    unit = match.group(2).lower() if match else ""
    unit = unit.removesuffix("ib") if unit.endswith("ib") else unit.removesuffix("b") or unit
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a size: write a number with KB, MB, GB or TB")
    return int(float(match.group(1)) * _BYTE_UNITS[unit])


def format_bytes(value: int) -> str:
    """Write a byte count for people: 1536 -> "1.5 KB"."""
    size = float(value)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def parse_duration_s(text: str) -> float:
    """Parse "30s", "10m", "1.5h", "7d", "250ms", "1h30m", "12" (seconds).

    Raises:
        ValueError: the text is not a duration; the message lists the accepted forms.
    """
    parts = _DURATION_PARTS.findall(text.lower())
    if len(parts) > 1 and not _DURATION_PARTS.sub("", text.lower()).strip():
        return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    match = _NUMBER_UNIT.match(text)
    if match is None or match.group(2).lower() not in _DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration: write a number with ms, s, m, h or d")
    return float(match.group(1)) * _DURATION_UNITS[match.group(2).lower()]


def format_duration(seconds: float) -> str:
    """Write a duration for people: 0.0123 -> "12 ms", 2.5 -> "2.5 s", 507 -> "8m27s".

    From one minute on it has the two largest units, without the second one if that is zero.
    parse_duration_s reads all these forms.
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    _, large, size, small, num = next(pair for pair in _UNIT_PAIRS if seconds >= pair[0])
    whole, remainder = divmod(round(seconds / size), num)
    return f"{whole}{large}" + (f"{remainder}{small}" if remainder else "")
