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
    """Services that share a store in memory, by number; each is created at its first use.

    Attributes:
        blobs: the store.
        sealers: of services, by their numbers; each gets its own when it is created.
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
        """Add the next turn to a session at one service; return the number of turns."""
        store = self[number]
        await store.refresh(key)
        found = await store.find(key)
        turn = record(len(found.turns) if found else 0)
        turn = replace(turn, request_id=f"of {number}: {next(self._names)}", history=history)
        return len((await store.append(key, turn, is_final=False, **how)).turns)

    async def found(self, number, *histories):
        """Return the sessions of some histories, as one service finds them."""
        return await self[number].sharing.histories.find("default", histories)

    async def turns(self, number, key=KEY):
        """Return the number of a session's turns at a service, with those of the others."""
        await self[number].refresh(key)
        found = await self[number].find(key)
        return len(found.turns) if found else None


@pytest.fixture
def servers(tmp_path):
    servers = Servers(tmp_path)
    yield servers
    for number in list(servers._running):
        servers.restart(number)


async def test_a_session_continues_anywhere(servers):
    """The service with the next turn has all earlier ones, and counts the session as its own."""
    assert [await servers.turn(number) for number in (0, 1, 1, 0, 2)] == [1, 2, 3, 4, 5]
    files = [servers.directory / str(number) / "" for number in range(3)]
    assert [servers[number].local.num_sessions("default") for number in range(3)] == [1, 1, 1]
    assert await servers.turns(0) == 5
    contents = {next(path.glob("*.jsonl")).read_bytes() for path in (files[0], files[2])}
    assert len(contents) == 1


async def test_a_conflicting_turn_is_refused(servers):
    """It was computed with fewer turns; its session is then updated."""
    await servers.turn(0)
    await servers.turn(1)
    with pytest.raises(SessionMovedError, match="submit the turn again"):
        await servers[0].append(KEY, record(1), is_final=False)
    assert await servers.turns(0) == 2
    assert await servers.turn(0) == 3


async def test_a_turn_that_ends_after_its_session_was_updated_is_refused(servers):
    """Another call has read the session meanwhile: it is longer here, too."""
    await servers.turn(0)
    await servers.turn(1)
    assert await servers.turns(0) == 2
    with pytest.raises(SessionMovedError):
        await servers[0].append(KEY, record(1), is_final=False)


async def test_a_discard_of_a_changed_session_is_refused(servers, monkeypatch):
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
    """They are lines of the file like turns."""
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


async def test_a_silent_store_fails_no_turn(servers):
    """The missing turns are recorded, also for the next process, and sent later."""
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


async def test_the_next_turn_sends_missing_ones(servers):
    """All of them: a value is the whole file."""
    servers.fail()
    await servers.turn(0)
    servers.mend()
    await servers.turn(0)
    assert servers[0].sharing.behind == []
    assert await servers.turns(1) == 2


async def test_two_diverged_versions_are_both_kept(servers):
    """The store's counts; the other one is stored beside it, and logged."""
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


async def test_a_session_that_may_exist_elsewhere_is_not_started_over(servers):
    """An unknown one may be elsewhere; a local one continues."""
    await servers.turn(0)
    await servers.turn(1, OTHER)
    servers.fail()
    with pytest.raises(TranscriptUnavailableError, match="expected_turn = 0"):
        await servers[1].refresh(KEY, must_know=True)
    await servers[1].refresh(OTHER, must_know=True)
    await servers[1].refresh(KEY)
    assert await servers[1].find(KEY) is None


async def test_a_deleted_session_is_deleted_everywhere(servers):
    """A local file goes when it is requested, or by a cleanup."""
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


async def test_unnamed_sessions_stay_local(servers):
    """Until a client names them."""
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
    """Once the store has the turn; the last session counts, and no other tenant's."""
    await servers.turn(0, history="a")
    await servers.turn(1, history="b")
    assert await servers.found(2, "a", "b", "c") == {"a": "s1", "b": "s1"}
    await servers.turn(0, OTHER, history="a")
    await servers.turn(0, KEY._replace(session_id="s3"))
    await servers.turn(0, KEY._replace(tenant="else", session_id="s4"), history="a")
    await servers.turn(0, KEY._replace(session_id="s5"), history="d", is_local=True)
    await servers[0].fork(KEY, "s6", 2)
    assert await servers.found(1, "a", "b", "d") == {"a": "s2", "b": "s1"}


async def test_a_history_is_shared_after_its_transcript(servers):
    """Its transcript has everything that the store says of a history."""
    servers.fail()
    for history in ("a", "b"):
        await servers.turn(0, history=history)
    with pytest.raises(StoreSilentError, match=r"cannot be used: the object store failed at .*"):
        await servers.found(0, "a")
    servers.mend()
    await servers[0].sharing.histories.keep(KEY, "z")  # a call finds that it is back
    assert await servers.found(1, "a", "b") == {}
    await servers[0].catch_up()
    assert await servers.found(1, "a", "b") == {"b": "s1"}


async def test_histories_are_deleted_with_their_session(servers):
    """Not those that another session has, too, and has recorded since."""
    for key, histories in ((KEY, "abc"), (OTHER, "c")):
        for history in histories:
            await servers.turn(0, key, history=history)
    await servers[0].delete(KEY)
    assert await servers.found(1, *"abc") == {"c": "s2"}
    await servers[0].delete(OTHER)
    assert not [name for name in servers.blobs.blobs if "histories" in name]


async def test_an_overtaken_turn_gets_a_session_of_its_own(servers):
    """It begins like the other one, and is found by its own history."""
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


async def test_an_overtaken_turn_of_a_local_session_stays_local(servers):
    await servers.turn(0, is_local=True)
    await servers[0].fork_with(await servers[0].get(KEY), record(1), "s3", is_local=True)
    assert not [name for name in servers.blobs.blobs if "transcripts" in name]


async def test_a_fork_may_stay_local_until_its_next_turn(servers):
    """There may never be one."""
    await servers.turn(0)
    num_blobs = len(servers.blobs.blobs)
    await servers[0].fork(KEY, OTHER.session_id, 1, is_local=True)
    assert len(servers.blobs.blobs) == num_blobs
    turn = replace(record(1), request_id="next")
    await servers[0].append(OTHER, turn, is_final=False)
    assert await servers.turns(1, OTHER) == 2


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_a_released_session_stays_where_another_service_continues_it(
    servers, restarts, is_overtaken
):
    """Also if the releasing service only has its file."""
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


async def test_a_session_released_while_the_store_is_silent_is_removed_locally(servers):
    """Another service may have continued it; no file is left here."""
    await servers.turn(0)
    servers.fail()
    await servers.turn(0)
    assert not await servers[0].release(KEY)
    servers.mend()
    assert servers[0].sharing.behind == []
    assert await servers.turns(1) == 1


async def test_a_session_that_was_never_shared_is_removed_completely(servers):
    """The store has no trace of it."""
    await servers.turn(0, is_local=True)
    servers.restart(0)
    assert await servers[0].release(KEY)
    assert not [name for name in servers.blobs.blobs if "transcripts" in name]


async def test_a_session_deleted_elsewhere_is_removed_completely(servers):
    await servers.turn(0)
    await servers.turns(1)
    await servers[1].delete(KEY)
    servers.restart(0)
    assert await servers[0].release(KEY)


async def test_a_damaged_session_is_not_used_and_can_be_deleted(servers):
    """Its contents are not guessed."""
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


async def test_another_sessions_transcript_is_not_used(servers):
    """It is in this one's place."""
    await servers.turn(0, OTHER)
    view = View(servers.blobs, is_calm=True)
    register_of(view, KEY).replace(NOTHING, register_of(view, OTHER).read().data)
    with pytest.raises(TranscriptDamagedError):
        await servers.turns(1)


async def test_a_full_disk_loses_no_shared_turn(servers):
    """The turn is in the store, and is read from there."""
    await servers.turn(0)
    store = servers[0]
    files = store.local.files
    store.local.files = TranscriptFiles(servers.directory / "gone")
    with pytest.raises(TranscriptUnavailableError):
        await store.append(KEY, record(1), is_final=False)
    store.local.files = files
    assert await servers.turns(0) == 2


async def test_a_hanging_store_is_not_used_for_a_while(tmp_path):
    """A call waits until its deadline, and then for a while not at all."""
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
def test_merging_two_files(here, shared, verdict, behind):
    """Files only grow: the longer one contains the shorter one, or they have diverged."""
    assert verdict_on(here, shared, is_behind=False) is verdict
    assert verdict_on(here, shared, is_behind=True) is behind


# ------------------------------------------------------------------------------------------ sealed


def stored_transcript(servers):
    """Return the store's value of the session's transcript."""
    (name,) = register_of(View(servers.blobs), KEY).look().names
    return View(servers.blobs).get(name)


async def test_plain_turns_are_sealed_with_the_next_one(servers):
    """Once there is a key: a version is the whole transcript."""
    servers.sealers[1] = servers.sealers[2] = Sealer([new_key()])
    assert [await servers.turn(0), await servers.turn(1)] == [1, 2]
    assert MARK in stored_transcript(servers)
    assert [await servers.turn(2), await servers.turn(1)] == [3, 4]
    with pytest.raises(TranscriptSealedError, match=r"remote\.old_key_files"):
        await servers.turn(0)


async def test_a_key_is_changed_while_services_run(servers):
    """Each can open with the new key before the first seals with it."""
    old, new = new_key(), new_key()
    servers.sealers[0] = servers.sealers[1] = Sealer([old, new])
    assert [await servers.turn(0), await servers.turn(1)] == [1, 2]
    servers.restart(1)
    servers.sealers[1] = Sealer([new, old])
    assert [await servers.turn(1), await servers.turn(0), await servers.turn(1)] == [3, 4, 5]
    servers.sealers[2] = Sealer([new])
    assert await servers.turn(2) == 6


async def test_a_deleted_session_is_recognised_without_the_key(servers):
    """kvd's sweep knows the mark by its size."""
    servers.sealers[1] = Sealer([new_key()])
    await servers.turn(0)
    await servers.turn(1)
    await servers[1].delete(KEY)
    assert len(stored_transcript(servers)) == DELETED_BYTES
    assert await servers.turns(0) is None


async def test_a_sealed_transcript_belongs_to_its_session(servers):
    """In another's place it is damage, and is not shown."""
    servers.sealers[0] = servers.sealers[1] = Sealer([new_key()])
    await servers.turn(0)
    View(servers.blobs).put(
        register_of(View(servers.blobs), OTHER).name_of(1), stored_transcript(servers)
    )
    with pytest.raises(TranscriptDamagedError):
        await servers.turn(1, OTHER)


async def test_a_service_without_the_key_overwrites_nothing_sealed(servers):
    """Its additions during the store's silence wait until they can be compared."""
    key = new_key()
    servers.sealers[1] = Sealer([key])
    await servers.turn(1)
    there = stored_transcript(servers)
    servers.fail()
    assert await servers.turn(0) == 1
    servers.mend()
    await servers[0].catch_up()
    assert servers[0].sharing.behind == [KEY]
    assert stored_transcript(servers) == there
    servers.restart(0)
    servers.sealers[0] = Sealer([key])
    await servers[0].catch_up()
    assert not servers[0].sharing.behind
    assert stored_transcript(servers) == there, "the first that came there counts"
