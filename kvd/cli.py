"""The kvd command: run the daemon, look at what it holds, change it.

Exit codes: 0 done; 2 bad usage or value; 3 unknown session; 4 in use; 69 kvd is not running;
70 kvd stopped because of a bug; 78 the start was refused.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvd import cli_views, config
from kvd.errors import BrokenError, InUseError, NotConfirmedError, UnclearSelectionError
from kvd.operator_client import connect
from shared.errors import ReportedError
from shared.log import configure_logging
from shared.pb.kvd.v1 import kvd_pb2
from shared.runtime_dir import default_runtime_dir
from shared.units import format_bytes, parse_duration_s
from shared.version import __version__

EXIT_BROKEN = 70  # EX_SOFTWARE
PRIVATE_UMASK = 0o077  # files of the daemon are its own; sockets get their mode explicitly

app = typer.Typer(
    name="kvd",
    help="KV-cache daemon: keeps the keys and values of conversations in DRAM and on SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show or check the settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")

RuntimeDir = Annotated[
    Path | None,
    typer.Option("--runtime-dir", envvar="KVD_RUNTIME_DIR", help="Directory of kvd's sockets."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVD_CONFIG", help="TOML file, see systemd/kvd.toml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Session id, as kvd ls shows.")]
Tenant = Annotated[str, typer.Option(help='Tenant of the session; empty is "default".')]
Model = Annotated[str, typer.Option(help="Model fingerprint, if several have this session.")]


@app.command()
def serve(
    config_file: Config = None,
    runtime_dir: RuntimeDir = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of index and volumes.")] = None,
    dram: Annotated[str | None, typer.Option(help='DRAM tier, e.g. "8GB" or "auto".')] = None,
    ssd: Annotated[str | None, typer.Option(help='SSD tier, e.g. "100GB", "auto", "0".')] = None,
    tcp: Annotated[str | None, typer.Option(help="Also serve Reader on this local port.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or text.")] = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    flags: dict[str, object] = {
        "runtime_dir": runtime_dir,
        "state_dir": state_dir,
        "dram.bytes": dram,
        "ssd.bytes": ssd,
        "access.tcp": tcp,
        "log.level": log_level,
        "log.format": log_format,
    }
    # Only the daemon needs these; ls and its like start in half the time without.
    import uvloop

    settings = config.load(config_file, flags).settings
    as_json = {"auto": None, "json": True, "text": False}[settings.log.format]
    configure_logging(settings.log.level, json=as_json)
    os.umask(PRIVATE_UMASK)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signal(settings))


async def _serve_until_signal(settings: config.Settings) -> None:
    from kvd.daemon import Daemon

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Daemon(settings).run(stop)


@app.command("ls")
def list_sessions(
    runtime_dir: RuntimeDir = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    model: Annotated[str, typer.Option(help="Only models whose fingerprint starts so.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 is all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List stored sessions, least recently used first."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        sessions, total = client.sessions(tenant, model, limit)
    if as_json:
        _print_json({"sessions": [cli_views.plain(info) for info in sessions], "total": total})
    else:
        cli_views.console().print(cli_views.sessions_table(sessions, total))


@app.command()
def show(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Show one session and its blocks."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        found = client.describe(_key(session, tenant, model))
    if as_json:
        _print_json(cli_views.plain(found))
        return
    console = cli_views.console()
    console.print(cli_views.session_table(found.info))
    console.print(cli_views.blocks_table(found.blocks))


@app.command()
def flush(
    session: Annotated[str | None, typer.Argument(metavar="[SESSION]", help="Session id.")] = None,
    tenant: Tenant = "",
    model: Model = "",
    everything: Annotated[bool, typer.Option("--all", help="Every session.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would free.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Drop the KV of one session, or of all, from every tier. Transcripts are not touched."""
    if everything == (session is not None):
        raise UnclearSelectionError("what to flush is not clear", "name one session, or say --all")
    if everything and not (dry_run or yes):
        _confirm("Drop the KV of every session?")
    key = None if session is None else _key(session, tenant, model)
    with connect(runtime_dir or default_runtime_dir()) as client:
        answer = client.flush(key, dry_run=dry_run)
    if as_json:
        _print_json(cli_views.plain(answer))
    else:
        verb = "would free" if dry_run else "freed"
        typer.echo(f"{verb} {format_bytes(answer.bytes)} of {answer.sessions} sessions")
        for skipped in answer.skipped_leased:
            typer.echo(f"in use, not flushed: {skipped.session_id}")
    if session is not None and answer.skipped_leased:
        raise InUseError(f"session {session!r} is in use", "try again when its turn has ended")


@app.command()
def pin(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Protect a session from eviction and expiry."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        client.pin(_key(session, tenant, model))
    _confirm_done(session, "pinned", as_json=as_json)


@app.command()
def unpin(
    session: SessionId,
    tenant: Tenant = "",
    model: Model = "",
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Take the protection away."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        client.unpin(_key(session, tenant, model))
    _confirm_done(session, "unpinned", as_json=as_json)


@app.command()
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
    with connect(runtime_dir or default_runtime_dir()) as client:
        expires_in_s = client.set_ttl(_key(session, tenant, model), ttl_s)
    if as_json:
        _print_json({"session_id": session, "expires_in_s": expires_in_s})
    else:
        typer.echo(f"{session} expires in: {cli_views.expiry(expires_in_s)}")


@app.command()
def stats(runtime_dir: RuntimeDir = None, as_json: AsJson = False) -> None:
    """Show how full the tiers are, who is attached, and what was counted."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        found = client.stats()
    if as_json:
        _print_json(cli_views.plain(found))
        return
    console = cli_views.console()
    for table in cli_views.stats_tables(found):
        console.print(table)


@config_app.command("show")
def config_show(config_file: Config = None, as_json: AsJson = False) -> None:
    """Print every setting and where it came from."""
    rows = list(config.load(config_file, {}).rows())
    if as_json:
        _print_json({key: {"value": value, "source": source} for key, value, source in rows})
        return
    for key, value, source in rows:
        typer.echo(f"{key:<28} {value:<32} {source}")


@config_app.command("check")
def config_check(config_file: Config = None) -> None:
    """Exit 0 if the settings can be used, else list every problem."""
    config.load(config_file, {})
    typer.echo("the settings are fine")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line on stderr and their exit code.

    Args:
        arguments: of the command; None: those of the process.

    Raises:
        SystemExit: always.
    """
    try:
        app(arguments)
    except ReportedError as error:
        typer.echo(f"kvd: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenError as error:
        typer.echo(f"kvd: a bug stopped the daemon ({error}): see the log, and report it", err=True)
        sys.exit(EXIT_BROKEN)


def _key(session: str, tenant: str, model: str) -> kvd_pb2.SessionKey:
    return kvd_pb2.SessionKey(tenant=tenant, model=model, session_id=session)


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


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise NotConfirmedError("flushing everything needs a confirmation", "say --yes")
    if not typer.confirm(question):
        raise NotConfirmedError("nothing was flushed", "answer y, or say --yes")


def _confirm_done(session: str, what: str, *, as_json: bool) -> None:
    if as_json:
        _print_json({"session_id": session, "state": what})
    else:
        typer.echo(f"{session}: {what}")


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2))
