"""Turns and changes of sessions: completed, refused by their tenants' limits, handed back.

A change of a session is completed even if its caller leaves; no other call gets the session before.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from inference_svc.core.counters import Counters
from inference_svc.core.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidDiscardError,
    QueueFullError,
    RateLimitedError,
    SessionBusyError,
    TooManySessionsError,
    TooManyTurnsError,
    UnknownSessionError,
    UnknownTurnError,
)
from inference_svc.core.scheduling.request import Request
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import TurnDefaults
from inference_svc.core.tenant_limits import TenantBounds, TenantLimits
from inference_svc.core.transcript_format import ExpectedSession
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import Accepted, Finished, Started, TurnRecord, Usage
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turns import Turns
from inference_svc.service.lifecycle import Signals, drain
from inference_svc.service.turn_messages import decode_submission
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.awaited_tools import InvalidToolNamesError
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey
from tests.turn_service import until

KEY = SessionKey("default", "model", "s")
RECORD = TurnRecord(0, "r", "d", tuple(range(9)), (9,), ("x",), (), (), 1, "stop", Usage(), 1.0)
ANYTHING = ExpectedSession()


class SlowStore(TranscriptStore):
    """Writes when tests allow it."""

    def __init__(self, directory):
        super().__init__(directory)
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()
        self.may_write.set()

    async def _write(self, *args, **how):
        self.is_writing.set()
        await self.may_write.wait()
        await super()._write(*args, **how)


class RecordingEngine:
    """Records its calls."""

    def __init__(self):
        self.calls = []
        self.idle = asyncio.Event()
        self.idle.set()

    async def discard(self, _key, cut):
        """See Engine."""
        self.calls.append((cut.token_ids, cut.ranges))

    async def forget(self, key, _token_ids):
        """See Engine."""
        self.calls.append(("forget", key))

    async def expect(self, key, tools, *, superseded):
        """See Engine."""
        self.calls.append(("expect", key.session_id, tools, superseded))

    async def end_session(self, key):
        """See Engine."""
        self.calls.append(("end", key))


@asynccontextmanager
async def turns_of(store, engine, bounds=TenantBounds()):  # noqa: B008  # frozen
    """The turns of a service that runs none; one session has one turn."""
    session_turns = SessionTurns(4, 2, lambda: 1.0)
    limits = TenantLimits(bounds, {})
    turns = Turns(
        None, store, engine, session_turns, limits, Counters(), TurnReport(TurnHistograms())
    )
    await store.append(KEY, RECORD, is_final=False)
    running = asyncio.create_task(turns.run())
    await asyncio.sleep(0)
    yield turns
    assert not running.done(), "one change that fails ends nothing else"
    running.cancel()
    await asyncio.wait([running])


async def leave_during_write(store, change):
    """Let the caller leave while its change is being written."""
    store.may_write.clear()
    store.is_writing.clear()
    caller = asyncio.create_task(change)
    await store.is_writing.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_discard_is_completed_although_its_caller_left(tmp_path):
    """Record and KV change together; until then the session is in use."""
    store, engine = SlowStore(tmp_path), RecordingEngine()
    async with turns_of(store, engine) as turns:
        await leave_during_write(store, turns.sessions.discard(KEY, [(0, 4)], ANYTHING))
        with pytest.raises(SessionBusyError):
            await turns.sessions.discard(KEY, [(0, 4)], ANYTHING)
        store.may_write.set()
        await until(lambda: engine.calls and not turns.sessions._is_busy(KEY))
        assert engine.calls == [(tuple(range(9)), ((0, 4),))]
        assert await turns.sessions.discard(KEY, [(0, 2)], ANYTHING) == (4, 2)
        assert turns._counters.snapshot()["discards"] == 2
        transcript, is_busy = await turns.sessions.get(KEY)
    assert (transcript.context.token_ids, is_busy) == ((6, 7, 8, 9), False)
    assert (await TranscriptStore(tmp_path).get(KEY)).context == transcript.context


async def test_ends_and_forks_are_completed_although_their_caller_left(tmp_path):
    """The fork exists afterwards."""
    store, engine = SlowStore(tmp_path), RecordingEngine()
    async with turns_of(store, engine) as turns:
        await leave_during_write(store, turns.sessions.fork(KEY, None, "other"))
        store.may_write.set()
        other = KEY._replace(session_id="other")
        await until(lambda: store.local.cache.get(other) and not turns.sessions._is_busy(other))
        await leave_during_write(store, turns.sessions.end(KEY))
        store.may_write.set()
        await until(lambda: engine.calls and not turns.sessions._is_busy(KEY))
        assert (await turns.sessions.get(KEY))[0].has_ended
        assert len((await turns.sessions.get(other))[0].turns) == 1
        await turns.sessions.delete(other)
    assert engine.calls == [("end", KEY), ("forget", other)]


async def test_expected_tools_of_a_session(tmp_path):
    """Of an existing one that no call uses or changes; names are checked."""
    store, engine = SlowStore(tmp_path), RecordingEngine()
    async with turns_of(store, engine) as turns:
        expect = turns.sessions.expect
        await expect(KEY, ["bash", "bash"])
        await expect(KEY, superseded=True)
        told = [("expect", "s", ("bash",), False), ("expect", "s", (), True)]
        assert engine.calls == told
        with pytest.raises(InvalidToolNamesError, match="printable"):
            await expect(KEY, ["\n"])
        with pytest.raises(UnknownSessionError):
            await expect(KEY._replace(session_id="nobody"), ["bash"])
        await leave_during_write(store, turns.sessions.end(KEY))
        with pytest.raises(SessionBusyError):
            await expect(KEY, ["bash"])
        assert engine.calls == told
        store.may_write.set()
        await until(lambda: engine.calls[-1] == ("end", KEY))


async def test_a_change_that_breaks_is_logged(tmp_path):
    """A refused one is not: its caller gets the reason."""
    store = SlowStore(tmp_path)
    async with turns_of(store, None) as turns:
        with capture_logs() as lines:
            with pytest.raises(InvalidDiscardError):
                await turns.sessions.discard(KEY, [(5, 99)], ANYTHING)
            assert not lines
            with pytest.raises(AttributeError):
                await turns.sessions.end(KEY)
        assert [line["event"] for line in lines] == ["session_change_failed"]


async def test_a_failed_change_has_a_reason_and_occupies_nothing(tmp_path):
    """The session does not change."""
    store = SlowStore(tmp_path)
    async with turns_of(store, RecordingEngine()) as turns:
        with pytest.raises(InvalidDiscardError):
            await turns.sessions.discard(KEY, [(5, 99)], ANYTHING)
        with pytest.raises(UnknownSessionError):
            await turns.sessions.delete(KEY._replace(session_id="nobody"))
        assert await turns.sessions.discard(KEY, [(5, 6)], ANYTHING) == (9, 1)


class HeldRunner:
    """Starts and answers turns as the engine would, when tests allow it."""

    def __init__(self):
        self.may_start, self.may_end = asyncio.Event(), asyncio.Event()

    async def answer(self, turn):
        """See TurnRunner."""
        turn.publish(Accepted(turn.submission.key.session_id, 0, "r", 0, is_replayed=False))
        turn.request = Request(1, turn.submission.key, [1], 8, 1)
        await self.may_start.wait()
        turn.request.started_ns = 1
        turn.publish(Started(0, 0, 0.0, 1))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            if turn.handed_back is None:
                turn.publish(Finished("cancelled", "", Usage(), 0))
            raise
        turn.publish(Finished("stop", "", Usage(new_tokens=10, output_tokens=5), 1))


def submission(session_id="s", tenant="default", wait=True):
    """Make the submission of a new turn."""
    request = pb.SubmitTurnRequest(text="Hi", wait=wait)
    key = SessionKey(tenant, "model", session_id)
    return decode_submission(request, key, TurnDefaults(64))


async def end_of(turn):
    """Return its last event, or the error in its place."""
    try:
        return [event async for event in turn.follow()][-1]
    except ReportedError as error:
        return error


@asynccontextmanager
async def running_turns(tmp_path, bounds=TenantBounds(), named=None):  # noqa: B008  # frozen
    """Make turns with limits, whose runner a test controls."""
    runner, counters = HeldRunner(), Counters()
    limits = TenantLimits(bounds, named or {})
    session_turns = SessionTurns(9, 9, lambda: 1.0)
    store = TranscriptStore(tmp_path)
    turns = Turns(
        runner.answer,
        store,
        RecordingEngine(),
        session_turns,
        limits,
        counters,
        TurnReport(TurnHistograms()),
    )
    running = asyncio.create_task(turns.run())
    await asyncio.sleep(0)
    yield turns, runner, counters
    running.cancel()
    await asyncio.wait([running])
    limits.check()


async def test_limits_can_be_checked_in_advance(tmp_path):
    """Only the refusal is counted, and while the service stops every turn is refused."""
    async with running_turns(tmp_path, TenantBounds(max_turns=1)) as (turns, runner, counters):
        turns.check_limits(KEY.tenant)
        assert turns.idle.is_set()
        await turns.submit(submission("runs"))
        assert not turns.idle.is_set()
        with pytest.raises(TooManyTurnsError):
            turns.check_limits(KEY.tenant)
        turns.check_limits("other")
        assert counters.snapshot()["refused_too_many_turns"] == 1
        runner.may_start.set()
        runner.may_end.set()
        await turns.idle.wait()
        turns.check_limits(KEY.tenant)
        assert not turns.is_draining
        turns.refuse_new()
        assert turns.is_draining
        with pytest.raises(DrainingError):
            turns.check_limits(KEY.tenant)


async def test_a_drain_hands_back_waiting_turns(tmp_path):
    """At once, retryably, as if they had never come; running ones are completed."""
    async with running_turns(tmp_path) as (turns, runner, counters):
        runner.may_start.set()
        first = await turns.submit(submission("runs"))
        events = first.follow()
        while not first.has_started:
            await anext(events)
        behind = await turns.submit(submission("runs"))
        runner.may_start.clear()
        waiting = await turns.submit(submission("waits"))
        turns.refuse_new()
        for turn in (behind, waiting):
            error = await end_of(turn)
            assert (error.reason, error.retryable) == ("draining", True)
        with pytest.raises(DrainingError):
            await turns.submit(submission("new"))
        assert not turns.idle.is_set()
        runner.may_end.set()
        assert (await end_of(first)).finish_reason == "stop"
        await turns.idle.wait()
    assert counters.snapshot()["turns_handed_back"] == 2


async def test_a_drain_that_takes_too_long_hands_the_rest_back(tmp_path):
    """Not as cancelled: the same turn is accepted later."""
    async with running_turns(tmp_path) as (turns, runner, _):
        runner.may_start.set()
        turn = await turns.submit(submission())
        events = turn.follow()
        while not turn.has_started:
            await anext(events)
        await drain(turns, RecordingEngine(), RecordingEngine(), 0.0, Signals())
        assert (await end_of(turn)).reason == "draining"
        await turns.idle.wait()


async def test_limits_apply_to_new_turns(tmp_path):
    """A repeat of a running one joins it, whatever its tenant's limits; its end makes room."""
    async with running_turns(tmp_path, TenantBounds(max_turns=1)) as (turns, runner, counters):
        turn = await turns.submit(submission("one"))
        assert await turns.submit(turn.submission) is turn
        with pytest.raises(TooManyTurnsError):
            await turns.submit(submission("two"))
        await turns.submit(submission("two", tenant="other"))
        runner.may_start.set()
        runner.may_end.set()
        await turns.idle.wait()
        await turns.submit(submission("two"))
    assert counters.snapshot()["refused_too_many_turns"] == 1


async def test_turns_are_cancelled_by_name_or_by_session(tmp_path):
    """The answer has their number; an unknown name, or a session without turns, is refused."""
    async with running_turns(tmp_path) as (turns, runner, counters):
        runner.may_start.set()
        first = await turns.submit(submission())
        second = await turns.submit(submission())
        other = await turns.submit(submission("other"))
        with pytest.raises(UnknownTurnError):
            turns.cancel(KEY, "nobody's")
        assert turns.cancel(KEY, second.submission.request_id) == 1
        assert (await end_of(second)).reason == "cancelled"
        await turns.submit(submission())
        assert turns.cancel(KEY, "") == 2
        assert not other.is_cancelled
        assert (await end_of(first)).finish_reason == "cancelled"
        await until(lambda: not turns._session_turns.of(KEY))
        with pytest.raises(UnknownTurnError):
            turns.cancel(KEY, "")
        assert counters.snapshot()["turns_cancelled"] == 3
        runner.may_end.set()
        assert (await end_of(other)).finish_reason == "stop"


async def test_a_turn_that_waits_for_its_session_too_long_fails(tmp_path):
    """With that reason, and turns behind it are not delayed."""
    async with running_turns(tmp_path) as (turns, runner, counters):
        await turns.submit(submission())
        late = await turns.submit(replace(submission(), deadline_ns=1))
        behind = await turns.submit(submission())
        assert isinstance(await end_of(late), DeadlineExceededError)
        runner.may_start.set()
        runner.may_end.set()
        assert (await end_of(behind)).finish_reason == "stop"
        await turns.idle.wait()
    counts = counters.snapshot()
    assert (counts["expired"], counts["turns_failed"]) == (1, 1)


async def test_more_turns_than_may_wait_are_refused(tmp_path):
    """Nine of all sessions together."""
    async with running_turns(tmp_path) as (turns, _, counters):
        for number in range(9):
            await turns.submit(submission(str(number)))
        with pytest.raises(QueueFullError):
            await turns.submit(submission("another"))
        assert counters.snapshot()["turns_refused"] == 1


async def test_computed_tokens_are_charged(tmp_path):
    """A turn that failed, or never started, costs none."""
    bounds = TenantBounds(tokens_per_minute=15)
    async with running_turns(tmp_path, bounds) as (turns, runner, _):
        cancelled = await turns.submit(submission("cancelled"))
        with pytest.raises(RateLimitedError):
            await turns.submit(submission("one"))
        cancelled.cancel()
        await turns.idle.wait()
        runner.may_start.set()
        runner.may_end.set()
        await turns.submit(submission("one"))
        await turns.idle.wait()
        with pytest.raises(RateLimitedError):
            await turns.submit(submission("two"))


async def test_a_tenants_sessions_are_those_on_disk_and_those_being_opened(tmp_path):
    """Also after a restart; deleting one makes room, others' do not count."""
    store = TranscriptStore(tmp_path)
    for name in ("a", "b"):
        await store.append(KEY._replace(session_id=name), RECORD, is_final=False)
    await store.append(KEY._replace(tenant="other"), RECORD, is_final=False)
    (tmp_path / "torn.jsonl").write_bytes(b'0000 {"hea')
    async with running_turns(tmp_path, TenantBounds(max_sessions=3)) as (turns, _, _):
        turns._transcripts.count_sessions()
        await turns.submit(submission("c"))
        with pytest.raises(TooManySessionsError):
            await turns.submit(submission("d"))
        with pytest.raises(TooManySessionsError):
            await turns.sessions.fork(KEY._replace(session_id="a"), None, "d")
        await turns.submit(submission("a"))
        await turns.sessions.delete(KEY._replace(session_id="b"))
        forked = await turns.sessions.fork(KEY._replace(tenant="other"), None, "d")
        assert len(forked.turns) == 1
        await turns.submit(submission("d"))


async def test_a_forked_session_counts_once(tmp_path):
    """When it is on disk, it is not being opened any more."""
    await TranscriptStore(tmp_path).append(KEY, RECORD, is_final=False)
    async with running_turns(tmp_path, TenantBounds(max_sessions=2)) as (turns, _, counters):
        turns._transcripts.count_sessions()
        for name in ("one", "other"):
            await turns.sessions.fork(KEY, None, name)
            with pytest.raises(TooManySessionsError):
                await turns.sessions.fork(KEY, None, "third")
            await turns.sessions.delete(KEY._replace(session_id=name))
        assert counters.snapshot()["refused_too_many_sessions"] == 2


async def test_a_session_counts_once_while_turns_that_opened_it_go_on(tmp_path):
    """One is still compressing, and one came before there was a session."""
    async with running_turns(tmp_path, TenantBounds(max_sessions=2)) as (turns, _, _):
        await turns.submit(submission())
        await turns.submit(submission())
        await turns._transcripts.append(KEY, RECORD, is_final=False)
        await turns.submit(submission("other"))
        with pytest.raises(TooManySessionsError):
            await turns.submit(submission("third"))


async def test_a_fork_counts_until_it_is_written_although_its_caller_left(tmp_path):
    """Else more sessions are opened than the tenant may have."""
    store, bounds = SlowStore(tmp_path), TenantBounds(max_sessions=2)
    async with turns_of(store, RecordingEngine(), bounds) as turns:
        await leave_during_write(store, turns.sessions.fork(KEY, None, "other"))
        third = asyncio.create_task(turns.sessions.fork(KEY, None, "third"))
        await until(
            lambda: third.done() or turns.sessions._is_busy(KEY._replace(session_id="third"))
        )
        store.may_write.set()
        with pytest.raises(TooManySessionsError):
            await third
        await until(lambda: not turns.sessions._is_busy(KEY._replace(session_id="other")))
        with pytest.raises(TooManySessionsError):
            await turns.sessions.fork(KEY, None, "third")
