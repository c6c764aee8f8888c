"""The command `kvd serve`: runs the daemon in this process until a signal."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvd.cli.options import Config, RuntimeDir

if TYPE_CHECKING:
    from kvd.config import Settings
    from shared.config.reload import LiveSettings

RELOADS = (signal.SIGHUP,)
PRIVATE_UMASK = 0o077  # only the daemon's user reads its files; sockets get a mode of their own


def serve(
    config_file: Config = None,
    runtime_dir: RuntimeDir = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of index and volumes.")] = None,
    dram: Annotated[str | None, typer.Option(help='DRAM tier, e.g. "8GB" or "auto".')] = None,
    dram_keep: Annotated[
        str | None, typer.Option(help="How DRAM survives restarts: auto, fdstore, file, none.")
    ] = None,
    ssd: Annotated[str | None, typer.Option(help='SSD tier, e.g. "100GB", "auto", "0".')] = None,
    tcp: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve clients of [clients.NAME] at host:port; repeat for more ports.",
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
    # Imported here: the command's help needs none of these, and is much faster without.
    import asyncio
    import os

    import uvloop

    from kvd import config
    from shared.config.settings import warn_of_overridden
    from shared.process.dumps import forbid_dumps

    # A SIGHUP during the start waits until it can reload, instead of ending the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, RELOADS)
    live = config.load_live(config_file, flags)
    if not live.loaded.settings.process.dumps:
        forbid_dumps()
    _configure_logging(live.loaded.settings)
    live.on_change.append(_configure_logging)
    warn_of_overridden(live.loaded)
    live.on_change.append(lambda _: warn_of_overridden(live.loaded))
    os.umask(PRIVATE_UMASK)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signal(live))


def _configure_logging(settings: "Settings") -> None:
    from shared.process.log import configure_logging

    as_json = {"auto": None, "json": True, "text": False}[settings.log.format]
    configure_logging(settings.log.level, json=as_json)


async def _serve_until_signal(live: "LiveSettings[Settings]") -> None:
    import asyncio

    from kvd.daemon import Daemon

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    daemon = Daemon(live)

    def interrupt() -> None:
        """Stop, and free the DRAM: a user who presses Ctrl-C runs kvd by hand."""
        daemon.keeps_dram = False
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload_on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RELOADS)
    await daemon.run(stop)
