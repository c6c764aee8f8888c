"""A follower's work, with servers and a store in memory: failures are retried."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from random import Random

import pytest
from structlog.testing import capture_logs

from kvd.config import RemoteSettings
from kvd.errors import NotRunningError
from kvd.following.agenda import Agenda
from kvd.following.figures import Figures
from kvd.following.transfers import StoppedError
from kvd.following.wanted import Wanted
from kvd.following.work import Work
from kvd.remote.catalog import Catalog
from kvd.remote.names import session_place
from shared.blobs.blob_store import StoreDeniedError
from shared.process.backoff import Backoff
from shared.types.errors import StateError
from tests.faulty_store import FaultyStore, Odds, View
from tests.kvd.following.sessions import A, B
from tests.remote_server import STEP, Server

FAILS = Odds(fails=1.0)
URL = "file:///store"


class Scene:
    """One server's work, on a store that others use, too.

    Attributes: opened: URLs of stores that were opened.
    """

    def __init__(self, name="one", store=None, **settings) -> None:
        self.store = store or FaultyStore(Random(4))  # noqa: S311
        self.server = Server(name)
        self.agenda, self.wanted, self.figures = Agenda(), Wanted(), Figures()
        self.pause = Backoff(Random(4), first_s=0.001, longest_s=0.002)  # noqa: S311
        self.settings = RemoteSettings(url=URL, write="all", quiet=0.0, pull=True, **settings)
        self.agenda.reconfigure("all", 0.0)
        self.opened: list[str] = []
        self.work = Work(
            self.server,
            self.server.owner,
            self.settings,
            self._open,
            self.agenda,
            self.wanted,
            self.pause,
            self.figures,
        )

    def _open(self, url: str) -> View:
        self.opened.append(url)
        return View(self.store)

    def stores(self, key=A, tokens=tuple(range(STEP))) -> None:
        """Store a session in kvd, which reports it."""
        self.server.sessions[key.session_id] = tokens
        self.agenda.on_stored(key, 0.0, len(tokens))
        self.work.wake()

    def manifest(self, key=A):
        found = Catalog(View(self.store, is_calm=True)).read(session_place(key))
        return None if found is None else found.manifest

    @asynccontextmanager
    async def working(self):
        jobs = (self.work.push(), *(self.work.pull() for _ in range(3)))
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            yield self
        finally:
            self.work.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(is_true) -> None:
    """Wait for the progress of other tasks and threads."""
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110  # several tasks, and no event of all
            await asyncio.sleep(0.001)


async def test_pushes_drops_and_pulls_are_counted():
    """Each by its result."""
    one = Scene()
    two = Scene("two", one.store)
    async with one.working(), two.working():
        one.stores()
        await until(lambda: one.agenda.is_done)
        two.wanted.add(A, time.monotonic())
        two.wanted.add(B, time.monotonic())
        two.work.wake()
        await until(lambda: two.figures.pulls.counts.total() == 2)
        assert two.server.sessions["a"] == one.server.sessions["a"]
        assert dict(two.figures.pulls.counts) == {("pulled",): 1, ("absent",): 1}
        with capture_logs() as lines:
            for tokens in (range(STEP + 1), range(STEP + 2)):
                one.stores(tokens=tuple(tokens))
                await until(lambda: one.agenda.is_done)
        assert [line["event"] for line in lines] == ["session_fenced", *["session_pushed"] * 2]
        one.agenda.on_deleted(A, 4e9, of_others=False)
        one.work.wake()
        await until(lambda: one.agenda.is_done)
    assert dict(one.figures.pushes.counts) == {("pushed",): 3, ("fenced",): 1}
    assert dict(one.figures.drops.counts) == {("dropped",): 1}
    assert one.figures.bytes["sent"] > one.figures.bytes["received"] == 0
    assert (one.figures.store_up, one.manifest().dropped) == (True, True)


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_failing_store_is_retried_until_it_answers(is_open):
    """One line reports the failure, one the recovery; the work is done afterwards."""
    scene = Scene()
    with capture_logs() as lines:
        async with scene.working():
            if is_open:
                scene.stores(B)
                await until(lambda: scene.agenda.is_done)
            scene.store.odds = FAILS
            scene.stores()
            await until(lambda: scene.pause._num_failures > 3)
            assert scene.figures.store_up is False
            scene.store.odds = Odds()
            await until(lambda: scene.agenda.is_done)
    events = [line["event"] for line in lines if line["event"] != "session_pushed"]
    assert events == ["remote_store_fails", "remote_store_answers"]
    assert scene.manifest().num_tokens == STEP


async def test_a_store_that_was_away_is_examined_again():
    """It may have been replaced: its start is reported each time."""
    scene, told = Scene(), []
    scene.work._store_opened = told.append
    async with scene.working():
        scene.stores()
        await until(lambda: scene.agenda.is_done)
        scene.store.odds = FAILS
        scene.stores(B)
        await until(lambda: scene.pause.is_failing)
        scene.store.blobs.clear()
        scene.store.now_s += 60
        scene.store.odds = Odds()
        await until(lambda: scene.agenda.is_done)
    assert told == [scene.store.now_s - 60, scene.store.now_s]


async def test_no_turn_waits_for_a_failing_store():
    """Requests are given up while the store is not used: their turns compute."""
    scene = Scene()
    scene.pause = scene.work._pause = Backoff(Random(4), first_s=1000.0)  # noqa: S311
    scene.store.odds = FAILS
    async with scene.working():
        scene.stores()
        await until(lambda: scene.pause.is_failing)
        scene.wanted.add(A, time.monotonic())
        scene.work.wake()
        await until(lambda: not len(scene.wanted))
        num_opened = len(scene.opened)
        scene.store.odds = Odds()
        scene.work.reconfigure(scene.settings.model_copy(update={"url": "file:///other"}))
        await until(lambda: scene.agenda.is_done)
    assert scene.opened[num_opened:] == ["file:///other"]
    assert not scene.figures.pulls.counts


def wants(scene, *keys) -> None:
    """Let turns request sessions."""
    for key in keys:
        scene.wanted.add(key, time.monotonic())
    scene.work.wake()


async def test_requests_are_answered():
    """As coming before a fetch, and as missing: the store has nothing, or kvd has it."""
    one = Scene()
    two = Scene("two", one.store)
    async with one.working():
        one.stores()
        await until(lambda: one.agenda.is_done)
    async with two.working():
        wants(two, A, B)
        await until(lambda: two.figures.pulls.counts.total() == 2)
        await until(lambda: len(two.server.answers) == 2)
        wants(two, A)
        await until(lambda: len(two.server.answers) == 3)
    assert sorted(two.server.answers[:2]) == [("a", True), ("b", False)]
    assert two.server.answers[2] == ("a", False)


async def test_a_session_that_continued_elsewhere_comes_back():
    """Its server has an older part: the rest is fetched, and the server becomes the owner."""
    one = Scene()
    two = Scene("two", one.store)
    async with one.working(), two.working():
        one.stores()
        await until(lambda: one.agenda.is_done)
        wants(two, A)
        await until(lambda: two.figures.pulls.counts["pulled",] == 1)
        two.stores(tokens=tuple(range(2 * STEP)))
        await until(lambda: two.agenda.is_done)
        wants(one, A)
        await until(lambda: one.figures.pulls.counts["pulled",] == 1)
        assert one.server.answers == [("a", True)]
        assert len(one.server.sessions["a"]) == 2 * STEP
        one.stores(tokens=tuple(range(3 * STEP)))
        await until(lambda: one.agenda.is_done)
    assert (one.manifest().owner_name, one.manifest().num_tokens) == ("one", 3 * STEP)
    assert not one.figures.pushes.counts["fenced",]


async def test_an_active_pull_delays_no_answer():
    """No request is answered twice at a time; a repeated one is answered as coming."""
    one = Scene()
    async with one.working():
        one.stores()
        await until(lambda: one.agenda.is_done)
    two = Scene("two", one.store)
    begun, may_end = threading.Event(), threading.Event()
    import_session = two.server.import_session

    def hold(*args):
        begun.set()
        may_end.wait(30)
        return import_session(*args)

    two.server.import_session = hold
    two.work._pulls = asyncio.Semaphore(1)
    async with two.working():
        wants(two, A)
        await until(begun.is_set)
        assert two.server.answers == [("a", True)]
        wants(two, A, B)
        await until(lambda: len(two.server.answers) == 3)
        assert sorted(two.server.answers[1:]) == [("a", True), ("b", False)]
        may_end.set()
        await until(lambda: two.figures.pulls.counts["pulled",] == 1)
    assert len(two.server.answers) == 3


@pytest.mark.parametrize(
    "fault", ["not opened", "fails", "refused", "stopped", "left alone", "no store"]
)
async def test_failed_fetches_are_answered(fault):
    """The store fails, is not used for a while, or kvd refuses the session."""
    one = Scene()
    async with one.working():
        one.stores()
        await until(lambda: one.agenda.is_done)
    two = Scene("two", one.store)
    wanted = [("a", False)]
    if fault == "not opened":
        one.store.odds = FAILS
    elif fault == "left alone":
        two.pause.retry_at_s = float("inf")
    elif fault == "no store":
        two.work.reconfigure(two.settings.model_copy(update={"url": ""}))
    elif fault != "fails":

        def refuse(*_):
            if fault == "stopped":
                two.work.stop()
                raise StoppedError("the follower stops", "it goes on later")
            raise StateError("kvd does not want it", "see its log")

        two.server.import_session = refuse
        wanted = [("a", True), ("a", False)]
    async with two.working():
        if fault == "fails":
            wants(two, B)
            await until(lambda: two.server.answers == [("b", False)])
            two.server.answers.clear()
            one.store.odds = FAILS
        wants(two, A)
        await until(lambda: two.server.answers == wanted)
    assert two.figures.pulls.counts["failed",] == (fault in ("fails", "refused"))


async def test_an_answer_to_a_lost_kvd_is_dropped():
    """The work continues: it looks for the next kvd."""
    scene = Scene()
    heard = []

    def gone(key, *, coming):
        heard.append((key.session_id, coming))
        raise NotRunningError("no kvd answers", "start it")

    scene.server.answer_wanted = gone
    async with scene.working():
        wants(scene, A, B)
        await until(lambda: len(heard) == 2)
    assert sorted(heard) == [("a", False), ("b", False)]


async def test_a_failing_session_delays_no_other():
    """It is named in the log, and retried later."""
    scene = Scene()
    with capture_logs() as lines:
        async with scene.working():
            scene.stores(A, ())  # a session without tokens cannot be pushed
            scene.stores(B)
            await until(lambda: scene.manifest(B) is not None and not scene.agenda.is_busy)
    failed = next(line for line in lines if line["event"] == "session_not_pushed")
    assert failed["session"] == str(A)
    assert scene.agenda.num_unpushed == 1
    assert scene.figures.pushes.counts["failed",] == 1


async def test_a_store_that_denies_access_counts_as_failing():
    """Credentials may be corrected while the follower runs."""
    scene = Scene()

    class Denied(View):
        def put(self, *_, **__) -> None:
            raise StoreDeniedError("the store refuses these credentials", "see the environment")

    scene.work._open_url = lambda _: Denied(scene.store)
    with capture_logs() as lines:
        async with scene.working():
            scene.stores()
            await until(lambda: scene.pause._num_failures > 2)
            scene.work._open_url = scene._open
            await until(lambda: scene.agenda.is_done)
    assert lines[0]["event"] == "remote_store_fails"


async def test_active_work_at_the_end_stays_to_be_done():
    """The end waits for the thread, so that no session is ever pushed twice at once."""
    scene, begun, may_end = Scene(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        may_end.wait(30)

    scene.server.on_export = hold
    async with scene.working():
        scene.stores()
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.01, may_end.set)
    assert may_end.is_set()
    assert (scene.agenda.is_busy, scene.agenda.num_unpushed) == (False, 1)
    assert scene.manifest() is None


async def test_without_a_store_there_is_no_work():
    """Until one is configured."""
    scene = Scene()
    scene.work.reconfigure(scene.settings.model_copy(update={"url": ""}))
    async with scene.working():
        scene.stores()
        await asyncio.sleep(0)
        assert (scene.opened, scene.agenda.is_done) == ([], False)
        scene.work.reconfigure(scene.settings)
        await until(lambda: scene.agenda.is_done)
