"""The kvd command: run the daemon, look at what it holds, change it. Here: serve, version.

kvd/cli/exit_codes.py lists the exit codes, kvd/cli/examples.py the examples of all commands.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvd import config
from kvd.cli import sessions, tiers
from kvd.cli.bench import bench
from kvd.cli.completion import complete, completion
from kvd.cli.config import config_app
from kvd.cli.connection import connection_options
from kvd.cli.doctor import doctor
from kvd.cli.events import events
from kvd.cli.examples import add_examples
from kvd.cli.exit_codes import exit_codes_help
from kvd.cli.install import install_units
from kvd.cli.keys import key_app
from kvd.cli.options import Config, RuntimeDir
from kvd.cli.plan import plan
from kvd.cli.session_files import export_session, import_session
from kvd.cli.token import token
from kvd.cli.top import top
from kvd.errors import BrokenError
from shared.config import warn_of_overridden
from shared.dumps import forbid_dumps
from shared.errors import ReportedError
from shared.log import configure_logging
from shared.reload import LiveSettings
from shared.version import __version__

EXIT_BROKEN = 70  # EX_SOFTWARE
PRIVATE_UMASK = 0o077  # files of the daemon are its own; sockets get their mode explicitly

app = typer.Typer(
    name="kvd",
    help="KV-cache daemon: keeps the keys and values of conversations in DRAM and on SSD.",
    epilog=exit_codes_help(),
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    config_file: Config = None,
    runtime_dir: RuntimeDir = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of index and volumes.")] = None,
    dram: Annotated[str | None, typer.Option(help='DRAM tier, e.g. "8GB" or "auto".')] = None,
    dram_keep: Annotated[
        str | None, typer.Option(help="What keeps DRAM over restarts: auto, fdstore, file, none.")
    ] = None,
    ssd: Annotated[str | None, typer.Option(help='SSD tier, e.g. "100GB", "auto", "0".')] = None,
    tcp: Annotated[
        str | None, typer.Option(help="Serve clients of [clients.NAME] at host:port.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or text.")] = None,
) -> None:
    """Run the daemon until SIGTERM (DRAM is kept for the next start) or SIGINT (it is not)."""
    flags: dict[str, object] = {
        "runtime_dir": runtime_dir,
        "state_dir": state_dir,
        "dram.bytes": dram,
        "dram.keep": dram_keep,
        "ssd.bytes": ssd,
        "access.tcp": tcp,
        "log.level": log_level,
        "log.format": log_format,
    }
    # Only the daemon needs these; ls and its like start in half the time without.
    import uvloop

    live = config.load_live(config_file, flags)
    if not live.settings.process.dumps:
        forbid_dumps()
    _configure_logging(live.settings)
    live.on_change(_configure_logging)
    warn_of_overridden(live.loaded)
    live.on_change(lambda _: warn_of_overridden(live.loaded))
    os.umask(PRIVATE_UMASK)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signal(live))


def _configure_logging(settings: config.Settings) -> None:
    as_json = {"auto": None, "json": True, "text": False}[settings.log.format]
    configure_logging(settings.log.level, json=as_json)


async def _serve_until_signal(live: LiveSettings[config.Settings]) -> None:
    from kvd.daemon import Daemon

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    daemon = Daemon(live)

    def interrupt() -> None:
        """Leave nothing behind in memory: whoever presses Ctrl-C looks after kvd by hand."""
        daemon.keeps_dram = False
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGHUP, daemon.reloader.reload_if_possible)
    await daemon.run(stop)


# In the order of `kvd --help`; serve stands first, where it is defined.
for _name, _command in (
    ("ls", sessions.list_sessions),
    ("show", sessions.show),
    ("flush", sessions.flush),
    ("pin", sessions.pin),
    ("unpin", sessions.unpin),
    ("ttl", sessions.ttl),
    ("stats", tiers.stats),
    ("events", events),
    ("top", top),
    ("leases", tiers.leases),
    ("verify", tiers.verify),
    ("reopen", tiers.reopen),
    ("export", export_session),
    ("import", import_session),
    ("plan", plan),
    ("bench", bench),
    ("doctor", doctor),
    ("install-units", install_units),
    ("token", token),
):
    app.command(_name)(_command)
app.command("completion")(completion)
app.command("complete", hidden=True)(complete)
app.add_typer(config_app, name="config")
app.add_typer(key_app, name="key")
app.callback()(connection_options)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


add_examples(app)


def root_command() -> Any:
    """The tree of all commands, as completion and man pages walk it."""
    return typer.main.get_command(app)


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
