"""Pushes, drops and pulls between servers in memory: owners of sessions, and conflicts."""

from collections import Counter
from random import Random

import pytest

from kvd.core.operations.growing import NOT_FETCHED
from kvd.errors import InUseError, LimitReachedError
from kvd.following import transfers as following_transfers
from kvd.following.steps import Drop, Push
from kvd.following.transfers import StoppedError, Transfers
from kvd.remote.catalog import Catalog
from kvd.remote.errors import FencedError
from kvd.remote.names import session_place
from kvd.session_files.file_format import SessionFileError
from kvd.session_files.frame_writer import held_bytes
from shared.blobs.blob_store import OvertakenError
from shared.types.errors import ConflictError, StateError
from tests.faulty_store import FaultyStore, View
from tests.kvd.following.sessions import A
from tests.remote_server import STEP, Server
from tests.synthetic_engine import encode

TOKENS = tuple(range(3 * STEP))
LATER, EARLIER = 4e9, 0.0  # unix seconds, after and before all pushes


class Place:
    """A store, and two servers that use it; the first has pushed session A."""

    def __init__(self) -> None:
        self.store = FaultyStore(Random(3))  # noqa: S311
        self.view = View(self.store, is_calm=True)
        self.servers = [Server("one"), Server("two")]
        self.transfers = [
            Transfers(self.view, server, server.owner, rate=0) for server in self.servers
        ]
        self.servers[0].sessions["a"] = TOKENS
        self.transfers[0].open()
        assert self.transfers[0].push(Push(A)) is not None

    def pull(self, number, key=A):
        """Find a session and pull it; None: there is nothing to pull."""
        transfers = self.transfers[number]
        found = transfers.find(key)
        return found and transfers.pull(key, found)

    @property
    def manifest(self):
        return Catalog(self.view).read(session_place(A)).manifest


def test_the_pulling_server_becomes_the_owner():
    """The previous owner learns it, and takes the session over only on request."""
    place = Place()
    info, pulled = place.pull(1)
    assert (info.num_tokens, pulled.epoch) == (len(TOKENS), 2)
    assert place.servers[1].sessions["a"] == TOKENS
    with pytest.raises(FencedError) as fenced:
        place.transfers[0].push(Push(A))
    assert fenced.value.details == {"owner": "two", "epoch": "2", "num_tokens": str(len(TOKENS))}
    place.servers[0].sessions["a"] = (*TOKENS, 7)
    place.transfers[0].push(Push(A, takes=True))
    assert (place.manifest.owner_name, place.manifest.epoch) == ("one", 3)


def test_a_stored_session_is_not_pulled():
    """Nor one that was never pushed, or was dropped; the owner does not change."""
    place = Place()
    place.servers[1].sessions["a"] = TOKENS
    assert place.pull(1) is None
    assert place.pull(1, A._replace(session_id="other")) is None
    del place.servers[1].sessions["a"]
    place.transfers[0].drop(Drop(A, LATER, of_others=False))
    assert place.pull(1) is None
    assert place.manifest.owner_name == "one"


def test_a_busy_kvd_is_asked_again(monkeypatch):
    """Others may have as many active transfers as it allows; this is no failure."""
    monkeypatch.setattr("kvd.following.transfers.BUSY_S", 0.0)
    place = Place()
    _, sink = place.servers
    refused = []

    def busy(do):
        def tried(*args, **kwargs):
            if len(refused) % 3 < 2:
                refused.append(do)
                raise LimitReachedError("8 sessions are being exported or imported", "wait for one")
            refused.append(do)
            return do(*args, **kwargs)

        return tried

    monkeypatch.setattr(sink, "import_session", busy(sink.import_session))
    info, pulled = place.pull(1)
    assert (info.num_tokens, len(refused)) == (len(TOKENS), 3)
    assert place.manifest.owner_name == "two"
    assert pulled.epoch == place.manifest.epoch
    monkeypatch.setattr(sink, "export_chunks", busy(sink.export_chunks))
    sink.sessions["a"] = (*TOKENS, 7)
    assert place.transfers[1].push(Push(A)) is not None
    assert (place.manifest.num_tokens, len(refused)) == (len(TOKENS) + 1, 6)


def test_a_shorter_part_is_replaced_by_the_pulled_session():
    """The session continued elsewhere, and comes back."""
    place = Place()
    place.servers[1].sessions["a"] = TOKENS[:STEP]
    info, pulled = place.pull(1)
    assert (info.num_tokens, pulled.epoch) == (len(TOKENS), 2)
    assert place.servers[1].sessions["a"] == TOKENS
    assert place.manifest.owner_name == "two"


def test_a_kvd_that_accepts_no_tail_gets_the_whole_session():
    """An older release calls a tail a damaged file."""
    place = Place()
    server = place.servers[1]
    server.sessions["a"] = TOKENS[:STEP]
    take, refused = server.import_session, []

    def refuse(target, pieces):
        got = list(pieces)
        if held_bytes(encode(TOKENS[:STEP])) in got:
            refused.append(got)
            raise SessionFileError("the session file is damaged", "copy it again")
        return take(target, iter(got))

    server.import_session = refuse
    info, _ = place.pull(1)
    assert (info.num_tokens, len(refused)) == (len(TOKENS), 1)
    assert server.sessions["a"] == TOKENS


def test_a_server_pulls_what_it_has_lost_of_its_own_push():
    """A session that is shorter for another reason is its present state, not pushed yet."""
    place = Place()
    server = place.servers[0]
    server.sessions["a"] = TOKENS[:STEP]
    assert place.pull(0) is None
    server.lost = "evicted"
    assert place.pull(0) is not None
    assert server.sessions["a"] == TOKENS
    assert (place.manifest.owner_name, place.manifest.epoch) == ("one", 1)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_session_that_grows_meanwhile_is_not_replaced(when):
    """Whatever a turn has stored since stays, even if it is less than was pushed."""
    place = Place()
    server, transfers = place.servers[1], place.transfers[1]
    server.sessions["a"] = TOKENS[:STEP]
    found = transfers.find(A)
    if when == "before":
        server.sessions["a"] = after = (*TOKENS, 7)
    else:
        take, after = server.import_session, (1, *TOKENS[:STEP])

        def grow(*args):
            server.sessions["a"] = after
            return take(*args)

        server.import_session = grow
    assert transfers.pull(A, found) is None
    assert server.sessions["a"] == after


def test_a_conflict_with_a_pull_is_retried(monkeypatch):
    """A turn uses the local session, or its owner has pushed it once more."""
    monkeypatch.setattr(following_transfers, "BUSY_S", 0.0)
    place = Place()
    server, transfers = place.servers[1], place.transfers[1]
    server.sessions["a"] = TOKENS[:STEP]
    found = transfers.find(A)
    place.servers[0].sessions["a"] = longer = (*TOKENS, 7)
    place.transfers[0].push(Push(A))
    take, refused = server.import_session, []

    def refuse_once(*args):
        if not refused:
            refused.append(args)
            raise InUseError("it is in use", "wait")
        return take(*args)

    server.import_session = refuse_once
    assert transfers.pull(A, found) is not None
    assert server.sessions["a"] == longer
    assert (len(refused), place.manifest.owner_name, place.manifest.epoch) == (1, "two", 2)


def test_a_session_in_use_is_not_replaced(monkeypatch):
    """kvd says so, for as long as the caller waits; any other conflict is a failure."""
    monkeypatch.setattr(following_transfers, "BUSY_S", 0.0)
    place = Place()
    server, transfers = place.servers[1], place.transfers[1]
    server.sessions["a"] = TOKENS[:STEP]
    found = transfers.find(A)

    def refuse(*_):
        raise InUseError("it is in use", "wait")

    def fail(*_):
        raise ConflictError("somebody is at it", "try again")

    server.import_session = refuse
    assert transfers.pull(A, found) is None
    assert server.sessions["a"] == TOKENS[:STEP]
    del server.sessions["a"]
    server.import_session = fail
    with pytest.raises(ConflictError):
        transfers.pull(A, transfers.find(A))


def test_a_turn_that_stores_meanwhile_wins():
    """kvd refuses the replacement; this server owns the session now, and pushes it."""
    place = Place()
    server = place.servers[1]

    def refuse(*_):
        error = StateError("it came meanwhile", "say --replace")
        error.reason = "session_exists"
        server.sessions["a"] = (1, 2)
        raise error

    server.import_session = refuse
    assert place.pull(1) is None
    assert server.sessions["a"] == (1, 2)
    place.transfers[1].push(Push(A))
    assert (place.manifest.owner_name, place.manifest.num_tokens) == ("two", 2)


def test_which_sessions_are_dropped():
    """The server's own; others' only if the session has ended; and no later one of that name."""
    place = Place()
    assert not place.transfers[1].drop(Drop(A, LATER, of_others=False))
    assert not place.transfers[0].drop(Drop(A, EARLIER, of_others=False))
    assert place.transfers[1].drop(Drop(A, LATER, of_others=True))
    assert place.manifest.dropped
    assert not place.transfers[1].drop(Drop(A, LATER, of_others=True))
    place.transfers[0].push(Push(A))
    assert not place.manifest.dropped
    assert place.transfers[0].drop(Drop(A, LATER, of_others=False))


def test_a_missing_session_is_not_pushed():
    """The store keeps its copy."""
    place = Place()
    del place.servers[0].sessions["a"]
    assert place.transfers[0].push(Push(A)) is None
    assert not place.manifest.dropped


def test_a_remnant_does_not_replace_a_longer_session():
    """Evicted tokens are valuable in the store; a session that is shorter otherwise replaces it."""
    place = Place()
    server = place.servers[0]
    server.sessions["a"] = TOKENS[:STEP]
    server.lost = "evicted"
    _, result = place.transfers[0].push(Push(A))
    assert (result.outcome, place.manifest.num_tokens) == ("longer", len(TOKENS))
    server.lost = ""
    place.transfers[0].push(Push(A))
    assert place.manifest.num_tokens == STEP


def test_a_partly_fetched_session_replaces_nothing():
    """Not even on request: another server has become the owner meanwhile."""
    place = Place()
    server = place.servers[1]
    server.sessions["a"], server.lost = TOKENS[:STEP], NOT_FETCHED
    _, result = place.transfers[1].push(Push(A, takes=True))
    assert (result.outcome, place.manifest.owner_name) == ("longer", "one")
    server.lost = ""
    place.transfers[1].push(Push(A, takes=True))
    assert (place.manifest.owner_name, place.manifest.num_tokens) == ("two", STEP)


def test_an_overtaken_drop_is_retried():
    """But not for ever."""
    place = Place()
    num_looks = 0

    def replaced(found):
        nonlocal num_looks
        num_looks += 1
        raise OvertakenError("replaced", "try again")

    place.transfers[0]._catalog.drop = replaced
    with pytest.raises(OvertakenError):
        place.transfers[0].drop(Drop(A, LATER, of_others=False))
    assert num_looks > 1


def test_a_stop_interrupts_transfers():
    """They end at their next piece, and count when they are repeated."""
    place = Place()
    one = place.transfers[0]
    place.servers[0].sessions["a"] = (*TOKENS, *TOKENS)
    place.servers[0].on_export = one.stop
    with pytest.raises(StoppedError):
        one.push(Push(A))
    assert place.manifest.num_tokens == len(TOKENS)
    with pytest.raises(StoppedError):
        one.find(A)
    place.servers[0].on_export = lambda: None
    again = Transfers(place.view, place.servers[0], place.servers[0].owner, rate=0)
    again.push(Push(A))
    assert place.manifest.num_tokens == 2 * len(TOKENS)


def test_a_bandwidth_limit_does_not_delay_the_end():
    """A push that waits for its share of the bandwidth ends at once."""
    place = Place()
    slow = Transfers(place.view, place.servers[0], place.servers[0].owner, rate=1)
    place.servers[0].sessions["a"] = tuple(range(100, 100 + 9 * STEP))
    place.servers[0].on_export = slow.stop
    with pytest.raises(StoppedError):
        slow.push(Push(A))


def test_a_request_limit_does_not_delay_the_end():
    """The first request passes, the second would wait for a quarter of an hour."""
    place = Place()
    server = place.servers[0]
    slow = Transfers(
        place.view, server, server.owner, requests=0.001, on_request=lambda _: slow.stop()
    )
    server.sessions["a"] = (*TOKENS, 7)
    with pytest.raises(StoppedError):
        slow.push(Push(A))
    assert place.manifest.num_tokens == len(TOKENS)


def test_every_request_is_counted():
    """By kind: those of opening the store, of a push, and of a drop."""
    place, told = Place(), Counter()
    server = place.servers[0]
    one = Transfers(place.view, server, server.owner, on_request=lambda kind: told.update([kind]))
    since_s = place.store.blobs["v1/format"][1]
    assert (one.open(), told) == (since_s, {"put": 1, "get": 1, "find": 1})
    told.clear()
    server.sessions["a"] = (*TOKENS, *TOKENS)
    one.push(Push(A))
    assert 1 <= told["find"] <= 4  # until a chunk is known not to be there
    assert (told["put"], told["delete"]) == (5, 1)  # of chunks, token ids, and the manifest
    assert {"get", "list"} < told.keys()
    told.clear()
    one.drop(Drop(A, LATER, of_others=False))
    assert (told["put"], told["find"]) == (1, 0)
