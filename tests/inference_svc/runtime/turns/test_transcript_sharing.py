"""Transcripts that services share through an object store."""

import threading
from collections import defaultdict
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from inference_svc.core.errors import (
    SessionMovedError,
    TranscriptUnavailableError,
    UnknownSessionError,
)
from inference_svc.core.transcript_format import TranscriptDamagedError, TranscriptSealedError
from inference_svc.core.turn_record import CLIENT, Discard
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_transcripts import (
    SharedTranscript,
    SharedTranscripts,
    register_of,
)
from inference_svc.runtime.turns.store_calls import StoreCalls, StoreSilentError
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from inference_svc.runtime.turns.transcript_sharing import Verdict, verdict_on
from shared.blobs.register import NOTHING, Seen
from shared.blobs.release import DELETED_BYTES
from shared.encryption.key_file import new_key
from shared.encryption.sealer import MARK, Sealer
from shared.process.backoff import Backoff
from shared.types.session_key import SessionKey
from tests.faulty_store import FaultyStore, Odds, View
from tests.inference_svc.runtime.turns.test_transcript import record

KEY = SessionKey("default", "model", "s1")
OTHER = KEY._replace(session_id="s2")
BROKEN = Odds(fails=1.0)


class Servers:
    """Services that share a store in memory, by their numbers; each is begun when it is asked for.

    Attributes:
        blobs: the store.
        sealers: of services, by their numbers; each takes its own when it is begun.
    """

    def __init__(self, directory):
        self.directory = directory
        self.sealers = defaultdict(Sealer)
        self.blobs = FaultyStore(Random(7))  # noqa: S311
        self._running = {}
        self._names = count()

    def __getitem__(self, number):
        if number not in self._running:
            backoff = Backoff(Random(1), first_s=0.0, longest_s=0.0)  # noqa: S311
            calls = StoreCalls(View(self.blobs), 60.0, backoff)
            shared = SharedTranscripts(calls, self.sealers[number])
            histories = SharedHistories(calls)
            store = TranscriptStore(self.directory / str(number), shared, histories)
            store.open()
            store.count_sessions()
            self._running[number] = store
        return self._running[number]

    def restart(self, number):
        self._running.pop(number).close()

    def fail(self):
        self.blobs.odds = BROKEN

    def mend(self):
        self.blobs.odds = Odds()

    async def turn(self, number, key=KEY, history="", **how):
        """The next turn of a session, as one service has it; returns how many there are."""
        store = self[number]
        await store.refresh(key)
        found = await store.find(key)
        turn = record(len(found.turns) if found else 0)
        turn = replace(turn, request_id=f"of {number}: {next(self._names)}", history=history)
        return len((await store.append(key, turn, is_final=False, **how)).turns)

    async def found(self, number, *histories):
        """Which sessions some histories are of, as one service finds them."""
        return await self[number].sharing.histories.find("default", histories)

    async def turns(self, number, key=KEY):
        """How many turns a service has of a session, with those of the others."""
        await self[number].refresh(key)
        found = await self[number].find(key)
        return len(found.turns) if found else None


@pytest.fixture
def servers(tmp_path):
    servers = Servers(tmp_path)
    yield servers
    for number in list(servers._running):
        servers.restart(number)


async def test_a_session_goes_on_anywhere(servers):
    """Whoever has the next turn has all that were before, and counts the session as its own."""
    assert [await servers.turn(number) for number in (0, 1, 1, 0, 2)] == [1, 2, 3, 4, 5]
    files = [servers.directory / str(number) / "" for number in range(3)]
    assert [servers[number].local.num_sessions("default") for number in range(3)] == [1, 1, 1]
    assert await servers.turns(0) == 5
    contents = {next(path.glob("*.jsonl")).read_bytes() for path in (files[0], files[2])}
    assert len(contents) == 1


async def test_what_another_has_added_stands(servers):
    """A turn that was computed over less is refused, and its session is then what it is."""
    await servers.turn(0)
    await servers.turn(1)
    with pytest.raises(SessionMovedError, match="submit the turn again"):
        await servers[0].append(KEY, record(1), is_final=False)
    assert await servers.turns(0) == 2
    assert await servers.turn(0) == 3


async def test_a_turn_that_ends_after_its_session_was_read_anew_is_refused(servers):
    """Somebody has looked at the session meanwhile: it is longer here, too."""
    await servers.turn(0)
    await servers.turn(1)
    assert await servers.turns(0) == 2
    with pytest.raises(SessionMovedError):
        await servers[0].append(KEY, record(1), is_final=False)


async def test_a_discard_of_what_has_changed_is_refused(servers, monkeypatch):
    """Its positions are of another context."""
    await servers.turn(0)
    await servers.turn(1)
    store = servers[0]
    before = await store.get(KEY)
    await store.refresh(KEY)

    async def as_it_was(key):
        return before

    monkeypatch.setattr(store, "get", as_it_was)
    with pytest.raises(SessionMovedError):
        await store.discard(KEY, Discard(((0, 1),), reason=CLIENT))


async def test_discards_ends_and_forks_are_shared(servers):
    """They are lines of the file as turns are."""
    await servers.turn(0)
    await servers[0].discard(KEY, Discard(((0, 1),), reason=CLIENT))
    await servers[0].fork(KEY, OTHER.session_id, 1)
    await servers[0].end(KEY)
    await servers[1].refresh(KEY)
    found = await servers[1].get(KEY)
    assert found.has_ended
    assert found.context.token_ids == (1, 2, 3, 9)
    assert await servers.turn(1, OTHER) == 2
    assert await servers.turns(0, OTHER) == 2


async def test_a_silent_store_costs_no_turn(servers):
    """What it lacks is known, also to the next process, and gets there later."""
    await servers.turn(0)
    servers.fail()
    assert await servers.turn(0) == 2
    assert servers[0].sharing.behind == [KEY]
    servers.restart(0)
    assert servers[0].sharing.behind == [KEY]
    await servers[0].catch_up()
    assert servers[0].sharing.behind == [KEY], "it is silent"
    servers.mend()
    await servers[0].catch_up()
    assert servers[0].sharing.behind == []
    assert await servers.turns(1) == 2
    servers.restart(0)
    assert servers[0].sharing.behind == []


async def test_the_next_turn_brings_what_the_store_lacks(servers):
    """All of it: a value is the whole file."""
    servers.fail()
    await servers.turn(0)
    servers.mend()
    await servers.turn(0)
    assert servers[0].sharing.behind == []
    assert await servers.turns(1) == 2


async def test_two_that_went_on_apart_are_told_apart(servers):
    """The store's counts; the other one is kept beside it, and said to be."""
    await servers.turn(0)
    await servers.turns(1)
    servers.fail()
    await servers.turn(0)
    mine = next((servers.directory / "0").glob("*.jsonl")).read_bytes()
    servers.mend()
    for _ in range(2):
        await servers.turn(1)
    await servers[0].catch_up()
    assert servers[0].sharing.behind == []
    assert await servers.turns(0) == 3
    (aside,) = (servers.directory / "0").glob("*.diverged-1")
    assert aside.read_bytes() == mine


async def test_what_nobody_knows_is_not_begun_anew(servers):
    """A session that is not here may be elsewhere; one that is here goes on."""
    await servers.turn(0)
    await servers.turn(1, OTHER)
    servers.fail()
    with pytest.raises(TranscriptUnavailableError, match="expected_turn = 0"):
        await servers[1].refresh(KEY, must_know=True)
    await servers[1].refresh(OTHER, must_know=True)
    await servers[1].refresh(KEY)
    assert await servers[1].find(KEY) is None


async def test_what_is_deleted_is_deleted_everywhere(servers):
    """Where it lies as a file it goes when it is asked for, or when somebody tidies up."""
    for key in (KEY, OTHER):
        await servers.turn(0, key)
        await servers.turn(1, key)
        await servers.turns(0, key)
        await servers[0].delete(key)
    assert await servers.turns(1) is None
    await servers[1].forget_deleted()
    assert not list((servers.directory / "1").glob("*.jsonl"))
    assert servers[1].local.num_sessions("default") == 0
    assert await servers.turn(1) == 1, "a name may be used again"
    assert await servers.turns(0) == 1


async def test_nothing_is_deleted_while_the_store_is_silent(servers):
    """It would come back."""
    await servers.turn(0)
    servers.fail()
    with pytest.raises(TranscriptUnavailableError, match="not deleted"):
        await servers[0].delete(KEY)
    servers.mend()
    assert await servers.turns(0) == 1


async def test_sessions_that_no_client_names_stay_here(servers):
    """Until one does."""
    assert await servers.turn(0, is_local=True) == 1
    assert await servers.turn(0, is_local=True) == 2
    await servers[0].fork(KEY, OTHER.session_id, 1)
    assert not [name for name in servers.blobs.blobs if "transcripts" in name]
    assert await servers.turns(1) is None
    assert await servers.turn(0) == 3
    assert await servers.turns(1) == 3
    assert await servers.turn(0, is_local=True) == 4
    assert await servers.turns(1) == 4, "it was shared, and stays it"
    await servers[0].delete(OTHER)


async def test_histories_lead_to_sessions(servers):
    """Once the store has the turn; the one that was there last counts, and no other tenant's."""
    await servers.turn(0, history="a")
    await servers.turn(1, history="b")
    assert await servers.found(2, "a", "b", "c") == {"a": "s1", "b": "s1"}
    await servers.turn(0, OTHER, history="a")
    await servers.turn(0, KEY._replace(session_id="s3"))
    await servers.turn(0, KEY._replace(tenant="else", session_id="s4"), history="a")
    await servers.turn(0, KEY._replace(session_id="s5"), history="d", is_local=True)
    await servers[0].fork(KEY, "s6", 2)
    assert await servers.found(1, "a", "b", "d") == {"a": "s2", "b": "s1"}


async def test_a_history_comes_with_what_was_behind(servers):
    """Not before: what the store says of a history, its transcript has."""
    servers.fail()
    for history in ("a", "b"):
        await servers.turn(0, history=history)
    with pytest.raises(StoreSilentError, match=r"cannot be used: the object store failed at .*"):
        await servers.found(0, "a")
    servers.mend()
    await servers[0].sharing.histories.keep(KEY, "z")  # somebody finds out that it is back
    assert await servers.found(1, "a", "b") == {}
    await servers[0].catch_up()
    assert await servers.found(1, "a", "b") == {"b": "s1"}


async def test_histories_go_with_their_session(servers):
    """Not those that another one has, too, and has noted since."""
    for key, histories in ((KEY, "abc"), (OTHER, "c")):
        for history in histories:
            await servers.turn(0, key, history=history)
    await servers[0].delete(KEY)
    assert await servers.found(1, *"abc") == {"c": "s2"}
    await servers[0].delete(OTHER)
    assert not [name for name in servers.blobs.blobs if "histories" in name]


async def test_a_turn_that_was_overtaken_is_in_a_session_of_its_own(servers):
    """Which begins as the other one did, and is found by its own history."""
    await servers.turn(0, history="a")
    before = await servers[0].get(KEY)
    await servers.turn(1, history="b")
    turn = replace(record(1), request_id="overtaken", history="c")
    with pytest.raises(SessionMovedError):
        await servers[0].append(KEY, turn, is_final=False)
    await servers[0].fork_with(before, turn, "s3", is_local=False)
    assert await servers.found(2, *"abc") == {"a": "s1", "b": "s1", "c": "s3"}
    fork = KEY._replace(session_id="s3")
    await servers[2].refresh(fork)
    found = await servers[2].get(fork)
    assert [one.request_id for one in found.turns] == [before.turns[0].request_id, "overtaken"]
    assert found.header.forked_from == "s1"
    assert await servers.turns(0) == 2


async def test_an_overtaken_turn_of_what_is_local_is_local(servers):
    await servers.turn(0, is_local=True)
    await servers[0].fork_with(await servers[0].get(KEY), record(1), "s3", is_local=True)
    assert not [name for name in servers.blobs.blobs if "transcripts" in name]


async def test_a_fork_may_stay_here_until_its_next_turn(servers):
    """It may never come."""
    await servers.turn(0)
    num_blobs = len(servers.blobs.blobs)
    await servers[0].fork(KEY, OTHER.session_id, 1, is_local=True)
    assert len(servers.blobs.blobs) == num_blobs
    turn = replace(record(1), request_id="next")
    await servers[0].append(OTHER, turn, is_final=False)
    assert await servers.turns(1, OTHER) == 2


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_what_is_let_go_stays_where_another_goes_on_with_it(servers, restarts, is_overtaken):
    """Also if the service that lets it go knows its file alone."""
    await servers.turn(0, history="a")
    assert await servers.turns(1) == 1
    if is_overtaken:
        await servers.turn(1, history="b")
    if restarts:
        servers.restart(0)
    assert await servers[0].release(KEY) is not is_overtaken
    assert await servers[0].find(KEY) is None
    assert servers[0].local.num_sessions("default") == 0
    assert await servers.turns(1) == (2 if is_overtaken else None)
    assert await servers.found(2, *"ab") == ({"a": "s1", "b": "s1"} if is_overtaken else {})


async def test_what_is_let_go_while_the_store_is_silent_goes_here_alone(servers):
    """Nobody knows who has gone on with it; nothing stays behind."""
    await servers.turn(0)
    servers.fail()
    await servers.turn(0)
    assert not await servers[0].release(KEY)
    servers.mend()
    assert servers[0].sharing.behind == []
    assert await servers.turns(1) == 1


async def test_what_the_store_never_had_is_let_go_for_good(servers):
    """Without a trace there."""
    await servers.turn(0, is_local=True)
    servers.restart(0)
    assert await servers[0].release(KEY)
    assert not [name for name in servers.blobs.blobs if "transcripts" in name]


async def test_what_another_has_deleted_is_let_go_for_good(servers):
    await servers.turn(0)
    await servers.turns(1)
    await servers[1].delete(KEY)
    servers.restart(0)
    assert await servers[0].release(KEY)


async def test_what_is_damaged_is_not_used_and_can_be_deleted(servers):
    """Nobody guesses what was said."""
    await servers.turn(0)
    (name,) = (name for name in servers.blobs.blobs if "transcripts" in name)
    data, stored_s = servers.blobs.blobs[name]
    for damaged in (data[:-1], data[:40] + b"x" + data[41:], data[:7], b""):
        servers.blobs.blobs[name] = damaged, stored_s
        with pytest.raises(TranscriptDamagedError):
            await servers.turns(1)
    await servers[0].delete(KEY)
    assert await servers.turns(1) is None
    with pytest.raises(UnknownSessionError):
        await servers[1].get(KEY)


async def test_another_sessions_transcript_is_not_taken(servers):
    """Though it lies where this one's should."""
    await servers.turn(0, OTHER)
    view = View(servers.blobs, is_calm=True)
    register_of(view, KEY).replace(NOTHING, register_of(view, OTHER).read().data)
    with pytest.raises(TranscriptDamagedError):
        await servers.turns(1)


async def test_a_disk_that_is_full_loses_nothing_of_what_is_shared(servers):
    """The turn is in the store: it is read from there."""
    await servers.turn(0)
    store = servers[0]
    files = store.local.files
    store.local.files = TranscriptFiles(servers.directory / "gone")
    with pytest.raises(TranscriptUnavailableError):
        await store.append(KEY, record(1), is_final=False)
    store.local.files = files
    assert await servers.turns(0) == 2


async def test_a_store_that_hangs_is_left_alone(tmp_path):
    """Nobody waits for it longer than a deadline, and then for a while not at all."""
    hangs, blobs = threading.Event(), FaultyStore(Random(1))  # noqa: S311
    blobs.meanwhile = hangs.wait
    backoff = Backoff(Random(1), first_s=1000.0)  # noqa: S311
    calls = StoreCalls(View(blobs), 0.05, backoff)
    shared = SharedTranscripts(calls)
    store = TranscriptStore(tmp_path, shared)
    try:
        await store.append(KEY, record(0), is_final=False)
        assert calls.is_silent
        assert calls.retry_s > 0
        assert calls.ended.counts == {("failed",): 1}
        with pytest.raises(StoreSilentError, match="it failed a moment ago"):
            await shared.look(KEY)
        assert calls.ended.counts == {("failed",): 1}
        hangs.set()
        backoff.retry_at_s = 0.0
        calls._deadline_s = 60.0
        await store.catch_up()
        assert not calls.is_silent
        assert store.sharing.behind == []
    finally:
        hangs.set()
        calls.close()


def there(data):
    return SharedTranscript(Seen(1, frozenset({"1"})), data)


@pytest.mark.parametrize(
    ("here", "shared", "verdict", "behind"),
    [
        (None, None, Verdict.KEEP, Verdict.KEEP),
        (b"ab", None, Verdict.KEEP, Verdict.KEEP),
        (None, there(None), Verdict.KEEP, Verdict.KEEP),
        (b"ab", there(None), Verdict.REMOVE, Verdict.KEEP),
        (None, there(b"ab"), Verdict.TAKE, Verdict.TAKE),
        (b"ab", there(b"abc"), Verdict.TAKE, Verdict.TAKE),
        (b"ab", there(b"ab"), Verdict.KEEP, Verdict.KEEP),
        (b"abc", there(b"ab"), Verdict.KEEP, Verdict.KEEP),
        (b"abc", there(b"abd"), Verdict.DIVERGED, Verdict.DIVERGED),
    ],
)
def test_what_becomes_of_a_file(here, shared, verdict, behind):
    """Files only grow: the longer one has what the shorter one has, or they are two."""
    assert verdict_on(here, shared, is_behind=False) is verdict
    assert verdict_on(here, shared, is_behind=True) is behind


# ------------------------------------------------------------------------------------------ sealed


def stored(servers):
    """What there is in the store of the session's transcript."""
    (name,) = register_of(View(servers.blobs), KEY).look().names
    return View(servers.blobs).get(name)


async def test_what_was_said_before_there_was_a_key_is_sealed_with_the_next_turn(servers):
    """Once with a key all of it is: a version is the whole transcript."""
    servers.sealers[1] = servers.sealers[2] = Sealer([new_key()])
    assert [await servers.turn(0), await servers.turn(1)] == [1, 2]
    assert MARK in stored(servers)
    assert [await servers.turn(2), await servers.turn(1)] == [3, 4]
    with pytest.raises(TranscriptSealedError, match=r"remote\.old_key_files"):
        await servers.turn(0)


async def test_a_key_is_changed_while_services_run(servers):
    """Each is given the new key to open with before the first seals with it."""
    old, new = new_key(), new_key()
    servers.sealers[0] = servers.sealers[1] = Sealer([old, new])
    assert [await servers.turn(0), await servers.turn(1)] == [1, 2]
    servers.restart(1)
    servers.sealers[1] = Sealer([new, old])
    assert [await servers.turn(1), await servers.turn(0), await servers.turn(1)] == [3, 4, 5]
    servers.sealers[2] = Sealer([new])
    assert await servers.turn(2) == 6


async def test_a_deleted_session_is_so_for_those_without_the_key(servers):
    """Its mark says nothing; kvd's sweep knows it by its size."""
    servers.sealers[1] = Sealer([new_key()])
    await servers.turn(0)
    await servers.turn(1)
    await servers[1].delete(KEY)
    assert len(stored(servers)) == DELETED_BYTES
    assert await servers.turns(0) is None


async def test_a_sealed_transcript_is_its_sessions_alone(servers):
    """One that was put in another's place is damage, and nobody is shown it."""
    servers.sealers[0] = servers.sealers[1] = Sealer([new_key()])
    await servers.turn(0)
    View(servers.blobs).put(register_of(View(servers.blobs), OTHER).name_of(1), stored(servers))
    with pytest.raises(TranscriptDamagedError):
        await servers.turn(1, OTHER)


async def test_a_service_without_the_key_puts_nothing_over_what_is_sealed(servers):
    """What it has added while the store was silent waits until it can be compared."""
    key = new_key()
    servers.sealers[1] = Sealer([key])
    await servers.turn(1)
    there = stored(servers)
    servers.fail()
    assert await servers.turn(0) == 1
    servers.mend()
    await servers[0].catch_up()
    assert servers[0].sharing.behind == [KEY]
    assert stored(servers) == there
    servers.restart(0)
    servers.sealers[0] = Sealer([key])
    await servers[0].catch_up()
    assert not servers[0].sharing.behind
    assert stored(servers) == there, "the first that came there counts"
