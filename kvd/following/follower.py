"""The follower: follows the events of one kvd, and moves sessions to and from its remote store.

    connected ─► receives events ─► has listed all sessions ─► works ─┐
        ▲                                                             │
        └────────── a pause ◄── kvd does not answer (any more) ◄──────┘

kvd does not wait for the follower, except for wanted sessions: those announced to come, and for a
moment those not yet looked up. The agenda outlives connections: after a reconnect only the sessions
that have changed are looked up in the store.
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
from kvd.following.event_effects import EVENTS, apply_deletion, apply_event
from kvd.following.figures import Backlog, Figures
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

FETCHES = 32  # tasks that look up or pull wanted sessions at once
THREADS = 40  # for these and all other blocking calls: none waits for a free thread
SETTINGS_EVERY_S = 2.0
LIST_EVERY_S = 3600.0  # TTLs and pins change without an event, so all sessions are listed again
KVD_PAUSE_S = 5.0  # at most, between two tries to connect
DRAIN_POLL_S = 0.05  # between two checks whether a drain is done
SECTION = "remote."

log = get_logger(__name__)
# None comes first, and marks the point from which on no event is missed.
Message = pb.Event | ReportedError | None


class OtherReleaseError(StateError):
    """kvd is of another release, whose settings this follower does not know."""

    reason = "other_release"


class Follower:
    """Follows one kvd, over one connection after the other, until it is stopped.

    Args:
        connect: opens a client of kvd.
        figures: counters and state that the follower updates.
        settings_changed: called with the settings at first, and after each change.
        open_url: opens the store at a URL.
        random: source of random pauses.
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
        random = random or Random()  # noqa: S311  # draws pauses only, nothing secret
        self._kvd_pause = Backoff(random, longest_s=KVD_PAUSE_S)
        self._store_pause = Backoff(random)
        self._agenda = Agenda()
        self._wanted = Wanted()
        self._settings = RemoteSettings()
        self._knows_store = True
        self._store_since_unix_s: float | None = None
        self._seen_unix_s = 0.0  # time of the newest event that was received

    @property
    def settings(self) -> RemoteSettings:
        """The section [remote] that is in force in kvd."""
        return self._settings

    def backlog(self) -> Backlog:
        """Return how much is left to do."""
        agenda, oldest_s = self._agenda, self._agenda.oldest_s()
        age_s = 0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s)
        return Backlog(
            agenda.num_unpushed, age_s, agenda.num_drops, len(self._wanted), agenda.num_evicted
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Follow kvd until `stop` is set; then drain, as the settings say.

        If kvd does not answer when `stop` is set, one more try is made before draining is given up.
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
        """Follow kvd over one connection, until `stop` is set.

        Raises:
            ReportedError: kvd does not answer.
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
            self._on_store_opened,
        )
        self._apply_settings(await in_thread(remote_settings, client), work)
        jobs = [self._listen(client, work), self._poll_settings(client, work), work.push()]
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
        """Apply kvd's events for ever.

        Raises:
            ReportedError: the events have ended.
        """
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._watch(client, inbox)
        while True:
            message = await inbox.get()
            if isinstance(message, ReportedError):
                raise message
            if message is None:
                # The subscription is in force: what happened before it is caught up on now.
                await self._apply_missed_deletions(client)
                await self._list(client)
                self._figures.kvd_up = True
                self._kvd_pause.record_success()
                log.info("kvd_followed", num_to_look_at=self._agenda.num_unpushed)
            elif message.name == EVENTS_LOST:
                log.warning("events_lost", num_events=message.fields["num_events"])
                await self._list(client)
            else:
                apply_event(message, self._agenda, self._wanted, time.monotonic())
                self._seen_unix_s = message.unix_s
            work.wake()

    def _watch(self, client: OperatorClient, inbox: asyncio.Queue[Message]) -> None:
        """Start a thread that puts kvd's events into the inbox; it ends with the client."""
        loop = asyncio.get_running_loop()
        request = pb.WatchEventsRequest(names=EVENTS)

        def put(message: Message) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(inbox.put_nowait, message)

        def watch() -> None:
            try:
                for event in client.events(request, lambda: put(None)):
                    put(event)
                put(
                    NotRunningError(
                        "kvd has ended its stream of events", "the follower connects again soon"
                    )
                )
            except ReportedError as error:
                put(error)

        threading.Thread(target=watch, name="events", daemon=True).start()

    async def _apply_missed_deletions(self, client: OperatorClient) -> None:
        """Apply deletions that happened without a connection, as far as kvd remembers them.

        This comes before the events received since: kvd's memory includes them, so they are
        applied twice, which does no harm.
        """
        request = pb.WatchEventsRequest(names=EVENTS, num_recent=MAX_RECENT, recent_only=True)
        for event in await in_thread(lambda: list(client.events(request))):
            if event.unix_s > self._seen_unix_s:
                apply_deletion(event, self._agenda)
                self._seen_unix_s = event.unix_s

    async def _list(self, client: OperatorClient) -> None:
        """List all sessions, to make up for events that were missed."""
        listed = await in_thread(client.sessions, pb.SessionFilter())
        found = [info for info in listed.sessions if not is_unfinished(info.session.session_id)]
        self._agenda.on_listing(found, time.monotonic(), time.time())

    async def _poll_settings(self, client: OperatorClient, work: Work) -> None:
        """Apply changed settings; now and then list all sessions, as some changes have no event."""
        listed_at_s = time.monotonic()
        while True:
            await asyncio.sleep(SETTINGS_EVERY_S)
            found = await in_thread(remote_settings, client)
            is_same = found == self._settings and self._knows_store
            if is_same and time.monotonic() < listed_at_s + LIST_EVERY_S:
                continue
            self._knows_store = True
            self._apply_settings(found, work)
            await self._list(client)
            listed_at_s = time.monotonic()
            work.wake()

    def _on_store_opened(self, since_unix_s: float) -> None:
        """Forget what the store had if it was made again since: its content is lost."""
        if self._store_since_unix_s not in {None, since_unix_s}:
            self._agenda.forget_store()
            self._knows_store = False
        self._store_since_unix_s = since_unix_s

    def _apply_settings(self, settings: RemoteSettings, work: Work) -> None:
        """Apply the settings; with another store, forget what the one before had."""
        before, self._settings = self._settings, settings
        if before == settings:
            return
        if before.url != settings.url:
            self._agenda.forget_store()
        self._agenda.reconfigure(settings.write, settings.quiet)
        work.reconfigure(settings)
        self._settings_changed(settings)
        log.info("remote_settings", **settings.model_dump(mode="json"))

    async def _drain(
        self, client: OperatorClient, work: Work, tasks: "list[asyncio.Task[None]]"
    ) -> None:
        """Push what is left, for at most the time that the settings allow."""
        settings, agenda = self._settings, self._agenda
        if settings.write == "none" or not settings.url or not settings.drain:
            return
        agenda.drain()
        self._store_pause.retry_at_s = 0.0  # do not wait for the store: there is no later try
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
    """Return the section [remote] of kvd's settings, as it is in force there.

    Raises:
        OtherReleaseError: kvd is of a release with other settings.
        ReportedError: kvd does not answer.
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
            f"kvd runs with other [remote] settings than this follower knows ({names})",
            "run kvd remote follow from the same release as kvd",
        ) from error
