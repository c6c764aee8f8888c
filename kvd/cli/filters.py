"""Options that select sessions, their order, and the polling interval.

A session id is first looked up exactly, in the default tenant or the named one. If kvd has no such
session, the id is looked up in all tenants; then as the beginning of an id. If several sessions
match, the command fails and lists them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from kvd.cli.options import key_of
from kvd.client.operator_client import OperatorClient
from kvd.errors import AmbiguousSessionError, UnclearSelectionError
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import NotFoundError, StateError
from shared.types.units import parse_bytes, parse_duration_s

T = TypeVar("T")
DEFAULT_TENANT = "default"
MOST_LOOKED_AT = 200  # sessions whose ids begin with the given text
MOST_NAMED = 6  # sessions listed in the error message


@dataclass(frozen=True)
class Named:
    """The session that a command line names; an empty tenant or model: not given."""

    session: str
    tenant: str = ""
    model: str = ""

    def call(
        self,
        client: OperatorClient,
        do: Callable[[kvd_pb2.SessionKey], T],
        approve: Callable[[kvd_pb2.SessionKey], None] = lambda _: None,
    ) -> tuple[kvd_pb2.SessionKey, T]:
        """Call `do` for the named session.

        Args:
            client: the client of the kvd that has the session.
            do: makes the call; it raises an error if kvd has no such session.
            approve: called before `do` if only the beginning of an id was given.

        Returns:
            The session's whole key, and the result of `do`.

        Raises:
            NotFoundError: no id begins so.
            AmbiguousSessionError: several do.
        """
        key = key_of(self.session, self.tenant, self.model)
        try:
            return key, do(key)
        except (NotFoundError, StateError) as error:
            if not _is_no_match(error):
                raise
            found = self._find(client)
            if not found:
                raise
        if len(found) > 1:
            raise _ambiguous_error(self.session, found)
        if found[0].session_id != self.session:
            approve(found[0])
        return found[0], do(found[0])

    def _find(self, client: OperatorClient) -> list[kvd_pb2.SessionKey]:
        """Return the sessions with exactly this id; if there are none, those whose ids begin so."""
        filter_ = kvd_pb2.SessionFilter(
            tenant=self.tenant, model=self.model, id_prefix=self.session
        )
        listed = client.sessions(filter_, MOST_LOOKED_AT, reverse=True)
        keys = [info.session for info in listed.sessions]
        return [key for key in keys if key.session_id == self.session] or keys


def name_of(key: kvd_pb2.SessionKey) -> str:
    """Return a session's name for people: with its tenant, unless that is the default one."""
    is_other = key.tenant and key.tenant != DEFAULT_TENANT
    return f"{key.tenant}/{key.session_id}" if is_other else key.session_id


def _is_no_match(error: NotFoundError | StateError) -> bool:
    return isinstance(error, NotFoundError) or error.reason == AmbiguousSessionError.reason


def _ambiguous_error(typed: str, found: Sequence[kvd_pb2.SessionKey]) -> AmbiguousSessionError:
    names = [f"{name_of(key)} (model {key.model[:12]})" for key in found]
    if len({key.model for key in found}) == 1:
        names = [name_of(key) for key in found]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return AmbiguousSessionError(
        f"{typed!r} matches several sessions: {', '.join(names[:MOST_NAMED])}{more}",
        "give the whole id, and --tenant or --model if ids are the same",
    )


class TierName(StrEnum):
    """Tiers, as options name them."""

    DRAM = "dram"
    SSD = "ssd"


class SortName(StrEnum):
    """Orders of a listing, as options name them."""

    IDLE = "idle"
    BYTES = "bytes"
    TOKENS = "tokens"
    TTL = "ttl"


OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")]
InTier = Annotated[
    TierName | None, typer.Option("--tier", help="Only sessions with blocks in this tier.")
]
Idle = Annotated[
    str | None,
    typer.Option("--idle", metavar="TIME", help='Only sessions unused for at least: "10m".'),
]
LargerThan = Annotated[
    str | None,
    typer.Option("--larger-than", metavar="SIZE", help='Only sessions larger than: "1GB".'),
]
Pinned = Annotated[bool, typer.Option("--pinned", help="Only pinned sessions, softly or not.")]
Ended = Annotated[bool, typer.Option("--ended", help="Only sessions that have ended.")]
Sort = Annotated[
    SortName,
    typer.Option(
        "--sort",
        help="idle: longest unused first; bytes, tokens: most first; ttl: next to expire first.",
    ),
]
Reverse = Annotated[bool, typer.Option("--reverse", help="Reverse the order.")]
Interval = Annotated[
    str, typer.Option("--interval", metavar="TIME", help="Time between two updates.")
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
_MIN_INTERVAL_S = 0.1
_MAX_INTERVAL_S = 86_400.0
_MOST_BYTES = (1 << 64) - 1  # that a message can hold


def filter_of(
    tenant: str | None,
    model: str | None,
    tier: TierName | None,
    idle: str | None,
    larger_than: str | None,
    *,
    pinned: bool,
    ended: bool,
) -> kvd_pb2.SessionFilter:
    """Return the filter for a command's options; None: not given.

    Raises:
        UnclearSelectionError: a time or size is invalid, or a tenant or model is empty. So a script
            whose variable is empty does not flush the sessions of every tenant.
    """
    for option, text in (("--tenant", tenant), ("--model", model)):
        if text == "":
            raise UnclearSelectionError(f"{option} is empty", "name one, or leave the option out")
    idle_s = num_bytes = 0.0
    if idle is not None:
        idle_s = parse_option("--idle", idle, parse_duration_s, '"10m"')
    if larger_than is not None:
        num_bytes = parse_option("--larger-than", larger_than, parse_bytes, '"1GB"')
    return kvd_pb2.SessionFilter(
        tenant=tenant,
        model=model,
        tier=_TIERS[tier],
        idle_s=idle_s,
        larger_than_bytes=min(int(num_bytes), _MOST_BYTES),
        pinned=pinned,
        ended=ended,
    )


def interval_s(text: str) -> float:
    """Return the polling interval in seconds.

    Raises:
        UnclearSelectionError: it is invalid, too short or too long.
    """
    seconds = parse_option("--interval", text, parse_duration_s, '"2s"')
    if seconds < _MIN_INTERVAL_S:
        raise UnclearSelectionError(
            f"--interval {text} is too short", f"give {_MIN_INTERVAL_S} s or more"
        )
    if seconds > _MAX_INTERVAL_S:
        raise UnclearSelectionError(f"--interval {text} is too long", "give 1d or less")
    return seconds


def check_chosen(what: str, named: Sequence[str], tenant: str, *, everything: bool) -> None:
    """Check that a command line selects sessions in exactly one way.

    Args:
        what: the verb of the command, for the message.
        named: ids of sessions; a tenant beside them is theirs.
        tenant: the tenant of the named sessions, or of all sessions that are meant.
        everything: all sessions are meant.

    Raises:
        UnclearSelectionError: it selects none, or in several ways.
    """
    if bool(named) + everything + bool(tenant and not named) != 1:
        raise UnclearSelectionError(
            f"it is not clear which sessions to {what}", "name sessions, or give --tenant, or --all"
        )


def parse_option(option: str, text: str, parse: Callable[[str], T], example: str) -> T:
    """Parse the value of an option.

    Raises:
        UnclearSelectionError: the value is invalid.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UnclearSelectionError(f"{option}: {error}", f"as in {example}") from error
