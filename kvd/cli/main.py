"""The kvd command: run the daemon, look at what it holds, change it. Here: serve, version.

kvd/cli/commands.py lists all commands, their examples and the exit codes.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.cli.commands import COMMANDS, add_examples, exit_codes_help
from kvd.cli.options import Config, RuntimeDir
from kvd.client.connection import MOVABLE, connection_options
from kvd.errors import BrokenError
from shared.config.command_line import arranged
from shared.config.lazy_commands import lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

if TYPE_CHECKING:
    from kvd.config import Settings
    from shared.config.reload import LiveSettings

EXIT_BROKEN = 70  # EX_SOFTWARE
PRIVATE_UMASK = 0o077  # files of the daemon are its own; sockets get their mode explicitly

app = typer.Typer(
    name="kvd",
    cls=lazy_group(COMMANDS, add_examples),
    help="KV-cache daemon: keeps the keys and values of conversations in DRAM and on SSD.\n\n"
    "--runtime-dir, and --address with what belongs to it, stand before or after the command.",
    epilog=exit_codes_help(),
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve clients of [clients.NAME] at host:port; as often as there are ports.",
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="auto (text on a terminal), json or text.")
    ] = None,
) -> None:
    """Run the daemon until SIGTERM (DRAM is kept for the next start) or SIGINT (it is not)."""
    flags: dict[str, object] = {
        "runtime_dir": runtime_dir,
        "state_dir": state_dir,
        "dram.bytes": dram,
        "dram.keep": dram_keep,
        "ssd.bytes": ssd,
        "access.tcp": tcp or None,
        "log.level": log_level,
        "log.format": log_format,
    }
    # Only the daemon needs these; other commands start in a fraction of the time without.
    import asyncio
    import os

    import uvloop

    from kvd import config
    from shared.config.settings import warn_of_overridden
    from shared.process.dumps import forbid_dumps

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


def _configure_logging(settings: "Settings") -> None:
    from shared.process.log import configure_logging

    as_json = {"auto": None, "json": True, "text": False}[settings.log.format]
    configure_logging(settings.log.level, json=as_json)


async def _serve_until_signal(live: "LiveSettings[Settings]") -> None:
    import asyncio
    import signal

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
    loop.add_signal_handler(signal.SIGHUP, daemon.reload_on_signal)
    await daemon.run(stop)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.callback()(connection_options)


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
        root = root_command()
        root(
            arranged(root, sys.argv[1:] if arguments is None else arguments, MOVABLE),
            prog_name="kvd",
        )
    except ReportedError as error:
        typer.echo(f"kvd: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenError as error:
        typer.echo(f"kvd: a bug stopped the daemon ({error}): see the log, and report it", err=True)
        sys.exit(EXIT_BROKEN)
