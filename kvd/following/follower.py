"""The follower: keeps up with a kvd's events, and has what follows from them done.

    connected ─► hears of events ─► has listed all sessions ─► works ─┐
        ▲                                                             │
        └────────── a pause ◄── kvd does not answer (any more) ◄──────┘

kvd waits for none of this but for sessions that were said to come, or soon will be. The agenda
outlives connections, so that after each only what has changed is looked at.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from random import Random

from pydantic import ValidationError

from kvd.client.operator_client import OperatorClient
from kvd.config import RemoteSettings
from kvd.errors import NotRunningError
from kvd.following.agenda import Agenda
from kvd.following.figures import Figures, Waiting
from kvd.following.hearing import EVENTS, hear, hear_deletion
from kvd.following.wanted import Wanted
from kvd.following.work import Work, in_thread
from kvd.remote.manifest import Owner
from kvd.session_files.target import is_unfinished
from kvd.wire.events import EVENTS_LOST, MAX_RECENT
from shared.blobs.blob_store import BlobStore
from shared.blobs.opening import open_store
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError, StateError

FETCHES = 32  # sessions that are looked for, or pulled, at once
THREADS = 40  # for these, and the rest: one that waits for the store holds up nothing else
SETTINGS_EVERY_S = 2.0
LIST_EVERY_S = 3600.0  # TTLs and pins change without an event
KVD_PAUSE_S = 5.0  # at most, between two tries to connect
DRAIN_POLL_S = 0.05  # upper bound between two looks at whether all is done
SECTION = "remote."

log = get_logger(__name__)
Heard = pb.Event | ReportedError | None  # None: no event is missed from now on, and comes first


class OtherReleaseError(StateError):
    """kvd is of a release whose settings these are not."""

    reason = "other_release"


class Follower:
    """See the module docstring.

    Args:
        connect: opens a client of the kvd.
        figures: are kept up.
        settings_changed: called with the settings, at first and whenever they are others.
        open_url: opens the store of a URL.
        random: draws pauses.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[OperatorClient]],
        figures: Figures,
        settings_changed: Callable[[RemoteSettings], None] = lambda _: None,
        open_url: Callable[[str], BlobStore] = open_store,
        random: Random | None = None,
    ) -> None:
        self._connect = connect
        self._figures = figures
        self._settings_changed = settings_changed
        self._open_url = open_url
        random = random or Random()  # noqa: S311  # it keeps no secret
        self._kvd_pause = Backoff(random, longest_s=KVD_PAUSE_S)
        self._store_pause = Backoff(random)
        self._agenda = Agenda()
        self._wanted = Wanted()
        self._settings = RemoteSettings()
        self._knows_store = True
        self._store_since_unix_s: float | None = None
        self._seen_unix_s = 0.0  # of the newest event that was heard of

    @property
    def settings(self) -> RemoteSettings:
        """Those in force."""
        return self._settings

    def waiting(self) -> Waiting:
        """Return what is left to do."""
        agenda, oldest_s = self._agenda, self._agenda.oldest_s()
        age_s = 0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s)
        return Waiting(
            agenda.num_unpushed, age_s, agenda.num_drops, len(self._wanted), agenda.num_evicted
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Follow kvd until `stop` is set, then push what is left as the settings say.

        For that kvd is asked once more if it did not answer when `stop` was set.
        """
        is_over = False
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        while not is_over:
            is_over = stop.is_set()
            try:
                with self._connect() as client:
                    await self._follow(client, stop)
                is_over = True
            except ReportedError as error:
                now_s = time.monotonic()
                if self._kvd_pause.record_failure(now_s):
                    log.warning("kvd_not_followed", error=str(error))
                pause_s = self._kvd_pause.retry_at_s - now_s
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause_s)
            finally:
                self._figures.kvd_up = False

    # ------------------------------------------------------------------------------ one connection

    async def _follow(self, client: OperatorClient, stop: asyncio.Event) -> None:
        """Follow kvd while it answers.

        Raises:
            ReportedError: it does not.
        """
        stats = await in_thread(client.stats)
        work = Work(
            client,
            Owner(stats.server_id, stats.server_name),
            self._settings,
            self._open_url,
            self._agenda,
            self._wanted,
            self._store_pause,
            self._figures,
            self._store_opened,
        )
        self._use(await in_thread(remote_settings, client), work)
        jobs = [self._listen(client, work), self._look_after(client, work), work.push()]
        jobs += [work.pull() for _ in range(FETCHES)]
        tasks = [asyncio.create_task(job) for job in jobs]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await self._drain(client, work, tasks)
        finally:
            work.stop()
            for task in (*tasks, stopped):
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _listen(self, client: OperatorClient, work: Work) -> None:
        """Hear of events until there are no more, which is an error."""
        inbox: asyncio.Queue[Heard] = asyncio.Queue()
        self._watch(client, inbox)
        while True:
            one = await inbox.get()
            if isinstance(one, ReportedError):
                raise one
            if one is None:
                await self._look_back(client)
                await self._list(client)
                self._figures.kvd_up = True
                self._kvd_pause.record_success()
                log.info("kvd_followed", num_to_look_at=self._agenda.num_unpushed)
            elif one.name == EVENTS_LOST:
                log.warning("events_lost", num_events=one.fields["num_events"])
                await self._list(client)
            else:
                hear(one, self._agenda, self._wanted, time.monotonic())
                self._seen_unix_s = one.unix_s
            work.wake()

    def _watch(self, client: OperatorClient, inbox: asyncio.Queue[Heard]) -> None:
        """Have a thread of its own put kvd's events into the inbox; it ends with the client."""
        loop = asyncio.get_running_loop()
        request = pb.WatchEventsRequest(names=EVENTS)

        def put(one: Heard) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(inbox.put_nowait, one)

        def watch() -> None:
            try:
                for event in client.events(request, lambda: put(None)):
                    put(event)
                put(NotRunningError("kvd has ended its events", "it is asked again soon"))
            except ReportedError as error:
                put(error)

        threading.Thread(target=watch, name="events", daemon=True).start()

    async def _look_back(self, client: OperatorClient) -> None:
        """Hear of deletions that nobody heard of, as far as kvd remembers them.

        Before all events that were heard since: these are among them, and are taken once more.
        """
        request = pb.WatchEventsRequest(names=EVENTS, num_recent=MAX_RECENT, recent_only=True)
        for event in await in_thread(lambda: list(client.events(request))):
            if event.unix_s > self._seen_unix_s:
                hear_deletion(event, self._agenda)
                self._seen_unix_s = event.unix_s

    async def _list(self, client: OperatorClient) -> None:
        """Make good what was not heard of."""
        listed = await in_thread(client.sessions, pb.SessionFilter())
        found = [one for one in listed.sessions if not is_unfinished(one.session.session_id)]
        self._agenda.listed(found, time.monotonic(), time.time())

    async def _look_after(self, client: OperatorClient, work: Work) -> None:
        """Keep up with the settings, and now and then with what no event tells."""
        listed_at_s = time.monotonic()
        while True:
            await asyncio.sleep(SETTINGS_EVERY_S)
            found = await in_thread(remote_settings, client)
            is_same = found == self._settings and self._knows_store
            if is_same and time.monotonic() < listed_at_s + LIST_EVERY_S:
                continue
            self._knows_store = True
            self._use(found, work)
            await self._list(client)
            listed_at_s = time.monotonic()
            work.wake()

    def _store_opened(self, since_unix_s: float) -> None:
        """Look at all sessions anew if the store was begun anew: what was there is lost."""
        if self._store_since_unix_s not in {None, since_unix_s}:
            self._agenda.forget_store()
            self._knows_store = False
        self._store_since_unix_s = since_unix_s

    def _use(self, settings: RemoteSettings, work: Work) -> None:
        """Go by settings; of another store nothing is known."""
        before, self._settings = self._settings, settings
        if before == settings:
            return
        if before.url != settings.url:
            self._agenda.forget_store()
        self._agenda.follow(settings.write, settings.quiet)
        work.use(settings)
        self._settings_changed(settings)
        log.info("remote_settings", **settings.model_dump(mode="json"))

    async def _drain(
        self, client: OperatorClient, work: Work, tasks: "list[asyncio.Task[None]]"
    ) -> None:
        """Push what is left, for as long as the settings say."""
        settings, agenda = self._settings, self._agenda
        if settings.write == "none" or not settings.url or not settings.drain:
            return
        agenda.drain()
        self._store_pause.retry_at_s = 0.0  # there is no later
        await self._list(client)
        log.info("remote_draining", num_sessions=agenda.num_unpushed, deadline_s=settings.drain)
        work.wake()
        until_s = time.monotonic() + settings.drain
        while not (agenda.is_done or any(task.done() for task in tasks)):
            if time.monotonic() >= until_s:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        log.info("remote_drained", num_left=agenda.num_unpushed)


def remote_settings(client: OperatorClient) -> RemoteSettings:
    """Ask kvd for its settings of the section [remote]: the follower's, as they are in force there.

    Raises:
        OtherReleaseError: kvd has others.
        ReportedError: it does not answer.
    """
    found = {
        setting.key.removeprefix(SECTION): json.loads(setting.json)
        for setting in client.settings().settings
        if setting.key.startswith(SECTION)
    }
    try:
        return RemoteSettings.model_validate(found)
    except ValidationError as error:
        names = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise OtherReleaseError(
            f"kvd has other settings of [remote] than are known here ({names})",
            "run the kvd remote follow of kvd's own release",
        ) from error
