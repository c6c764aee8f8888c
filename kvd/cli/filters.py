"""Which sessions a command line is about, in which order, and how often it looks."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from kvd.errors import UnclearSelectionError
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.units import parse_bytes, parse_duration_s

T = TypeVar("T")


class TierName(StrEnum):
    """Where sessions are, on a command line."""

    DRAM = "dram"
    SSD = "ssd"


class SortName(StrEnum):
    """Orders of a listing, on a command line."""

    IDLE = "idle"
    BYTES = "bytes"
    TOKENS = "tokens"
    TTL = "ttl"


OfTenant = Annotated[str, typer.Option("--tenant", help="Only this tenant.")]
InTier = Annotated[
    TierName | None, typer.Option("--tier", help="Only those with something in this tier.")
]
Idle = Annotated[
    str, typer.Option("--idle", metavar="TIME", help='Only those not used for so long: "10m".')
]
LargerThan = Annotated[
    str, typer.Option("--larger-than", metavar="SIZE", help='Only larger ones: "1GB".')
]
Pinned = Annotated[bool, typer.Option("--pinned", help="Only pinned ones, softly or not.")]
Ended = Annotated[
    bool, typer.Option("--ended", help="Only those whose engine said that they will not come back.")
]
Sort = Annotated[
    SortName,
    typer.Option(
        "--sort",
        help="idle: longest unused first; bytes, tokens: most first; ttl: next to expire first.",
    ),
]
Reverse = Annotated[bool, typer.Option("--reverse", help="The other way round.")]
Interval = Annotated[
    str, typer.Option("--interval", metavar="TIME", help="Time between two looks.")
]

ORDERS = {
    SortName.IDLE: kvd_pb2.SESSION_ORDER_IDLE,
    SortName.BYTES: kvd_pb2.SESSION_ORDER_BYTES,
    SortName.TOKENS: kvd_pb2.SESSION_ORDER_TOKENS,
    SortName.TTL: kvd_pb2.SESSION_ORDER_TTL,
}
_TIERS = {
    None: kvd_pb2.TIER_UNSPECIFIED,
    TierName.DRAM: kvd_pb2.TIER_DRAM,
    TierName.SSD: kvd_pb2.TIER_SSD,
}
_LEAST_INTERVAL_S = 0.1


def filter_of(
    tenant: str,
    model: str,
    tier: TierName | None,
    idle: str,
    larger_than: str,
    *,
    pinned: bool,
    ended: bool,
) -> kvd_pb2.SessionFilter:
    """The sessions that a command line is about.

    Raises:
        UnclearSelectionError: a time or size that is none.
    """
    return kvd_pb2.SessionFilter(
        tenant=tenant,
        model=model,
        tier=_TIERS[tier],
        idle_s=_parsed("--idle", idle, parse_duration_s, '"10m"') if idle else 0.0,
        larger_than_bytes=_parsed("--larger-than", larger_than, parse_bytes, '"1GB"')
        if larger_than
        else 0,
        pinned=pinned,
        ended=ended,
    )


def interval_s(text: str) -> float:
    """Seconds between two looks.

    Raises:
        UnclearSelectionError: it is no time, or none to speak of.
    """
    seconds = _parsed("--interval", text, parse_duration_s, '"2s"')
    if seconds < _LEAST_INTERVAL_S:
        raise UnclearSelectionError(
            f"--interval {text} is too short", f"give {_LEAST_INTERVAL_S} s or more"
        )
    return seconds


def _parsed(option: str, text: str, parse: Callable[[str], T], example: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UnclearSelectionError(f"{option}: {error}", f"as in {example}") from error
