"""The life of the serving process: signals, background tasks, and the drain at its end.

SIGTERM, SIGINT   drain: turns that have not started are handed back at once, those that run
                  continue until server.drain_s, their KV is saved; then the process ends
a second one      all turns that are left are handed back at once
SIGHUP            the settings are read again (`config.LIVE_KEYS`); during the start, after it
"""

import asyncio
import signal
import time
from collections.abc import Callable

from inference_svc.config import InferenceSettings
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.turns.embeddings import Embedder
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turns import Turns
from shared.config.reload import Changes
from shared.kvd_client.client import KvdClient
from shared.process import systemd
from shared.process.log import get_logger
from shared.types.errors import ReportedError

CATCH_UP_S = 2.0  # between attempts to put transcripts that are behind into the store
TIDY_S = 6 * 3600.0  # between searches for sessions that other servers have deleted
RETRY_S = 1.0  # before kvd's client is run again after an unexpected failure

log = get_logger(__name__)


class Signals:
    """Signals of the supervisor, as events.

    Attributes:
        stop: set when the service has to drain and end.
        at_once: set when the drain must not wait any longer.
        reload: set when the settings have to be read again.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        self.reload = asyncio.Event()

    def listen(self) -> None:
        """Handle the process's signals on the running loop, those of the start included."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # `serve` blocks it

    def _on_stop(self) -> None:
        """Stop at the first signal; stop at once at the second."""
        (self.at_once if self.stop.is_set() else self.stop).set()


async def notify_watchdog() -> None:
    """Notify systemd's watchdog at intervals, from the event loop; return if there is none."""
    interval_s = systemd.watchdog_interval_s()
    while interval_s is not None:
        systemd.notify(systemd.WATCHDOG)
        await asyncio.sleep(interval_s)


async def keep_attached(client: KvdClient) -> None:
    """Keep kvd's client running. If it fails, turns are recomputed: the service need not stop."""
    while True:
        try:
            await client.run()
        except Exception:
            log.exception("kvd_client_failed")
        await asyncio.sleep(RETRY_S)


async def share_transcripts(transcripts: TranscriptStore) -> None:
    """Put transcripts into the shared store, and remove sessions that other servers deleted."""
    tidied_s = -TIDY_S
    while transcripts.sharing is not None:
        try:
            if time.monotonic() >= tidied_s + TIDY_S:
                tidied_s = time.monotonic()
                await transcripts.forget_deleted()
            await transcripts.catch_up()
        except Exception:
            log.exception("transcripts_not_shared")
        await asyncio.sleep(CATCH_UP_S)


async def reload_on_signal(
    signals: Signals, reload: Callable[[], Changes[InferenceSettings]]
) -> None:
    """Reload at each SIGHUP; invalid settings are logged, and change nothing."""
    while True:
        await signals.reload.wait()
        signals.reload.clear()
        if signals.stop.is_set():
            return  # READY must not be notified again after STOPPING
        systemd.notify(systemd.reloading())
        try:
            changes = reload()
            log.info(
                "settings_reloaded", applied=changes.applied, needs_restart=changes.needs_restart
            )
        except ReportedError as error:
            log.error("settings_not_reloaded", error=str(error))  # noqa: TRY400  # no bug of ours
        except Exception:  # a reload that fails must not end the turns under way
            log.exception("reload_failed")
        systemd.notify(systemd.READY)


async def drain(
    turns: Turns, embedder: Embedder, engine: EngineLoop, drain_s: float, signals: Signals
) -> None:
    """Finish and save the turns that run; hand back those that have not started or take too long.

    Args:
        turns: the service's turn registry.
        embedder: makes embeddings.
        engine: the service's engine.
        drain_s: most seconds that the drain may take.
        signals: the process's signals; `at_once` ends the drain.
    """
    log.info("draining", drain_s=drain_s)
    turns.refuse_new()
    idle = asyncio.create_task(_wait_until_idle(turns, embedder, engine))
    hurry = asyncio.create_task(signals.at_once.wait())
    await asyncio.wait((idle, hurry), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        log.warning("drain_cut_short", told_to=signals.at_once.is_set())
        turns.hand_back_all()
    for task in (idle, hurry):
        task.cancel()


async def _wait_until_idle(turns: Turns, embedder: Embedder, engine: EngineLoop) -> None:
    """Wait until every turn is over, and its KV is saved."""
    await turns.idle.wait()
    await embedder.idle.wait()
    await engine.idle.wait()
