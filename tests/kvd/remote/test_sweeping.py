"""A sweep removes unneeded objects, late enough for pushes that rely on them."""

from collections.abc import Callable
from random import Random

import pytest

from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog
from kvd.remote.chunk_store import list_blobs
from kvd.remote.errors import NotPushedError, SlowPushError, SweepRunningError
from kvd.remote.manifest import Owner
from kvd.remote.pulling import Puller
from kvd.remote.pushing import Pusher
from kvd.remote.sweeping import KNOWN_S, LEASE_S, UNNAMED_S, Sweeper, SweepResult
from shared.blobs.history_entry import HistoryEntry, encode_entry
from shared.blobs.register import Register
from shared.blobs.release import (
    CONVERSATIONS,
    DELETED_BYTES,
    HISTORIES,
    RESPONSES,
    TRANSCRIPTS,
)
from shared.blobs.response_entry import DELETED, ResponseEntry, encode_response
from tests.faulty_store import FaultyStore, View
from tests.remote_server import STEP, Server

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TOKENS = tuple(range(3 * STEP))


class World:
    """A store without faults, whose clock tests set, and a server."""

    def __init__(self) -> None:
        self.store = FaultyStore(Random(1))  # noqa: S311
        self.view = View(self.store, is_calm=True)
        self.server = Server("one")

    def push(
        self, session: str = "a", tokens: tuple[int, ...] = TOKENS, expires_in_s: float = -1.0
    ) -> None:
        self.server.sessions[session] = tokens
        pusher = Pusher(
            self.view,
            self.server,
            self.server.owner,
            SharedPace(),
            clock=lambda: self.store.now_s,
            monotonic=lambda: self.store.now_s,
        )
        pusher.push(self.server.info(session, expires_in_s))

    def pull(self, session: str = "a") -> tuple[int, ...]:
        reader = Server("reader")
        found = Catalog(self.view).find("default", session)
        puller = Puller(self.view, reader, reader.owner, SharedPace())
        puller.pull(found, self.store.now_s, copies=True)
        return reader.sessions[session]

    def drop(self, session: str = "a") -> None:
        catalog = Catalog(self.view)
        catalog.drop(catalog.find("default", session))

    def sweep(self, after_s: float = 0.0) -> SweepResult:
        self.store.now_s += after_s
        return Sweeper(self.view, Owner("", "sweeper"), lambda: self.store.now_s).sweep()

    def during_the_next_push(self, do: Callable[[], object]) -> None:
        """Run something after the next push has begun."""

        def once() -> None:
            self.server.on_export = lambda: None
            do()

        self.server.on_export = once

    def names(self, kind: str) -> list[str]:
        return [name for name in self.store.blobs if name.startswith(f"v1/{kind}/")]


def test_chunks_are_removed_a_day_after_they_were_condemned() -> None:
    """By the sweep after that; then their list, and the session's entry, are removed, too."""
    world = World()
    world.push()
    world.push("b", TOKENS[:STEP])
    world.drop()
    assert world.sweep(HOUR_S).num_condemned == 0  # an interrupted push continues
    assert world.sweep(DAY_S).num_condemned == 3  # the first chunk is of the other session
    assert world.sweep(DAY_S - 1).num_removed == 0
    found = world.sweep(1)
    assert (found.num_removed, found.num_forgotten, found.num_sessions) == (3, 0, 1)
    world.sweep(DAY_S)
    assert (len(world.names("chunks")), world.names("condemned")) == (2, [])
    assert len(world.names("sessions")) == 1
    assert world.pull("b") == TOKENS[:STEP]


def test_expired_sessions_are_not_pulled_and_are_swept() -> None:
    """By the store's clock, counted from the time when the manifest was stored."""
    world = World()
    world.push(expires_in_s=2 * HOUR_S)
    assert world.sweep(2 * HOUR_S - 1).num_expired == 0
    assert world.pull() == TOKENS
    world.store.now_s += 1
    with pytest.raises(NotPushedError, match="has expired"):
        world.pull()
    assert world.sweep().num_expired == 1
    with pytest.raises(NotPushedError, match="has no session"):
        world.pull()
    world.push()
    assert world.pull() == TOKENS


@pytest.mark.parametrize("pauses_s", [(0.0, 0.0), (0.0, HOUR_S), (0.0, DAY_S / 2 - 1)])
def test_a_push_keeps_the_chunks_that_it_has_found(pauses_s: tuple[float, ...]) -> None:
    """Unnamed chunks, condemned during the push, and seen by sweeps after it."""
    world = World()
    world.push()
    world.drop()
    world.store.now_s += 2 * DAY_S
    world.during_the_next_push(lambda: [world.sweep(pause) for pause in pauses_s])
    world.push("b")
    assert world.names("condemned")
    for _ in range(4):
        assert world.pull("b") == TOKENS
        world.sweep(DAY_S)
    assert world.pull("b") == TOKENS


def test_a_push_does_not_rely_on_condemned_chunks() -> None:
    """A sweep that has read all manifests removes them, though one names their like by then."""
    world = World()
    world.push()
    world.drop()
    world.sweep(2 * DAY_S)
    world.store.now_s += DAY_S

    class PushingView(View):
        def list(self, prefix: str):
            if prefix.startswith("v1/chunks"):
                world.push("b")
            return super().list(prefix)

    view = PushingView(world.store, is_calm=True)
    found = Sweeper(view, Owner("", "sweeper"), lambda: world.store.now_s).sweep()
    assert found.num_removed == 4
    assert world.pull("b") == TOKENS
    world.push("b", (*TOKENS, 1))  # found by the manifest, under its names
    assert world.pull("b") == (*TOKENS, 1)


def test_a_push_that_takes_too_long_fails() -> None:
    """Its chunks may have been removed: it fails, and the old manifest stays."""
    world = World()
    world.push()

    def wait() -> None:
        world.store.now_s += DAY_S / 2 + 1

    world.during_the_next_push(wait)
    with pytest.raises(SlowPushError, match="push it again"):
        world.push("a", (*TOKENS, 1))
    assert world.pull() == TOKENS


def test_an_unreadable_manifest_stops_the_sweep() -> None:
    """Its chunks are unknown."""
    world = World()
    world.push()
    world.push("b", (7,))
    world.drop("b")
    name = world.names("sessions")[0]
    data, stored_s = world.store.blobs[name]
    world.store.blobs[name] = (data[:-1], stored_s)
    for _ in range(4):
        found = world.sweep(DAY_S)
        assert (found.num_damaged, found.num_condemned, found.num_removed) == (1, 0, 0)


def test_only_one_sweep_runs_at_a_time() -> None:
    """After the lease of one that died has ended the next may run."""
    world = World()

    class StoppingView(View):
        def list(self, prefix: str):
            if prefix.startswith("v1/sessions"):
                raise KeyboardInterrupt
            return super().list(prefix)

    stopped = Sweeper(StoppingView(world.store, is_calm=True), Owner("", "another"))
    stopped._end = lambda: None  # it died
    with pytest.raises(KeyboardInterrupt):
        stopped.sweep()
    with pytest.raises(SweepRunningError, match="another is already sweeping the object store"):
        world.sweep(LEASE_S - 1)
    world.sweep(1)
    world.sweep()


@pytest.mark.parametrize("kind", [TRANSCRIPTS, CONVERSATIONS])
def test_deletions_are_forgotten_after_all_servers_know_them(kind: str) -> None:
    """Not the transcript of a session, however old, nor a name that was used again."""
    world = World()
    for place, values in {
        "gone": (b"words of the session", bytes(DELETED_BYTES)),
        "there": (b"words of the session",),
        "again": (bytes(DELETED_BYTES), b"other words of it"),
    }.items():
        register = Register(world.view, f"{kind}/tenant/{place}")
        for value in values:
            register.replace(register.look(), value)
    world.sweep(after_s=KNOWN_S - 1)
    assert len(list_blobs(world.view, kind)) == 3
    assert world.sweep(after_s=2).num_forgotten == 1
    assert world.sweep(after_s=10 * UNNAMED_S).num_forgotten == 0
    left = {blob.name.split("/")[3] for blob in list_blobs(world.view, kind)}
    assert left == {"there", "again"}


class Unnamed:
    """Conversations in a store that no client has named."""

    def __init__(self) -> None:
        self.world = World()

    def add(self, session: str, data: bytes = b"words of the session") -> None:
        """Add a turn at the end of a session."""
        place = f"{TRANSCRIPTS}/tenant/{session}"
        register = Register(self.world.view, place)
        seen = register.look()
        register.replace(seen, b"%d: %s" % (seen.number, data) if len(data) > 8 else data)
        entry = encode_entry(HistoryEntry(session, place))
        self.world.view.put(f"{HISTORIES}/tenant/{session}-{seen.number}", entry)

    def respond(self, session: str, *, named: bool = False) -> None:
        """Add a turn of a session that is known by its response only."""
        place = f"{TRANSCRIPTS}/tenant/{session}"
        register = Register(self.world.view, place)
        register.replace(register.look(), b"words of the session")
        entry = encode_response(ResponseEntry(place, session, 1, "r", named, {}))
        assert entry is not None
        self.world.view.put(f"{RESPONSES}/tenant/{session}", entry)

    def left(self) -> tuple[set[str], set[str]]:
        """Return the sessions with transcripts in the store, and the histories there."""
        transcripts, histories = self.world.names("transcripts"), self.world.names("histories")
        return {name.split("/")[3] for name in transcripts}, {
            name.split("/")[3] for name in histories
        }


def test_an_unnamed_conversation_is_removed_when_it_is_not_continued() -> None:
    """Its last turn counts; deletions are forgotten as usual."""
    talks = Unnamed()
    for session in ("left", "used", "gone"):
        talks.add(session)
    talks.add("gone", bytes(DELETED_BYTES))
    talks.world.store.now_s += UNNAMED_S / 2
    talks.add("used")
    assert talks.world.sweep(after_s=UNNAMED_S / 2 - 1).num_unnamed == 0
    assert len(talks.left()[1]) == 5
    assert talks.world.sweep(after_s=1).num_unnamed == 1
    assert talks.left() == ({"used"}, {"used-1"})


def test_a_conversation_of_responses_is_removed_likewise() -> None:
    """If its session has a name only the responses go. So do marks, and damaged objects."""
    talks = Unnamed()
    talks.respond("left")
    talks.respond("named", named=True)
    talks.world.view.put(f"{RESPONSES}/tenant/deleted", DELETED)
    talks.world.view.put(f"{RESPONSES}/tenant/damaged", b"{}")
    talks.world.store.now_s += UNNAMED_S / 2
    talks.respond("used")
    assert talks.world.sweep(after_s=UNNAMED_S / 2 - 1).num_unnamed == 0
    assert len(talks.world.names("responses")) == 5
    assert talks.world.sweep(after_s=1).num_unnamed == 1
    assert talks.left()[0] == {"used", "named"}
    assert talks.world.names("responses") == [f"{RESPONSES}/tenant/used"]


def test_objects_without_a_transcript_are_removed_alone() -> None:
    """Whoever created them: nothing else is removed with them."""
    world = World()
    world.push()
    (manifest,) = world.names("sessions")
    for number, place in enumerate((manifest.rpartition("/")[0], TRANSCRIPTS, "")):
        entry = encode_entry(HistoryEntry("a", place))
        world.view.put(f"{HISTORIES}/tenant/{number}", entry)
    world.view.put(f"{HISTORIES}/tenant/damaged", b"[]")
    world.view.put(f"{TRANSCRIPTS}/tenant/named/{1:020d}", b"words of a named session")
    assert world.sweep(after_s=UNNAMED_S).num_unnamed == 0
    assert (len(world.names("transcripts")), world.names("histories")) == (1, [])
    assert world.pull() == TOKENS
