"""The follower's process: signals, systemd, logs and metrics around a Follower, until a signal."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import typer

from kvd.client.connection import open_client
from kvd.config import RemoteSettings
from kvd.following.figures import Figures, follower_status, make_exporter, status_of
from kvd.following.follower import Follower
from kvd.following.status import own_place, write_status
from shared.access.clients import ClientBook, Clients
from shared.access.settings import TlsSettings
from shared.process import systemd
from shared.process.dumps import forbid_dumps
from shared.process.log import LEVELS, configure_logging, get_logger
from shared.process.runtime_dir import default_runtime_dir
from shared.serving.metric_export import MetricExporter
from shared.serving.observing_settings import MetricsSettings
from shared.serving.operations_http import Operations, serve_operations
from shared.types.errors import ReportedError

BEAT_S = 5.0
_FORMATS = {"auto": None, "json": True, "text": False}

log = get_logger(__name__)


def follow(runtime_dir: Path | None, log_level: str, log_format: str) -> None:
    """Run a follower of the kvd in a runtime directory until SIGTERM or SIGINT."""
    if log_level not in LEVELS:
        raise typer.BadParameter(f"choose one of {', '.join(LEVELS)}", param_hint="--log-level")
    if log_format not in _FORMATS:
        raise typer.BadParameter(f"choose one of {', '.join(_FORMATS)}", param_hint="--log-format")
    configure_logging(log_level, json=_FORMATS[log_format])
    forbid_dumps()  # KV of conversations passes through this process
    asyncio.run(_follow_until_signal(runtime_dir))


async def _follow_until_signal(runtime_dir: Path | None) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    figures, changes = Figures(), asyncio.Queue[RemoteSettings]()
    follower = Follower(partial(open_client, runtime_dir), figures, changes.put_nowait)
    serving = asyncio.create_task(
        _serve_metrics(make_exporter(figures, follower.backlog), figures, changes)
    )
    place = own_place(runtime_dir or default_runtime_dir(), os.environ)
    beating = asyncio.create_task(_beat(figures, follower, place))
    try:
        systemd.notify(systemd.READY)
        await follower.run(stop)
        systemd.notify(systemd.STOPPING)
    finally:
        for task in (serving, beating):
            task.cancel()
        await asyncio.gather(serving, beating, return_exceptions=True)
        place.unlink(missing_ok=True)


async def _beat(figures: Figures, follower: Follower, place: Path) -> None:
    """Write the status file and notify systemd's watchdog, every few seconds, for ever."""
    started_unix_s = time.time()
    beat_s = min(systemd.watchdog_interval_s() or BEAT_S, BEAT_S)
    while True:
        status = status_of(figures, follower.backlog())
        systemd.notify(systemd.WATCHDOG, f"STATUS={status}")
        full_status = follower_status(
            figures, follower.backlog(), follower.settings, started_unix_s, time.time()
        )
        try:
            write_status(place, full_status)
        except OSError as error:
            log.debug("status_not_written", path=str(place), error=str(error))
        await asyncio.sleep(beat_s)


async def _serve_metrics(
    exporter: MetricExporter, figures: Figures, changes: asyncio.Queue[RemoteSettings]
) -> None:
    """Serve metrics at the address in the settings, for ever; follow its changes."""
    settings = await changes.get()
    while True:
        async with _metrics_server(exporter, figures, settings):
            listen = settings.metrics
            while settings.metrics == listen:
                settings = await changes.get()


@asynccontextmanager
async def _metrics_server(
    exporter: MetricExporter, figures: Figures, settings: RemoteSettings
) -> AsyncIterator[None]:
    """Serve metrics inside the block; an address that cannot be used is logged, not raised."""

    def not_ready() -> str:
        if not figures.kvd_up:
            return "no_kvd"
        return "store_fails" if figures.store_up is False else ""

    operations = Operations(exporter, not_ready, ClientBook(Clients({})))
    serving = serve_operations(MetricsSettings(listen=settings.metrics), TlsSettings(), operations)
    try:
        await serving.__aenter__()
    except ReportedError as error:
        log.error("metrics_not_served", error=str(error))  # noqa: TRY400
        yield
        return
    try:
        yield
    finally:
        await serving.__aexit__(None, None, None)
