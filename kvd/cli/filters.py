"""Which session, or sessions, a command line means, in which order, and how often it looks.

An id of the default tenant (or of the one that is named) is taken as it stands, without a look at
any other. Only if kvd has no such session is it looked for elsewhere: as an id of any tenant, then
as the beginning of one. Several are never guessed between.
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
MOST_LOOKED_AT = 200  # sessions whose ids begin so
MOST_NAMED = 6  # in the message that says which there are


@dataclass(frozen=True)
class Named:
    """What a command line says of a session; what is empty it does not say."""

    session: str
    tenant: str = ""
    model: str = ""

    def call(
        self,
        client: OperatorClient,
        do: Callable[[kvd_pb2.SessionKey], T],
        approve: Callable[[kvd_pb2.SessionKey], None] = lambda _: None,
    ) -> tuple[kvd_pb2.SessionKey, T]:
        """Call for the session that is meant; returns its key, too.

        Args:
            client: calls the kvd that has it.
            do: what asks kvd; it raises if kvd has no such session.
            approve: asked before `do` where the command line has only the beginning of an id.

        Raises:
            NotFoundError: no id begins so.
            AmbiguousSessionError: several do.
        """
        key = key_of(self.session, self.tenant, self.model)
        try:
            return key, do(key)
        except (NotFoundError, StateError) as error:
            if not _names_no_one(error):
                raise
            found = self._found(client)
            if not found:
                raise
        if len(found) > 1:
            raise _several(self.session, found)
        if found[0].session_id != self.session:
            approve(found[0])
        return found[0], do(found[0])

    def _found(self, client: OperatorClient) -> list[kvd_pb2.SessionKey]:
        """Return the sessions of exactly this id; if there are none those whose ids begin so."""
        wanted = kvd_pb2.SessionFilter(tenant=self.tenant, model=self.model, id_prefix=self.session)
        listed = client.sessions(wanted, MOST_LOOKED_AT, reverse=True)
        keys = [info.session for info in listed.sessions]
        return [key for key in keys if key.session_id == self.session] or keys


def name_of(key: kvd_pb2.SessionKey) -> str:
    """Return a session for people: with its tenant, if that is not the default one."""
    is_other = key.tenant and key.tenant != DEFAULT_TENANT
    return f"{key.tenant}/{key.session_id}" if is_other else key.session_id


def _names_no_one(error: NotFoundError | StateError) -> bool:
    return isinstance(error, NotFoundError) or error.reason == AmbiguousSessionError.reason


def _several(said: str, found: Sequence[kvd_pb2.SessionKey]) -> AmbiguousSessionError:
    names = [f"{name_of(key)} (model {key.model[:12]})" for key in found]
    if len({key.model for key in found}) == 1:
        names = [name_of(key) for key in found]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return AmbiguousSessionError(
        f"{said!r} may be any of {', '.join(names[:MOST_NAMED])}{more}",
        "name one by its whole id, with --tenant or --model where ids are the same",
    )


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
    """Return the sessions that a command line is about.

    Raises:
        UnclearSelectionError: a time or size that is none.
    """
    return kvd_pb2.SessionFilter(
        tenant=tenant,
        model=model,
        tier=_TIERS[tier],
        idle_s=parsed("--idle", idle, parse_duration_s, '"10m"') if idle else 0.0,
        larger_than_bytes=parsed("--larger-than", larger_than, parse_bytes, '"1GB"')
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
    seconds = parsed("--interval", text, parse_duration_s, '"2s"')
    if seconds < _LEAST_INTERVAL_S:
        raise UnclearSelectionError(
            f"--interval {text} is too short", f"give {_LEAST_INTERVAL_S} s or more"
        )
    return seconds


def check_chosen(what: str, named: Sequence[str], tenant: str, *, everything: bool) -> None:
    """Check that a command line says whose sessions are meant: some, a tenant's, or all.

    Args:
        what: is done with them.
        named: ids of sessions; a tenant beside them is theirs.
        tenant: whose are meant, or all whose.
        everything: all sessions are.

    Raises:
        UnclearSelectionError: it says that not at all, or in two ways.
    """
    if bool(named) + everything + bool(tenant and not named) != 1:
        raise UnclearSelectionError(
            f"what to {what} is not clear", "name sessions, or a tenant, or say --all"
        )


def parsed(option: str, text: str, parse: Callable[[str], T], example: str) -> T:
    """Read the value of an option.

    Raises:
        UnclearSelectionError: it is none such.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UnclearSelectionError(f"{option}: {error}", f"as in {example}") from error
