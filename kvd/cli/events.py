"""kvd events: what happened lately, and what happens."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from kvd.cli.connection import open_client
from kvd.cli.naming import name_of
from kvd.cli.options import AsJson, RuntimeDir, print_json, print_json_line
from shared.pb.kvd.v1 import kvd_pb2
from shared.printing import plain


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with those that come, until Ctrl-C.")
    ] = False,
    session: Annotated[str, typer.Option(help="Only those about this session.")] = "",
    tenant: Annotated[str, typer.Option(help="Only those about this tenant's sessions.")] = "",
    name: Annotated[
        list[str] | None, typer.Option(help="Only those of this name; may be said again.")
    ] = None,
    last: Annotated[
        int, typer.Option("--last", min=0, help="So many of the past, as far as kvd remembers.")
    ] = 20,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened lately, oldest first; with --follow also what happens.

    With --json and --follow it prints a document a line. kvd remembers some thousands of events
    since its start; its log has all of them.
    """
    request = kvd_pb2.WatchEventsRequest(
        tenant=tenant,
        session_id=session,
        names=name or (),
        num_recent=last,
        recent_only=not follow,
    )
    with open_client(runtime_dir) as client:
        found = client.events(request)
        if as_json and not follow:
            print_json({"events": [plain(event) for event in found]})
        else:
            _print(found, as_json=as_json)


def _print(events: Iterator[kvd_pb2.Event], *, as_json: bool) -> None:
    for event in events:
        if as_json:
            print_json_line(plain(event))
        else:
            typer.echo(event_line(event, time.time()))


def event_line(event: kvd_pb2.Event, now_s: float) -> str:
    """An event for people: local time, with the date if it was not today; name, session, facts."""
    key, at = event.session, time.localtime(event.unix_s)
    is_today = at[:3] == time.localtime(now_s)[:3]
    clock = time.strftime("%H:%M:%S" if is_today else "%m-%d %H:%M:%S", at)
    fields = sorted(event.fields.items())
    facts = " ".join(f"{field.removeprefix('num_')}={value}" for field, value in fields)
    return f"{clock}  {event.name:<17}  {name_of(key) or '-'}  {facts}".rstrip()
