"""Lists of sizes, shares and policies on a command line, and the capacities they make. Pure."""

from collections.abc import Sequence
from itertools import product

from kvd.plan.decimal_sizes import parse_size
from kvd.plan.figures import Capacity
from shared.types.errors import InvalidInputError
from shared.types.units import parse_duration_s

DEFAULT_SHARES = "1%,2%,5%,10%,20%,40%"  # of the footprint, if no size is given
NEVER = "never"


class BadOptionError(InvalidInputError):
    """A value of an option that is none, or options that do not go together."""

    reason = "bad_option"


def parts_of(text: str, option: str) -> list[str]:
    """Split "a,b".

    Raises:
        BadOptionError: there is nothing in it.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise BadOptionError(f"{option} {text!r} is empty", "write a list as a,b,c")
    return list(dict.fromkeys(found))


def sizes_of(text: str, option: str) -> list[int]:
    """Read "128GB,256GB".

    Raises:
        BadOptionError: one of them is no size.
    """
    return [size_of(part, option) for part in parts_of(text, option)]


def size_of(text: str, option: str) -> int:
    """Read "128GB", which is decimal here.

    Raises:
        BadOptionError: it is no size.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", "for example 128GB") from error


def rate_of(text: str, option: str) -> float:
    """Read bytes a second: "5GB/s", "5GB".

    Raises:
        BadOptionError: it is no rate, or 0.
    """
    try:
        rate = parse_size(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", "for example 5GB/s") from error
    if not rate:
        raise BadOptionError(f"{option} {text!r} is nothing", "for example 5GB/s")
    return float(rate)


def share_of(text: str, option: str, *, most: float = 1.0) -> float:
    """Read "20%", "0.2" or "1/5".

    Raises:
        BadOptionError: it is no share, or not between 0 and `most`.
    """
    above, has_below, below = text.strip().partition("/")
    try:
        share = float(above.removesuffix("%")) / (100 if above.endswith("%") else 1)
        share = share / float(below) if has_below else share
    except (ValueError, ZeroDivisionError) as error:
        raise BadOptionError(f"{option} {text!r} is no share", "write 20%, 0.2 or 1/5") from error
    if not 0 <= share <= most:
        raise BadOptionError(f"{option} {text!r} is no share", f"give one of 0 to {most:.0%}")
    return share


def turns_of(text: str, option: str, num_turns: int) -> int:
    """Read a number of turns, or a share of all: "10000", "20%".

    Raises:
        BadOptionError: it is neither, or none is left.
    """
    text = text.strip()
    number = int(text) if text.isdecimal() else int(share_of(text, option) * num_turns)
    if number >= num_turns:
        raise BadOptionError(
            f"{option} {text} leaves none of {num_turns} turns to be measured", "give fewer"
        )
    return number


def ttl_of(text: str, option: str) -> float | None:
    """Read "1h" or "never", which is None.

    Raises:
        BadOptionError: it is no duration, or none at all.
    """
    if text == NEVER:
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise BadOptionError(f"{option}: {error}", f'or say "{NEVER}"') from error
    if not seconds:
        raise BadOptionError(f"{option} {text!r} keeps nothing", f'give a duration or "{NEVER}"')
    return seconds


def policies_of(text: str, known: Sequence[str]) -> list[str]:
    """Read "lru,predictive", or "all".

    Raises:
        BadOptionError: one of them is unknown.
    """
    if text == "all":
        return list(known)
    found = parts_of(text, "--policy")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise BadOptionError(
            f"no such policy: {', '.join(unknown)}", f"name some of {', '.join(known)}, or all"
        )
    return found


def swept_capacities(hbm: str, dram: str, ssd: str) -> list[Capacity]:
    """Every HBM with every DRAM with every SSD; a tier that is not given is not there.

    Raises:
        BadOptionError: one of them is no size.
    """
    hbms = sizes_of(hbm, "--hbm")
    drams = sizes_of(dram, "--dram") if dram else [0]
    ssds = sizes_of(ssd, "--ssd") if ssd else [0]
    return [Capacity(*sizes) for sizes in product(hbms, drams, ssds)]


def shared_capacities(
    hbm: str, shares: str, dram_share: str, footprint_bytes: int
) -> list[Capacity]:
    """Every HBM with these shares of the footprint, of which DRAM has a share and SSD the rest.

    Raises:
        BadOptionError: one of them is no share.
    """
    of_dram = share_of(dram_share, "--dram-share")
    found = []
    for hbm_bytes in sizes_of(hbm, "--hbm"):
        for part in parts_of(shares, "--capacity-share"):
            total = round(share_of(part, "--capacity-share", most=10.0) * footprint_bytes)
            dram_bytes = round(total * of_dram)
            found.append(Capacity(hbm_bytes, dram_bytes, total - dram_bytes))
    return found
