"""The follower's work over one connection to kvd: one task pushes and drops, several tasks pull.

Blocking calls run in threads. When the store fails, all tasks pause, longer after each failure.
When the connection ends, the step under way goes back to the agenda.

Turns may wait for a wanted session. kvd gets an answer to each request as soon as it is known
whether the session comes. There are many pulling tasks, so that looking up a session never waits
for a pull; of the pulls themselves only a few run at once.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from kvd.config import RemoteSettings
from kvd.errors import NotRunningError
from kvd.following.agenda import Agenda
from kvd.following.figures import Figures
from kvd.following.steps import Drop, Step
from kvd.following.transfers import Kvd, StoppedError, Transfers
from kvd.following.wanted import Wanted
from kvd.remote.errors import FencedError
from kvd.remote.manifest import Owner
from kvd.remote.pulling import PullResult
from shared.blobs.blob_store import BlobStore, StoreDeniedError, StoreFailedError
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

NO_KVD_S = 0.2  # pause of a task until the event stream notices that kvd is gone
PULLS = 4  # pulls at once

P = ParamSpec("P")
T = TypeVar("T")
log = get_logger(__name__)


class Work:
    """The tasks of one connection: `push` (run once) and `pull` (run several times).

    Args:
        kvd: the client of this connection.
        owner: the server whose kvd this is.
        settings: the section [remote] in force.
        open_url: opens the store at a URL.
        agenda: the sessions to push and drop.
        wanted: the sessions to pull.
        pause: pauses after the store failed.
        figures: counters and state that are updated.
        store_opened: called with the time (unix, the store's clock) at which the store was made,
            whenever it was opened.
    """

    def __init__(
        self,
        kvd: Kvd,
        owner: Owner,
        settings: RemoteSettings,
        open_url: Callable[[str], BlobStore],
        agenda: Agenda,
        wanted: Wanted,
        pause: Backoff,
        figures: Figures,
        store_opened: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._store_opened = store_opened
        self._kvd = kvd
        self._owner = owner
        self._settings = settings
        self._open_url = open_url
        self._agenda = agenda
        self._wanted = wanted
        self._pause = pause
        self._figures = figures
        self._transfers: Transfers | None = None
        self._opening = asyncio.Lock()
        self._pulls = asyncio.Semaphore(PULLS)
        self._for_pushes = asyncio.Event()
        self._for_pulls = asyncio.Event()

    def wake(self) -> None:
        """Let the tasks look for work again: the agenda, a wanted session or a setting changed."""
        self._for_pushes.set()
        self._for_pulls.set()

    def reconfigure(self, settings: RemoteSettings) -> None:
        """Apply other settings; transfers under way are stopped if their store or rate changed."""
        before, self._settings = self._settings, settings
        if _bounds(before) != _bounds(settings):
            self.stop()
            self._pause.record_success()
        self.wake()

    def stop(self) -> None:
        """Stop the transfers that are under way."""
        if self._transfers is not None:
            self._transfers.stop()
        self._transfers = None

    async def push(self) -> None:
        """Do the agenda's steps, one after the other, for ever."""
        while True:
            self._for_pushes.clear()
            transfers = await self._open_store()
            step = None if transfers is None else self._agenda.next(time.monotonic())
            if transfers is None or step is None:
                await self._wait_for_work(self._for_pushes)
                continue
            try:
                await self._do_step(transfers, step)
            finally:
                if self._agenda.is_busy:
                    self._agenda.on_postponed()

    async def pull(self) -> None:
        """Fetch wanted sessions, one after the other, for ever."""
        while True:
            self._for_pulls.clear()
            key = self._wanted.next(time.monotonic())
            answers = self._wanted.take_answers()
            is_fetched = False
            try:
                for other, is_coming in answers.items():
                    await self._answer(other, is_coming=is_coming)
                transfers = None if key is None else await self._open_store()
                if key is not None and transfers is not None:
                    is_fetched = await self._fetch(transfers, key)
            finally:
                if key is not None:
                    self._wanted.done(key)
                    if not is_fetched:
                        await self._answer(key, is_coming=False)
            if key is None and not answers:
                await self._for_pulls.wait()

    # ----------------------------------------------------------------------------------- the store

    async def _open_store(self) -> Transfers | None:
        """Return transfers of the store; None: there is no store, or it is paused."""
        async with self._opening:
            if not self._settings.url or time.monotonic() < self._pause.retry_at_s:
                return None
            # After failures it is opened again, even if it was open: it may have been recreated.
            if self._transfers is None or self._pause.is_failing:
                settings, transfers = self._settings, self._transfers
                try:
                    transfers, since_unix_s = await in_thread(self._open, settings, transfers)
                except ReportedError as error:
                    self._record_failure(error)
                    return None
                if settings is not self._settings:
                    return None  # the settings have changed meanwhile: `reconfigure` wakes the task
                self._transfers = transfers
                self._store_opened(since_unix_s)
            return self._transfers

    def _open(self, settings: RemoteSettings, before: Transfers | None) -> tuple[Transfers, float]:
        """Open the store, or check the open one again; return when it was made, too."""
        transfers = before or self._make_transfers(settings)
        return transfers, transfers.open()

    def _make_transfers(self, settings: RemoteSettings) -> Transfers:
        return Transfers(
            self._open_url(settings.url),
            self._kvd,
            self._owner,
            settings.rate or 0,
            settings.requests or 0,
            partial(self._figures.add_bytes, "sent"),
            partial(self._figures.add_bytes, "received"),
            self._figures.requests.add,
        )

    def _record_failure(self, error: ReportedError) -> None:
        """Record that the store failed and start a pause."""
        self._figures.store_up = False
        self._figures.record_failure("remote_store_fails", error.message)
        if self._pause.record_failure(time.monotonic()):
            log.warning("remote_store_fails", url=self._settings.url, error=str(error))

    def _record_success(self) -> None:
        self._figures.store_up = True
        if self._pause.record_success():
            log.info("remote_store_answers", url=self._settings.url)

    async def _wait_for_work(self, woken: asyncio.Event) -> None:
        """Wait until there may be something to do."""
        until_s = self._pause.retry_at_s if self._pause.is_failing else self._agenda.wait_until_s()
        wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        with suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), wait_s if self._settings.url else None)

    # ---------------------------------------------------------------------------- pushes and drops

    async def _do_step(self, transfers: Transfers, step: Step) -> None:
        """Do a step; log and count its failure. The agenda is informed of the result."""
        counted = self._figures.drops if isinstance(step, Drop) else self._figures.pushes
        try:
            result = await self._run_step(transfers, step)
        except FencedError as error:
            result = "fenced"
            if self._agenda.on_fenced(int(error.details["num_tokens"])):
                log.warning("session_fenced", session=str(step.key), error=error.message)
        except (StoreFailedError, StoreDeniedError) as error:
            counted.add("failed")
            self._record_failure(error)
            return
        except (NotRunningError, StoppedError):
            await asyncio.sleep(NO_KVD_S)
            return
        except ReportedError as error:
            result = "failed"
            event = "session_not_dropped" if isinstance(step, Drop) else "session_not_pushed"
            self._figures.record_failure(event, error.reason)
            log.warning(event, session=str(step.key), reason=error.reason, error=str(error))
            self._agenda.on_failed(time.monotonic())
        counted.add(result)
        self._record_success()

    async def _run_step(self, transfers: Transfers, step: Step) -> str:
        """Do a step, record its result in the agenda, and return the result's name."""
        if isinstance(step, Drop):
            was_there = await in_thread(transfers.drop, step)
            self._agenda.on_dropped()
            return "dropped" if was_there else "absent"
        begun_s = time.monotonic()
        found = await in_thread(transfers.push, step)
        if found is None:
            self._agenda.on_missing()
            return "gone"
        info, pushed = found
        self._agenda.on_pushed(info, begun_s)
        log.info(
            "session_pushed",
            session=str(step.key),
            outcome=pushed.outcome.value,
            num_tokens=pushed.num_tokens,
            sent_bytes=pushed.sent_bytes,
            epoch=pushed.epoch,
        )
        return pushed.outcome.value

    # --------------------------------------------------------------------------------------- pulls

    async def _answer(self, key: SessionKey, *, is_coming: bool) -> None:
        """Report to kvd whether a wanted session comes."""
        with suppress(ReportedError):  # without kvd no turn waits; the event stream reports it
            await in_thread(partial(self._kvd.answer_wanted, key_message(key), coming=is_coming))

    async def _fetch(self, transfers: Transfers, key: SessionKey) -> bool:
        """Look a session up, announce it and pull it; return whether it was pulled."""
        pulls, begun_s = self._figures.pulls, time.monotonic()
        try:
            found = await self._find_and_pull(transfers, key)
        except (StoreFailedError, StoreDeniedError) as error:
            pulls.add("failed")
            self._record_failure(error)
            return False
        except (NotRunningError, StoppedError):
            return False
        except ReportedError as error:
            pulls.add("failed")
            self._figures.record_failure("session_not_pulled", error.reason)
            log.warning(
                "session_not_pulled", session=str(key), reason=error.reason, error=str(error)
            )
            return False
        self._record_success()
        if found is None:
            pulls.add("absent")
            return False
        info, pulled = found
        pulls.add("pulled")
        self._agenda.on_pulled(info, pulled.num_tokens, begun_s)
        log.info(
            "session_pulled",
            session=str(key),
            num_tokens=pulled.num_tokens,
            num_bytes=pulled.num_bytes,
            epoch=pulled.epoch,
            duration_s=round(time.monotonic() - begun_s, 3),
        )
        return True

    async def _find_and_pull(
        self, transfers: Transfers, key: SessionKey
    ) -> tuple[pb.SessionInfo, PullResult] | None:
        found = await in_thread(transfers.find, key)
        if found is None:
            return None
        self._wanted.on_found(key)
        await self._answer(key, is_coming=True)
        async with self._pulls:
            self._figures.pulling += 1
            try:
                return await in_thread(transfers.pull, key, found)
            finally:
                self._figures.pulling -= 1


def _bounds(settings: RemoteSettings) -> tuple[object, ...]:
    """Return the settings that transfers under way were made with."""
    return settings.url, settings.rate, settings.requests


async def in_thread(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread; a cancelled caller still waits for its end."""
    done = asyncio.ensure_future(asyncio.to_thread(do, *args, **kwargs))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        # A thread cannot be cancelled: without this wait it would use a client that is closed.
        await asyncio.wait([done])
        if not done.cancelled():
            done.exception()
        raise
