"""The kvd command: run the daemon, look at what it holds, change it. Here: serve, config, version.

Exit codes:
    0   done
    1   verify found what it could not put right: corrupt copies without --repair, or, with it,
        blocks that have no good copy, or copies that could not be read
    2   bad usage or value
    3   unknown session or model, or a process that holds no lease
    4   in use
    5   not as things stand now
    6   a bound is reached: another verify runs
    69  kvd is not running
    70  kvd stopped because of a bug
    78  the start was refused
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvd import cli_sessions, cli_tiers, config
from kvd.cli_bench import bench
from kvd.cli_options import AsJson, Config, RuntimeDir, print_json
from kvd.cli_plan import plan
from kvd.errors import BrokenError
from shared.errors import ReportedError
from shared.log import configure_logging
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
    tcp: Annotated[str | None, typer.Option(help="Also serve Reader on this local port.")] = None,
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
    daemon = Daemon(settings)

    def interrupt() -> None:
        """Leave nothing behind in memory: whoever presses Ctrl-C looks after kvd by hand."""
        daemon.keeps_dram = False
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    await daemon.run(stop)


# In the order of `kvd --help`; serve stands first, where it is defined.
for _name, _command in (
    ("ls", cli_sessions.list_sessions),
    ("show", cli_sessions.show),
    ("flush", cli_sessions.flush),
    ("pin", cli_sessions.pin),
    ("unpin", cli_sessions.unpin),
    ("ttl", cli_sessions.ttl),
    ("stats", cli_tiers.stats),
    ("leases", cli_tiers.leases),
    ("verify", cli_tiers.verify),
    ("plan", plan),
    ("bench", bench),
):
    app.command(_name)(_command)
app.add_typer(config_app, name="config")


@config_app.command("show")
def config_show(config_file: Config = None, as_json: AsJson = False) -> None:
    """Print every setting and where it came from."""
    rows = list(config.load(config_file, {}).rows())
    if as_json:
        print_json({key: {"value": value, "source": source} for key, value, source in rows})
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
