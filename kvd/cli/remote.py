"""The commands `kvd remote`: ls, rm and sweep work on the store alone; follow and status."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvd.cli.filters import DEFAULT_TENANT, check_chosen, parse_option
from kvd.cli.moving import open_named_store
from kvd.cli.options import AsJson, Model, RuntimeDir, Yes, confirm, print_json
from kvd.client.connection import open_client
from kvd.errors import UnclearSelectionError
from kvd.following.status import FollowerStatus, read_status
from kvd.remote.catalog import Catalog, Listed
from kvd.remote.errors import DamagedRemoteError
from kvd.remote.manifest import Owner
from kvd.remote.sweeping import Sweeper
from kvd.views.remote_views import pushed_row, pushed_table
from shared.blobs.blob_store import BlobStore
from shared.config.lazy_commands import WholeHelp
from shared.process.runtime_dir import default_runtime_dir
from shared.terminal import printing
from shared.terminal.printing import counted
from shared.types.units import format_bytes, format_duration, parse_duration_s

EXIT_PROBLEM = 1
_STORE = {None: "was not asked yet", True: "answers", False: "FAILS"}

remote_app = typer.Typer(
    cls=WholeHelp,
    help="List, remove and sweep sessions in an object store; move sessions automatically.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Url = Annotated[
    str, typer.Argument(metavar="[URL]", help="Store. Default: remote.url of the running kvd.")
]
OfTenant = Annotated[str, typer.Option("--tenant", help="Only this tenant.")]


@remote_app.command("ls")
def remote_ls(
    url: Url = "", tenant: OfTenant = "", runtime_dir: RuntimeDir = None, as_json: AsJson = False
) -> None:
    """List the sessions in an object store."""
    _, store = _open(url, runtime_dir)
    listed, now_s = Catalog(store).sessions(tenant), time.time()
    rows = [
        pushed_row(pushed.manifest, now_s - pushed.version.stored_unix_s)
        for pushed in listed.sessions
    ]
    _warn_of_damaged(len(listed.damaged), "their sessions are not listed")
    if as_json:
        print_json(
            {
                "sessions": [asdict(row) for row in rows],
                "damaged": [pushed.place for pushed in listed.damaged],
            }
        )
    elif not rows:
        typer.echo("no sessions: push some with kvd push")
    else:
        console = printing.console()
        console.print(pushed_table(rows, console.width))


@remote_app.command("rm")
def remote_rm(
    url: Url = "",
    session: Annotated[
        list[str] | None, typer.Option("--session", help="Session id; may be repeated.")
    ] = None,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the sessions, or all of this tenant's.")
    ] = "",
    model: Model = "",
    everything: Annotated[bool, typer.Option("--all", help="Every session.")] = False,
    yes: Yes = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove sessions from an object store; sweeps remove their data after a day or more."""
    named = session or []
    check_chosen("remove", named, tenant, everything=everything)
    if model and not named:
        raise UnclearSelectionError(
            "--model has no effect without --session", "name sessions, or leave it out"
        )
    where, store = _open(url, runtime_dir)
    catalog = Catalog(store)
    listed = _named(catalog, tenant, named, model) if named else catalog.sessions(tenant)
    num_sessions = len(listed.sessions) + len(listed.damaged)
    if num_sessions and not yes:
        confirm(f"Remove {counted(num_sessions, 'session')} from {where}?")
    for pushed in listed.sessions:
        catalog.drop(pushed)
    for pushed in listed.damaged:  # without its names there can be no tombstone
        catalog.forget(pushed)
    if as_json:
        print_json({"num_sessions": num_sessions})
    else:
        typer.echo(f"removed {counted(num_sessions, 'session')} from {where}")


@remote_app.command("sweep")
def remote_sweep(
    url: Url = "",
    unnamed: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Of conversations that no client of the inference services has named: how long "
            "after the last turn their transcripts go.",
        ),
    ] = "30d",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Drop expired sessions, and remove data that no session has used for a day.

    Run it once a day. Data is condemned by one sweep and removed by one at least a day later: what
    a push has just found there stays.
    """
    unnamed_s = parse_option("--unnamed", unnamed, parse_duration_s, '"30d"')
    where, store = _open(url, runtime_dir)
    owner = Owner("", f"{os.uname().nodename}:{os.getpid()}")
    result = Sweeper(store, owner, unnamed_s=unnamed_s).sweep()
    if as_json:
        print_json({"url": where, **asdict(result)})
        return
    typer.echo(
        f"kept {printing.counted(result.num_sessions, 'session')}, dropped {result.num_expired} "
        f"expired; removed {printing.counted(result.num_removed, 'object')} "
        f"({format_bytes(result.removed_bytes)}), condemned {result.num_condemned}"
    )
    if result.num_unnamed:
        unnamed_ones = printing.counted(result.num_unnamed, "conversation")
        typer.echo(f"removed the transcripts of {unnamed_ones} without a name")
    _warn_of_damaged(result.num_damaged, "their tenants' data stays")


@remote_app.command("follow")
def remote_follow(
    runtime_dir: RuntimeDir = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option(help="auto (text on a terminal), json or text.")
    ] = "auto",
) -> None:
    """Move the sessions of a running kvd automatically, as its [remote] settings say.

    It pushes those that were stored, or are near eviction, drops from the store what is flushed or
    ended here, and fetches what turns wait for and kvd does not have; until SIGTERM, when it pushes
    what is left.
    kvd never waits for it, nor for the store. A reload of kvd's settings is followed.
    """
    from kvd.following.process import follow

    follow(runtime_dir, log_level, log_format)


@remote_app.command("status")
def remote_status(runtime_dir: RuntimeDir = None, as_json: AsJson = False) -> None:
    """Show what kvd remote follow does on this machine: pending work and failures.

    The follower updates this every few seconds. Exit 1 while its store fails, or kvd does not
    answer it; 69 if none runs.
    """
    now_s = time.time()
    status = read_status(runtime_dir or default_runtime_dir(), now_s)
    if as_json:
        print_json({"well": status.is_well, **asdict(status)})
    else:
        printing.console().print(status_table(status, now_s))
    if not status.is_well:
        raise typer.Exit(EXIT_PROBLEM)


def status_table(status: FollowerStatus, now_unix_s: float) -> Table:
    """Return the table that shows a follower's status: a label and a text per line."""
    table = Table.grid(padding=(0, 2))
    for word, text in _lines(status, now_unix_s):
        table.add_row(word, Text(text))
    return table


def _lines(status: FollowerStatus, now_unix_s: float) -> Iterator[tuple[str, str]]:
    def ago(unix_s: float) -> str:
        return format_duration(max(0.0, now_unix_s - unix_s))

    age, updated = ago(status.started_unix_s), ago(status.unix_s)
    yield "follower", f"pid {status.pid}, runs for {age}; it said this {updated} ago"
    yield "kvd", "is followed" if status.kvd_up else "DOES NOT ANSWER"
    is_off = "none: remote.url is not set"
    yield "store", f"{status.url} {_STORE[status.store_up]}" if status.url else is_off
    oldest = f", the oldest for {format_duration(status.oldest_s)}" if status.oldest_s else ""
    yield (
        "to push",
        f'{counted(status.num_unpushed, "session")}{oldest} (write: "{status.write}")',
    )
    if status.num_evicted:
        yield (
            "too late",
            f"{counted(status.num_evicted, 'session')} evicted before they were pushed",
        )
    yield "to drop", counted(status.num_drops, "session")
    fetched = f"{counted(status.num_wanted, 'session')}, {status.num_pulling} under way"
    yield "to fetch", f"{fetched} (pull: {'on' if status.pull else 'off'})"
    yield "pushes", _counts(status.pushes)
    yield "pulls", _counts(status.pulls)
    yield "drops", _counts(status.drops)
    yield "bytes", ", ".join(f"{format_bytes(n)} {way}" for way, n in status.num_bytes.items())
    yield "requests", _counts(status.requests)
    for failure in reversed(status.failures):
        yield "failure", f"{ago(failure.unix_s)} ago, {failure.event}: {failure.why}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {word}" for word, count in counts.items()) or "none"


def _named(catalog: Catalog, tenant: str, named: Sequence[str], model: str) -> Listed:
    """Return the sessions of some ids, and those of them whose manifests are damaged.

    Raises:
        DamagedRemoteError: a model is given, and a manifest is damaged, which may be another's.
    """
    listed = Listed([], [])
    for session in named:
        try:
            listed.sessions.append(catalog.find(tenant or DEFAULT_TENANT, session, model))
        except DamagedRemoteError:
            if model:
                raise
            listed.damaged.extend(catalog.sessions_of(tenant or DEFAULT_TENANT, session).damaged)
    return listed


def _warn_of_damaged(num_manifests: int, what: str) -> None:
    """Warn on stderr of manifests that cannot be read."""
    if num_manifests:
        typer.echo(
            f"kvd: {counted(num_manifests, 'manifest')} cannot be read, {what}: "
            "push these sessions again with --take (kvd push names them), or remove them",
            err=True,
        )


def _open(url: str, runtime_dir: RuntimeDir) -> tuple[str, BlobStore]:
    if url:
        return open_named_store(url, None, "URL")
    with open_client(runtime_dir) as client:
        return open_named_store("", client, "URL")
