"""Commands about sessions: ls, show, flush, pin, unpin, ttl."""

from typing import Annotated

import typer

from kvd import cli_views
from kvd.cli_connection import open_client
from kvd.cli_options import (
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
)
from kvd.errors import InUseError, UnclearSelectionError
from shared.units import format_bytes, parse_duration_s


def list_sessions(
    runtime_dir: RuntimeDir = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    model: OfModel = "",
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 is all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List stored sessions, least recently used first."""
    with open_client(runtime_dir) as client:
        sessions, total = client.sessions(tenant, model, limit)
    if as_json:
        print_json({"sessions": [cli_views.plain(info) for info in sessions], "total": total})
    else:
        cli_views.console().print(cli_views.sessions_table(sessions, total))


def show(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show one session and its blocks."""
    with open_client(runtime_dir) as client:
        found = client.describe(key_of(session, tenant, model))
    if as_json:
        print_json(cli_views.plain(found))
        return
    console = cli_views.console()
    console.print(cli_views.session_table(found.info))
    console.print(cli_views.blocks_table(found.blocks))


def flush(
    session: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="Session id.")] = None,
    tenant: Tenant = "",
    model: Model = "",
    everything: Annotated[bool, typer.Option("--all", help="Every session.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would free.")
    ] = False,
    yes: Yes = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Drop the KV of one session, or of all, from every tier. Transcripts are not touched."""
    if everything == (session is not None):
        raise UnclearSelectionError("what to flush is not clear", "name one session, or say --all")
    if everything and not (dry_run or yes):
        confirm("Drop the KV of every session?")
    key = None if session is None else key_of(session, tenant, model)
    with open_client(runtime_dir) as client:
        answer = client.flush(key, dry_run=dry_run)
    if as_json:
        print_json(cli_views.plain(answer))
    else:
        verb = "would free" if dry_run else "freed"
        typer.echo(f"{verb} {format_bytes(answer.bytes)} of {answer.sessions} sessions")
        for skipped in answer.skipped_leased:
            typer.echo(f"in use, not flushed: {skipped.session_id}")
    if session is not None and answer.skipped_leased:
        raise InUseError(f"session {session!r} is in use", "try again when its turn has ended")


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
        client.pin(key_of(session, tenant, model), soft=soft)
    _say_done(session, "soft-pinned" if soft else "pinned", as_json=as_json)


def unpin(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Take the protection away."""
    with open_client(runtime_dir) as client:
        client.unpin(key_of(session, tenant, model))
    _say_done(session, "unpinned", as_json=as_json)


def ttl(
    session: SessionId,
    duration: Annotated[str, typer.Argument(help='"2h", "7d", …, "never" or "default".')],
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Set how long a session is kept after its last use."""
    ttl_s = _ttl_s(duration)
    with open_client(runtime_dir) as client:
        expires_in_s = client.set_ttl(key_of(session, tenant, model), ttl_s)
    if as_json:
        print_json({"session_id": session, "expires_in_s": expires_in_s})
    else:
        typer.echo(f"{session} expires in: {cli_views.expiry(expires_in_s)}")


def _ttl_s(duration: str) -> float:
    """SetTtlRequest's value: 0 for the default, negative for never."""
    words = {"default": 0.0, "never": -1.0}
    if duration in words:
        return words[duration]
    try:
        seconds = parse_duration_s(duration)
    except ValueError as error:
        raise UnclearSelectionError(str(error), 'or say "never" or "default"') from error
    if not seconds:
        raise UnclearSelectionError("a TTL of nothing", "flush the session instead")
    return seconds


def _say_done(session: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"session_id": session, "state": what})
    else:
        typer.echo(f"{session}: {what}")
