"""The work over one connection to kvd: one task pushes and drops, some pull.

What blocks is in threads. A store that fails is left alone for a while, ever longer, by all of
them. Whatever was under way when the connection ends is the agenda's again.

Turns may wait for a session that is wanted: each ask is answered, as soon as it is known whether
the session comes. So many tasks look into the store that those who look wait for no pull, few of
which are made at once.
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
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import StoreDeniedError, StoreFailedError
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

NO_KVD_S = 0.2  # until it is noticed that kvd is gone
PULLS = 4  # at once

P = ParamSpec("P")
T = TypeVar("T")
log = get_logger(__name__)


class Work:
    """See the module docstring.

    Args:
        kvd: the client of this connection.
        owner: that server.
        settings: in force.
        open_url: opens the store of a URL.
        agenda: what is pushed and dropped, and when.
        wanted: what is pulled.
        pause: how long the store is left alone.
        figures: are kept up.
        store_opened: told since when the store has been one, whenever it was looked at anew.
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
        """Look again: agenda, wanted or the settings have changed."""
        self._for_pushes.set()
        self._for_pulls.set()

    def use(self, settings: RemoteSettings) -> None:
        """Go by other settings."""
        before, self._settings = self._settings, settings
        if _bounds(before) != _bounds(settings):
            self.stop()
            self._pause.record_success()
        self.wake()

    def stop(self) -> None:
        """Break off what is under way with the store."""
        if self._transfers is not None:
            self._transfers.stop()
        self._transfers = None

    async def push(self) -> None:
        """Do what the agenda says, one step after the other, for ever."""
        while True:
            self._for_pushes.clear()
            transfers = await self._opened()
            step = None if transfers is None else self._agenda.next(time.monotonic())
            if transfers is None or step is None:
                await self._rest(self._for_pushes)
                continue
            try:
                await self._do(transfers, step)
            finally:
                if self._agenda.is_busy:
                    self._agenda.postponed()

    async def pull(self) -> None:
        """Fetch what is wanted, one session after the other, for ever; some do at once."""
        while True:
            self._for_pulls.clear()
            key = self._wanted.next(time.monotonic())
            owed = self._wanted.owed()
            is_fetched = False
            try:
                for other, is_coming in owed.items():
                    await self._answer(other, is_coming=is_coming)
                transfers = None if key is None else await self._opened()
                if key is not None and transfers is not None:
                    is_fetched = await self._fetch(transfers, key)
            finally:
                if key is not None:
                    self._wanted.done(key)
                    if not is_fetched:
                        await self._answer(key, is_coming=False)
            if key is None and not owed:
                await self._for_pulls.wait()

    # ----------------------------------------------------------------------------------- the store

    async def _opened(self) -> Transfers | None:
        """Return the store; None: there is none, or it is left alone now."""
        async with self._opening:
            if not self._settings.url or time.monotonic() < self._pause.retry_at_s:
                return None
            if self._transfers is None or self._pause.is_failing:  # perhaps it is back, and empty
                settings, transfers = self._settings, self._transfers
                try:
                    transfers, since_unix_s = await in_thread(self._open, settings, transfers)
                except ReportedError as error:
                    self._failed(error)
                    return None
                if settings is not self._settings:
                    return None  # it has others by now: whoever has set them wakes us
                self._transfers = transfers
                self._store_opened(since_unix_s)
            return self._transfers

    def _open(self, settings: RemoteSettings, before: Transfers | None) -> tuple[Transfers, float]:
        """Open the store, or look again at the one there is; since when it has been one."""
        transfers = before or self._made(settings)
        return transfers, transfers.open()

    def _made(self, settings: RemoteSettings) -> Transfers:
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

    def _failed(self, error: ReportedError) -> None:
        """Leave the store alone for a while."""
        self._figures.store_up = False
        self._figures.failed("remote_store_fails", error.message)
        if self._pause.record_failure(time.monotonic()):
            log.warning("remote_store_fails", url=self._settings.url, error=str(error))

    def _answered(self) -> None:
        self._figures.store_up = True
        if self._pause.record_success():
            log.info("remote_store_answers", url=self._settings.url)

    async def _rest(self, woken: asyncio.Event) -> None:
        """Wait until there may be something to do."""
        until_s = self._pause.retry_at_s if self._pause.is_failing else self._agenda.wait_until_s()
        wait_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        with suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), wait_s if self._settings.url else None)

    # ---------------------------------------------------------------------------- pushes and drops

    async def _do(self, transfers: Transfers, step: Step) -> None:
        counted = self._figures.drops if isinstance(step, Drop) else self._figures.pushes
        try:
            result = await self._ended(transfers, step)
        except FencedError as error:
            result = "fenced"
            if self._agenda.fenced(int(error.details["num_tokens"])):
                log.warning("session_fenced", session=str(step.key), error=error.message)
        except (StoreFailedError, StoreDeniedError) as error:
            counted.add("failed")
            self._failed(error)
            return
        except (NotRunningError, StoppedError):
            await asyncio.sleep(NO_KVD_S)
            return
        except ReportedError as error:
            result = "failed"
            what = "session_not_dropped" if isinstance(step, Drop) else "session_not_pushed"
            self._figures.failed(what, error.reason)
            log.warning(what, session=str(step.key), reason=error.reason, error=str(error))
            self._agenda.failed(time.monotonic())
        counted.add(result)
        self._answered()

    async def _ended(self, transfers: Transfers, step: Step) -> str:
        """Do a step, and tell the agenda and the caller what became of it."""
        if isinstance(step, Drop):
            was_there = await in_thread(transfers.drop, step)
            self._agenda.dropped()
            return "dropped" if was_there else "absent"
        begun_s = time.monotonic()
        found = await in_thread(transfers.push, step)
        if found is None:
            self._agenda.missing()
            return "gone"
        info, pushed = found
        self._agenda.pushed(info, begun_s)
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
        with suppress(ReportedError):  # kvd is gone, which others say: nobody waits there
            await in_thread(partial(self._kvd.answer_wanted, key_message(key), coming=is_coming))

    async def _fetch(self, transfers: Transfers, key: SessionKey) -> bool:
        """Find a session, say that it comes, and pull it; returns whether it was pulled."""
        pulls, begun_s = self._figures.pulls, time.monotonic()
        try:
            found = await self._pulled(transfers, key)
        except (StoreFailedError, StoreDeniedError) as error:
            pulls.add("failed")
            self._failed(error)
            return False
        except (NotRunningError, StoppedError):
            return False
        except ReportedError as error:
            pulls.add("failed")
            self._figures.failed("session_not_pulled", error.reason)
            log.warning(
                "session_not_pulled", session=str(key), reason=error.reason, error=str(error)
            )
            return False
        self._answered()
        if found is None:
            pulls.add("absent")
            return False
        info, pulled = found
        pulls.add("pulled")
        self._agenda.pulled(info, pulled.num_tokens, begun_s)
        log.info(
            "session_pulled",
            session=str(key),
            num_tokens=pulled.num_tokens,
            num_bytes=pulled.num_bytes,
            epoch=pulled.epoch,
            duration_s=round(time.monotonic() - begun_s, 3),
        )
        return True

    async def _pulled(
        self, transfers: Transfers, key: SessionKey
    ) -> tuple[pb.SessionInfo, PullResult] | None:
        found = await in_thread(transfers.find, key)
        if found is None:
            return None
        self._wanted.comes(key)
        await self._answer(key, is_coming=True)
        async with self._pulls:
            self._figures.pulling += 1
            try:
                return await in_thread(transfers.pull, key, found)
            finally:
                self._figures.pulling -= 1


def _bounds(settings: RemoteSettings) -> tuple[object, ...]:
    """Return what transfers that are under way go by."""
    return settings.url, settings.rate, settings.requests


async def in_thread(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what blocks; who is cancelled meanwhile still waits for its end."""
    done = asyncio.ensure_future(asyncio.to_thread(do, *args, **kwargs))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        if not done.cancelled():
            done.exception()
        raise
