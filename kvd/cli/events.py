"""The command `kvd events`: prints past events, and follows new ones."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kvd.cli.filters import name_of
from kvd.cli.options import MOST_WANTED, AsJson, RuntimeDir, print_json, print_json_line
from kvd.client.connection import open_client
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import PIPE_WIDTH, console, hanging, plain

_IDS = frozenset(
    {"block", "layout"}
)  # fields with hexadecimal ids, some of which look like numbers


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")
    ] = False,
    session: Annotated[str, typer.Option(help="Only events of this session.")] = "",
    tenant: Annotated[str, typer.Option(help="Only events of this tenant's sessions.")] = "",
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only events with this name."),
    ] = None,
    last: Annotated[
        int, typer.Option("--last", min=0, help="Number of past events, as far as kvd remembers.")
    ] = 20,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show recent events, oldest first; with --follow also new ones.

    With --json and --follow it prints a document a line. kvd remembers some thousands of events
    since its start; its log has all of them.
    """
    request = kvd_pb2.WatchEventsRequest(
        tenant=tenant,
        session_id=session,
        names=name or (),
        num_recent=min(last, MOST_WANTED),
        recent_only=not follow,
    )
    with open_client(runtime_dir) as client:
        found = client.events(request)
        if as_json and not follow:
            print_json({"events": [event_document(event) for event in found]})
        elif not _print(found, as_json=as_json) and not follow:
            typer.echo("no events" + (" that fit" if tenant or session or name else ""))


def _print(events: Iterator[kvd_pb2.Event], *, as_json: bool) -> int:
    """Print events as they arrive; return their number."""
    width, num_events = console().width, 0
    for event in events:
        num_events += 1
        if as_json:
            print_json_line(event_document(event))
        else:
            typer.echo(event_line(event, width))
    return num_events


def event_document(event: kvd_pb2.Event) -> dict[str, Any]:
    """Return an event for programs: counts and sizes are numbers, ids are strings."""
    document = plain(event)
    document["fields"] = {
        name: int(text) if text.isdecimal() and name not in _IDS else text
        for name, text in document["fields"].items()
    }
    return document


def event_line(event: kvd_pb2.Event, width: int = PIPE_WIDTH) -> str:
    """Return an event for people: local time with its zone, name, session, fields; wrapped."""
    at = datetime.fromtimestamp(event.unix_s, UTC).astimezone()
    clock = at.isoformat(sep=" ", timespec="seconds")
    fields = sorted(event.fields.items())
    facts = " ".join(f"{field.removeprefix('num_')}={value}" for field, value in fields)
    what = f"{event.name:<17}  {name_of(event.session) or '-'}  {facts}"
    return hanging(f"{clock}  ", what.rstrip(), width)
