"""Commands about the daemon's tiers and engines: stats, leases, verify, reopen.

With `--watch` a command polls: a terminal shows the latest view in place, a pipe gets one view
after the other.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvd.cli.filters import Interval, interval_s
from kvd.cli.options import AsJson, OfModel, RuntimeDir, Yes, confirm, print_json, print_json_line
from kvd.client.connection import local_directory, open_client
from kvd.client.operator_client import OperatorClient
from kvd.errors import (
    CorruptionFoundError,
    NotFollowedError,
    UnclearSelectionError,
    UnverifiedError,
)
from kvd.following.status import FollowerStatus, read_status
from kvd.views import stats_views, views
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal import printing
from shared.terminal.printing import console
from shared.types.units import format_bytes, format_duration


def poll(look: Callable[[], Any], every_s: float) -> Iterator[Any]:
    """Yield the result of `look` every `every_s` seconds, until Ctrl-C."""
    while True:
        yield look()
        time.sleep(every_s)


def show_in_place(views: Iterator[Callable[[int], Sequence[RenderableType]]]) -> None:
    """Show each view in place of the one before, cropped to the terminal.

    Args:
        views: functions that return what to show at a terminal width.
    """
    screen = console()
    if not sys.stdout.isatty():
        for view in views:
            screen.print(f"\n{datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')}")
            screen.print(*view(screen.width), sep="\n")
        return
    with Live(console=screen, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        for view in views:
            live.update(Group(*view(screen.width)), refresh=True)


def stats(
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    interval: Interval = "2s",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show tiers, engines, tenants and counters.

    Of a store that kvd remote follow moves sessions to, also what it bills: bytes and requests.

    With --watch loads and counters are those of the last interval; with --json it prints a document
    a line.
    """
    every_s = interval_s(interval)
    with open_client(runtime_dir) as client:
        if watch:
            _watch(poll(client.stats, every_s), as_json=as_json)
            return
        found = client.stats()
    now_s = time.time()
    follower = _follower(runtime_dir, now_s)
    if as_json:
        remote = {} if follower is None else {"remote": asdict(follower)}
        print_json({**printing.plain(found), **remote})
        return
    console = printing.console()
    for table in stats_views.stats_tables(found, console.width):
        console.print(table)
    if follower is not None:
        console.print(remote_line(follower, now_s))


def _follower(runtime_dir: Path | None, now_unix_s: float) -> FollowerStatus | None:
    """Return the status of this machine's follower; None: there is none."""
    directory = local_directory(runtime_dir)
    with suppress(NotFollowedError):
        return None if directory is None else read_status(directory, now_unix_s)
    return None


def remote_line(follower: FollowerStatus, now_unix_s: float) -> Text:
    """Return the store's traffic that its operator bills: bytes and requests."""
    moved = ", ".join(f"{format_bytes(n)} {way}" for way, n in follower.num_bytes.items())
    kinds = ", ".join(f"{num:,} {kind}" for kind, num in follower.requests.items()) or "none"
    age = format_duration(max(0.0, now_unix_s - follower.started_unix_s))
    return Text(
        f"\nremote store, since its follower began {age} ago\n"
        f"{moved}; {sum(follower.requests.values()):,} requests: {kinds}"
    )


def _watch(polls: Iterator[kvd_pb2.GetStatsResponse], *, as_json: bool) -> None:
    if as_json:
        for found in polls:
            print_json_line(printing.plain(found))
        return
    show_in_place(_views(polls))


def _views(
    polls: Iterator[kvd_pb2.GetStatsResponse],
) -> Iterator[Callable[[int], list[RenderableType]]]:
    """Yield the view of each poll, with the changes since the one before."""
    before: kvd_pb2.GetStatsResponse | None = None
    for found in polls:
        yield partial(_tables, found, before)
        before = found


def _tables(
    found: kvd_pb2.GetStatsResponse, before: kvd_pb2.GetStatsResponse | None, width: int
) -> list[RenderableType]:
    return list(stats_views.stats_tables(found, width, before))


def leases(
    kill: Annotated[
        int | None,
        typer.Option("--kill", metavar="PID", min=1, help="Kill this process (SIGKILL)."),
    ] = None,
    yes: Yes = False,
    model: OfModel = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """List leases, oldest first; or kill a process that holds some.

    The engine of a quarantined lease has lost its connection but still runs and may still write, so
    the lease's slots are not reused until it returns or ends.
    """
    with open_client(runtime_dir) as client:
        if kill is not None:
            _kill(client, kill, yes=yes, as_json=as_json)
            return
        found = client.leases(model or "")
    if as_json:
        print_json({"leases": [printing.plain(lease) for lease in found]})
    elif not found:
        typer.echo("no leases: nobody loads or stores just now")
    else:
        console = printing.console()
        console.print(views.leases_table(found, console.width))


def verify(
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Rewrite corrupt copies on SSD, or drop their blocks."),
    ] = False,
    model: OfModel = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare every stored block with its checksums, at integrity.scrub_rate.

    Exit 1 if corrupt copies were found, or with --repair if some had no good one beside them. What
    is corrupt is never served, with or without this: it becomes a miss when it is read.
    """
    shows_progress = sys.stderr.isatty() and not as_json
    last = kvd_pb2.VerifyProgress()
    with open_client(runtime_dir) as client:
        for last in client.verify(repair=repair, model=model or ""):
            if shows_progress:
                sys.stderr.write(f"\r\x1b[K{views.verify_line(last)}")
                sys.stderr.flush()
    if shows_progress:
        sys.stderr.write("\r\x1b[K")
    if as_json:
        print_json(printing.plain(last))
    else:
        printing.console().print(views.verify_table(last))
    check_report(last, repair=repair)


def reopen(
    layout: Annotated[str, typer.Argument(help="Beginning of its fingerprint (kvd stats).")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Give up missing blocks.")
    ] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Keep its rows and files, and start empty.")
    ] = False,
    yes: Yes = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Open an unavailable layout, or decide what to do with it.

    Without a decision it is tried at once; otherwise kvd does that by itself, with growing pauses.
    --accept-loss drops the blocks whose segments are missing or cut short, and serves the rest.
    --set-aside gives directory and index rows the name LAYOUT.set-aside-1: nothing of them is used
    or overwritten, and the next engine begins with nothing.
    """
    if accept_loss and set_aside:
        raise UnclearSelectionError(
            "--accept-loss and --set-aside cannot be used together", "give one of them"
        )
    if not yes and (accept_loss or set_aside):
        what = "Drop what is not there of" if accept_loss else "Set aside"
        confirm(f"{what} layout {layout}?")
    request = kvd_pb2.ReopenLayoutRequest(
        layout=layout, accept_loss=accept_loss, set_aside=set_aside
    )
    with open_client(runtime_dir) as client:
        name = client.reopen(request)
    if as_json:
        print_json({"layout": name})
    else:
        typer.echo(f"set aside as {name}" if set_aside else f"layout {name} is open")


def check_report(report: kvd_pb2.VerifyProgress, *, repair: bool) -> None:
    """Raise the error for what verify found; with `repair`, replaced copies are no error.

    Raises:
        CorruptionFoundError: copies were corrupt, or with `repair` had no good copy.
        UnverifiedError: copies could not be read.
    """
    num_corrupt = report.dram.num_corrupt + report.ssd.num_corrupt
    if repair and report.num_lost:
        raise CorruptionFoundError(
            f"{report.num_lost} blocks had no good copy and were dropped",
            "their sessions are recomputed from there on; the logs of the disk and the "
            "kernel may say why",
        )
    if num_corrupt and not repair:
        remedy = "run: kvd verify --repair" if report.ssd.num_corrupt else "they were dropped"
        raise CorruptionFoundError(f"{num_corrupt} copies of blocks were corrupt", remedy)
    if report.num_errors:
        raise UnverifiedError(
            f"{report.num_errors} copies could not be read",
            "read the log of kvd, then run kvd verify again",
        )


def _kill(client: OperatorClient, pid: int, *, yes: bool, as_json: bool) -> None:
    if not yes:
        confirm(f"End process {pid} with SIGKILL?")
    answer = client.kill_holder(pid)
    if as_json:
        print_json({"pid": pid, **printing.plain(answer)})
        return
    leases, slots = (
        printing.counted(answer.num_leases, "lease"),
        printing.counted(answer.num_slots, "slot"),
    )
    typer.echo(f"ended {pid}, which held {leases} on {slots}")
    if not answer.gone:
        typer.echo("it has not gone yet: the kernel is still waiting for it")
