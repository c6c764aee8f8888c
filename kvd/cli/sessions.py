"""Commands about sessions: ls, show, why, flush, pin, unpin, ttl."""

from functools import partial
from typing import Annotated

import typer

from kvd.cli.filters import (
    DEFAULT_TENANT,
    ORDERS,
    Ended,
    Idle,
    InTier,
    LargerThan,
    Named,
    OfTenant,
    Pinned,
    Reverse,
    Sort,
    SortName,
    filter_of,
    name_of,
)
from kvd.cli.options import (
    MOST_WANTED,
    AsJson,
    Model,
    OfModel,
    RuntimeDir,
    SessionId,
    Tenant,
    Yes,
    confirm,
    key_of,
    print_json,
    require_terminal,
    warn_of_unavailable,
)
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.errors import InUseError, UnclearSelectionError
from kvd.views import views
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal import printing
from shared.types.units import format_bytes, parse_duration_s


def list_sessions(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only sessions whose id starts with this.")
    ] = "",
    tenant: OfTenant = None,
    model: OfModel = None,
    tier: InTier = None,
    idle: Idle = None,
    larger_than: LargerThan = None,
    pinned: Pinned = False,
    ended: Ended = False,
    sort: Sort = SortName.IDLE,
    reverse: Reverse = False,
    limit: Annotated[int, typer.Option(min=0, help="Most sessions to list; 0: all.")] = 0,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """List stored sessions.

    Sessions have to meet all conditions. A narrow terminal shows fewer columns; --json has all.
    """
    filter_ = filter_of(tenant, model, tier, idle, larger_than, pinned=pinned, ended=ended)
    filter_.id_prefix = prefix
    with open_client(runtime_dir) as client:
        listed = client.sessions(filter_, min(limit, MOST_WANTED), ORDERS[sort], reverse=reverse)
    sessions, total = listed.sessions, listed.total
    warn_of_unavailable(listed.num_unavailable, "listed")
    if as_json:
        print_json({"sessions": [printing.plain(info) for info in sessions], "total": total})
        return
    if not sessions:
        typer.echo("no session is stored" + (" that fits" if filter_.ByteSize() else ""))
        return
    console = printing.console()
    console.print(views.sessions_table(sessions, console.width))
    if len(sessions) < total:
        console.print(f"{len(sessions)} of {total} sessions")


def show(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show one session: properties, leases, blocks and recent history."""
    with open_client(runtime_dir) as client:
        _, found = Named(session, tenant, model).call(client, client.describe)
    if as_json:
        print_json(printing.plain(found))
        return
    from kvd.views import session_views

    console = printing.console()
    for table in session_views.session_tables(found, console.width):
        console.print(table)


def why(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Explain why KV of a session was missed, and what would keep it.

    Works for sessions that are no longer stored, as long as kvd remembers them. What its client
    sent in other words is shown by `inference-svc why`.
    """
    from kvd.views.misses import explain_miss

    with open_client(runtime_dir) as client:
        describe = partial(client.describe, may_be_gone=True)
        key, found = Named(session, tenant, model).call(client, describe)
    explanation = explain_miss(found)
    if as_json:
        print_json({"session": printing.plain(key), **explanation.as_document()})
        return
    width = printing.console().width
    for label, text in explanation.lines():
        typer.echo(printing.hanging(label, text, width, 10))


def flush(
    session: Annotated[
        str | None,
        typer.Argument(metavar="SESSION", help="Session id, or a unique beginning of one."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the session, or all of this tenant's.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model fingerprint; without a session, all that start with this."),
    ] = None,
    tier: InTier = None,
    idle: Idle = None,
    larger_than: LargerThan = None,
    pinned: Pinned = False,
    ended: Ended = False,
    everything: Annotated[bool, typer.Option("--all", help="Every session.")] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Crypto-erase: also delete the key. For --all or one --tenant."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what would be freed.")
    ] = False,
    yes: Yes = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Drop the KV of one session, of matching ones, or of all, from every tier.

    Transcripts are not touched: the next turn of a flushed session is recomputed. A session that an
    engine works with just now is left out, and named. A terminal is asked first if more than one
    may go, or if SESSION is only the beginning of an id.
    """
    filter_ = filter_of(tenant, model, tier, idle, larger_than, pinned=pinned, ended=ended)
    request = flush_request(session, filter_, everything=everything, secure=secure)
    key = kvd_pb2.SessionKey()
    with open_client(runtime_dir) as client:
        if session is None and not (dry_run or yes):
            _confirm_flush(client, request)
        request.dry_run = dry_run
        if session is None:
            answer = client.flush(request)
        else:
            named = Named(session, filter_.tenant, filter_.model)
            key, answer = _flush_one(client, named, request, asks=not (dry_run or yes))
    warn_of_unavailable(answer.unavailable_layouts, "flushed")
    if as_json:
        print_json(printing.plain(answer))
    else:
        subject = f"session {name_of(key)}" if session is not None else ""
        _print_flushed(answer, subject, dry_run=dry_run)
        if secure and not answer.erased_tenants:  # perhaps the tenant's name was mistyped
            typer.echo("no such tenant has a key, so there is nothing to erase")
    if session is not None and answer.skipped_leased:
        raise InUseError(f"session {name_of(key)!r} is in use", "try again when its turn has ended")


def flush_request(
    session: str | None, filter_: kvd_pb2.SessionFilter, *, everything: bool, secure: bool
) -> kvd_pb2.FlushRequest:
    """Return the flush request for a command line.

    Raises:
        UnclearSelectionError: it names no sessions, or names them in two ways.
    """
    named = kvd_pb2.SessionFilter(tenant=filter_.tenant, model=filter_.model)
    if session is not None:
        if everything or filter_ != named:
            raise UnclearSelectionError(
                "it is not clear what to flush", "name a session, give conditions, or add --all"
            )
        if secure:
            raise UnclearSelectionError(
                "--secure deletes the key of a whole tenant, so it cannot flush a single session",
                "use --secure with --tenant or --all",
            )
        key = key_of(session, filter_.tenant, filter_.model)
        return kvd_pb2.FlushRequest(session=key)
    if everything == bool(filter_.ByteSize()):
        raise UnclearSelectionError(
            "it is not clear what to flush", "name a session, give conditions, or add --all"
        )
    if secure and filter_ != kvd_pb2.SessionFilter(tenant=filter_.tenant):
        raise UnclearSelectionError(
            "--secure deletes the key of a whole tenant, so it takes no other conditions",
            "use --secure with --tenant alone, or with --all",
        )
    if everything:
        return kvd_pb2.FlushRequest(all=True, secure=secure)
    return kvd_pb2.FlushRequest(filter=filter_, secure=secure)


def _flush_one(
    client: OperatorClient, named: Named, request: kvd_pb2.FlushRequest, *, asks: bool
) -> tuple[kvd_pb2.SessionKey, kvd_pb2.FlushResponse]:
    """Flush the named session; ask first if only the beginning of its id was given.

    If the session that the user means is gone, the beginning may match another one.
    """

    def flush_key(key: kvd_pb2.SessionKey) -> kvd_pb2.FlushResponse:
        request.session.CopyFrom(key)
        return client.flush(request)

    def approve(key: kvd_pb2.SessionKey) -> None:
        if asks:
            confirm(f"Drop the KV of session {name_of(key)}?")

    return named.call(client, flush_key, approve)


def _confirm_flush(client: OperatorClient, request: kvd_pb2.FlushRequest) -> None:
    """Ask whether the sessions of the request may be dropped, unless there are none."""
    require_terminal()
    dry = kvd_pb2.FlushRequest()
    dry.CopyFrom(request)
    dry.dry_run = True
    found = client.flush(dry)
    keys = ", ".join(found.erased_tenants) or "nobody"
    how = f", and delete for good the keys of {keys}" if request.secure else ""
    size = format_bytes(found.bytes)
    if found.sessions or request.secure:
        confirm(f"Drop the KV of {printing.counted(found.sessions, 'session')} ({size}){how}?")


def _print_flushed(answer: kvd_pb2.FlushResponse, subject: str, *, dry_run: bool) -> None:
    verb = "would free" if dry_run else "freed"
    of_many = printing.counted(answer.sessions, "session")
    subject = subject if subject and answer.sessions else of_many
    typer.echo(f"{verb} {format_bytes(answer.bytes)} of {subject}")
    if answer.erased_tenants:
        typer.echo(f"keys deleted: {', '.join(answer.erased_tenants)}")
    for skipped in answer.skipped_leased:
        typer.echo(f"in use, not flushed: {name_of(skipped)}")


def pin(
    session: SessionId,
    soft: Annotated[
        bool, typer.Option("--soft", help="Let it be evicted when nothing else is left.")
    ] = False,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Protect a session from eviction and expiry."""
    with open_client(runtime_dir) as client:
        named = Named(session, tenant, model)
        key, _ = named.call(client, partial(client.pin, soft=soft))
    _print_state(key, "soft-pinned" if soft else "pinned", as_json=as_json)


def unpin(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove a session's pin."""
    with open_client(runtime_dir) as client:
        key, _ = Named(session, tenant, model).call(client, client.unpin)
    _print_state(key, "unpinned", as_json=as_json)


def ttl(
    session: SessionId,
    duration: Annotated[str, typer.Argument(help='"2h", "7d", "never" or "default".')],
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Set how long a session is kept after its last use."""
    ttl_s = _ttl_s(duration)
    with open_client(runtime_dir) as client:
        named = Named(session, tenant, model)
        key, expires_in_s = named.call(client, lambda key: client.set_ttl(key, ttl_s))
    if as_json:
        print_json({**_key_document(key), "expires_in_s": expires_in_s})
    else:
        typer.echo(f"{name_of(key)} expires in: {views.expiry(expires_in_s)}")


def _ttl_s(duration: str) -> float:
    """Return the TTL in seconds for SetTtlRequest: 0 for the default, negative for never."""
    words = {"default": 0.0, "never": -1.0}
    if duration in words:
        return words[duration]
    try:
        seconds = parse_duration_s(duration)
    except ValueError as error:
        raise UnclearSelectionError(str(error), 'or give "never" or "default"') from error
    if not seconds:
        raise UnclearSelectionError(
            "a TTL must be longer than 0", "to drop the session now, run: kvd flush"
        )
    return seconds


def _print_state(key: kvd_pb2.SessionKey, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**_key_document(key), "state": what})
    else:
        typer.echo(f"{name_of(key)}: {what}")


def _key_document(key: kvd_pb2.SessionKey) -> dict[str, str]:
    return {"session_id": key.session_id, "tenant": key.tenant or DEFAULT_TENANT}
