"""The order of pushes; what is sent, and at which rate."""

from random import Random

import pytest

from kvd.host.pacing import SharedPace
from kvd.remote.errors import DamagedRemoteError
from kvd.remote.pushing import THREADS, Outcome, Pusher, in_order
from shared.blobs.blob_store import Blob, StoreFailedError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import ConflictError, StateError
from tests.faulty_store import FaultyStore, View
from tests.remote_server import STEP, Server


def _info(name: str, **values: float) -> pb.SessionInfo:
    return pb.SessionInfo(session=pb.SessionKey(session_id=name), **values)


def test_sessions_most_at_risk_are_pushed_first() -> None:
    """Memory before SSD, pinned before others, then by value; ended ones last."""
    sessions = [
        _info("over", num_tokens=9000, dirty_bytes=1, ended=True),
        _info("cold", num_tokens=100, idle_s=3600.0),
        _info("hot", num_tokens=100, idle_s=1.0),
        _info("pinned", num_tokens=1, idle_s=9999.0, pin=pb.PIN_HARD),
        _info("dirty", num_tokens=1, dirty_bytes=5, idle_s=500.0),
        _info("long", num_tokens=100_000, idle_s=3600.0),
    ]
    names = [info.session.session_id for info in in_order(sessions)]
    assert names == ["dirty", "pinned", "long", "hot", "cold", "over"]


class Place:
    """A store, and a server that pushes session "a" to it."""

    def __init__(self) -> None:
        self.store = FaultyStore(Random(5))  # noqa: S311
        self.server = Server("one")
        self.server.sessions["a"] = tuple(range(3 * STEP + 1))
        self.taken: list[int] = []

    def push(
        self, view: View | None = None, idle_s: float = 0.0, threads: int = THREADS, **options: bool
    ):
        calm = View(self.store, is_calm=True)
        pace = SharedPace()
        pace.take = self.taken.append  # type: ignore[method-assign]
        pusher = Pusher(
            *(view or calm, self.server, self.server.owner, pace),
            clock=lambda: 1e9,
            threads=threads,
        )
        info = self.server.info("a")
        info.idle_s = idle_s
        return pusher.push(info, **options)

    def find(self, kind: str) -> str:
        """The name of one of its objects."""
        return next(name for name in self.store.blobs if name.startswith(f"v1/{kind}/"))

    def damage(self, name: str) -> None:
        """Change an object's bytes, but not how many they are."""
        data, stored_s = self.store.blobs[name]
        self.store.blobs[name] = (bytes(byte ^ 1 for byte in data), stored_s)


def test_a_push_that_was_broken_off_goes_on() -> None:
    """What it has sent is not sent again, though no manifest names it yet.

    One thread sends, so that the chunks that arrived are the first ones.
    """
    place = Place()

    class Full(View):
        num_puts = 0

        def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
            self.num_puts += 1
            if self.num_puts > 2:
                raise StoreFailedError("no space left", "free some")
            super().put(name, data, if_absent=if_absent)

    with pytest.raises(StoreFailedError):
        place.push(Full(place.store, is_calm=True), threads=1)
    assert len(place.store.blobs) == 2
    place.taken.clear()
    found = place.push(threads=1)
    assert (found.outcome, len(place.taken)) == (Outcome.PUSHED, 3)
    assert found.sent_bytes == sum(place.taken) < found.num_bytes
    assert place.push().sent_bytes == 0


def test_a_push_stops_looking_at_the_first_missing_chunk() -> None:
    """Its tokens are stored after all chunks: of a new session only the first are looked up."""
    place = Place()
    place.server.sessions["a"] = tuple(range(40 * STEP))
    looks: list[str] = []

    class Watched(View):
        def find(self, name: str) -> Blob | None:
            looks.append(name)
            return super().find(name)

    place.push(Watched(place.store, is_calm=True))
    assert 0 < sum("/chunks/" in name for name in looks) <= THREADS
    assert len(place.taken) == 41  # with the object that has its tokens


def test_chunks_that_a_store_has_lost_are_sent_again() -> None:
    """Although the session is unchanged, and its manifest names them."""

    class Loses(View):
        keeps = False

    place = Place()
    loses = Loses(place.store, is_calm=True)
    whole = place.push(loses)
    assert place.push(loses, idle_s=1.0).outcome is Outcome.UNCHANGED
    chunk = next(name for name in place.store.blobs if name.startswith("v1/chunks/"))
    lost, _ = place.store.blobs.pop(chunk)
    assert (
        place.push(idle_s=1.0).outcome is Outcome.UNCHANGED
    )  # a store that keeps all objects is not asked
    again = place.push(loses, idle_s=1.0)
    assert (again.outcome, again.sent_bytes) == (Outcome.PUSHED, len(lost))
    assert (again.epoch, again.num_bytes) == (whole.epoch, whole.num_bytes)
    assert place.store.blobs[chunk][0] == lost


def test_what_is_damaged_in_the_store_is_sent_again_if_told() -> None:
    """Though the session is unchanged, and the store names it: every chunk is as it was then."""
    place = Place()
    whole = place.push()
    sent = dict(place.store.blobs)
    chunk = place.find("chunks")
    place.damage(chunk)
    again = place.push(idle_s=1.0, resends=True)
    assert (again.outcome, again.epoch) == (Outcome.PUSHED, whole.epoch)
    assert again.sent_bytes == again.num_bytes == whole.num_bytes
    assert place.store.blobs[chunk][0] == sent[chunk][0]


def test_a_session_whose_manifest_is_damaged_is_taken_over() -> None:
    """Nobody knows whose it is: only if told. Its epoch goes on, and its chunks are found."""
    place = Place()
    for _ in range(3):
        place.server.sessions["a"] += (7,)
        before = place.push()
    place.damage(place.find("sessions"))
    with pytest.raises(DamagedRemoteError, match="--take"):
        place.push()
    taken = place.push(takes=True)
    assert (taken.outcome, taken.sent_bytes) == (Outcome.PUSHED, 0)
    assert taken.epoch > before.epoch
    assert place.push(idle_s=1.0).outcome is Outcome.UNCHANGED


def test_a_session_that_changes_meanwhile_is_read_again() -> None:
    """A few times; then it is said."""
    place = Place()
    num_exports = 0

    def changes() -> None:
        nonlocal num_exports
        num_exports += 1
        if num_exports <= 2:
            raise ConflictError("it changed", "try again")

    place.server.on_export = changes
    assert place.push().num_tokens == 3 * STEP + 1
    num_exports = -9
    with pytest.raises(ConflictError):
        place.push()


def test_a_session_without_tokens_is_not_pushed() -> None:
    """There would be nothing to pull."""
    place = Place()
    place.server.sessions["a"] = ()
    with pytest.raises(StateError, match="has no tokens"):
        place.push()
    assert place.store.blobs == {}
