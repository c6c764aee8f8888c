"""Changes of sessions between turns: complete or not at all, and never during a turn."""

import asyncio

import pytest

from inference_svc.core.errors import (
    InvalidDiscardError,
    SessionBusyError,
    SessionExistsError,
    TurnMismatchError,
    UnknownSessionError,
    UnknownTurnError,
)
from inference_svc.core.tenant_limits import TenantBounds
from inference_svc.core.transcript_format import ExpectedSession
from shared.types.errors import ReportedError
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, first_token, make_turn, serving

ANY = ExpectedSession(None, None)
PROMPT = list(range(20, 30))
LONG = 60  # tokens of an answer that is still running


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def key_of(session_id):
    return KEY._replace(session_id=session_id)


async def context_of(service, key=KEY):
    return (await service.turns.sessions.get(key))[0].context.token_ids


async def test_a_fork_has_the_requested_turns(model, tmp_path):
    """All of them if none is named; the original session continues independently."""
    async with serving(model, tmp_path) as service:
        sessions = service.turns.sessions
        for number in range(2):
            await service.run([*PROMPT, number], max_tokens=2)
        first = await sessions.fork(KEY, 1, "first")
        both = await sessions.fork(KEY, None, "both")
        named_all = await sessions.fork(KEY, 2, "all")
        assert [len(forked.turns) for forked in (first, both, named_all)] == [1, 2, 2]
        whole = await context_of(service)
        assert await context_of(service, key_of("both")) == whole
        assert await context_of(service, key_of("first")) == whole[: len(PROMPT) + 1 + 2]
        await service.run([1], max_tokens=1)
        assert await context_of(service, key_of("both")) == whole


async def test_a_fork_replaces_no_other_session(model, tmp_path):
    """Nor may it have more turns than the original."""
    async with serving(model, tmp_path) as service:
        sessions = service.turns.sessions
        await service.run(PROMPT, max_tokens=1)
        with pytest.raises(UnknownTurnError, match="1 complete turns, not 2"):
            await sessions.fork(KEY, 2, "other")
        await sessions.fork(KEY, None, "other")
        with pytest.raises(SessionExistsError):
            await sessions.fork(KEY, None, "other")
        with pytest.raises(SessionExistsError):
            await sessions.fork(key_of("other"), None, KEY.session_id)


async def test_a_fork_counts_for_the_limit_of_sessions(model, tmp_path):
    """It is refused and counted like a turn, and leaves nothing."""
    async with serving(model, tmp_path) as service:
        sessions = service.turns.sessions
        await service.run(PROMPT, max_tokens=1)
        sessions._limits.set_bounds(TenantBounds(max_sessions=1), {}, now_ns=0)
        with pytest.raises(ReportedError) as refused:
            await sessions.fork(KEY, None, "other")
        assert await service.counts(f"refused_{refused.value.reason}") == (1,)
        with pytest.raises(UnknownSessionError):
            await sessions.get(key_of("other"))


async def test_tokens_are_dropped_at_once_and_permanently(model, tmp_path):
    """The next turn continues with the rest; the answer has its length."""
    async with serving(model, tmp_path) as service:
        await service.run(PROMPT, max_tokens=2)
        before = await context_of(service)
        done = await service.turns.sessions.discard(KEY, [(5, 7), (0, 2), (6, 8)], ANY)
        assert done == (len(before) - 5, 5)
        left = (*before[2:5], *before[8:])
        assert tuple(await context_of(service)) == left
        await service.run([99], max_tokens=1)
        assert tuple(await context_of(service))[: len(left) + 1] == (*left, 99)


@pytest.mark.parametrize("ranges", [[], [(3, 3)], [(-1, 2)], [(0, 1000)]])
async def test_invalid_ranges_drop_nothing(model, tmp_path, ranges):
    """A discard is done completely or not at all."""
    async with serving(model, tmp_path) as service:
        await service.run(PROMPT, max_tokens=2)
        before = await context_of(service)
        with pytest.raises(InvalidDiscardError):
            await service.turns.sessions.discard(KEY, ranges, ANY)
        assert await context_of(service) == before


async def test_a_client_with_another_expectation_drops_nothing(model, tmp_path):
    """Its positions are of another context."""
    async with serving(model, tmp_path) as service:
        await service.run(PROMPT, max_tokens=2)
        before = await context_of(service)
        for expected in (ExpectedSession(0, None), ExpectedSession(None, len(before) - 1)):
            with pytest.raises(TurnMismatchError):
                await service.turns.sessions.discard(KEY, [(0, 1)], expected)
        assert await context_of(service) == before
        right = ExpectedSession(1, len(before))
        assert await service.turns.sessions.discard(KEY, [(0, 1)], right) == (len(before) - 1, 1)


async def test_a_session_cannot_be_changed_during_a_turn(model, tmp_path):
    """Once it has ended, all changes are possible."""
    async with serving(model, tmp_path) as service:
        sessions = service.turns.sessions
        await service.run(PROMPT, max_tokens=1)
        turn = await service.turns.submit(make_turn([7], LONG))
        events = await first_token(turn)
        assert (await sessions.get(KEY))[1], "it is busy"
        for change in (
            sessions.discard(KEY, [(0, 1)], ANY),
            sessions.delete(KEY),
            sessions.end(KEY),
        ):
            with pytest.raises(SessionBusyError):
                await change
        with pytest.raises(SessionExistsError):
            await sessions.fork(KEY, None, KEY.session_id)
        _ = [event async for event in events]
        await service.turns.idle.wait()
        await sessions.delete(KEY)
        with pytest.raises(UnknownSessionError):
            await sessions.get(KEY)


async def test_a_change_is_completed_though_its_caller_leaves(model, tmp_path):
    """No other call changes the session meanwhile."""
    async with serving(model, tmp_path) as service:
        sessions = service.turns.sessions
        await service.run(PROMPT, max_tokens=2)
        before = await context_of(service)
        leaving = asyncio.create_task(sessions.discard(KEY, [(0, 3)], ANY))
        await asyncio.sleep(0)
        with pytest.raises(SessionBusyError):
            await service.turns.submit(make_turn([1]))
        with pytest.raises(SessionBusyError):
            await sessions.end(KEY)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        while (await sessions.get(KEY))[1]:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.001)
        assert tuple(await context_of(service)) == tuple(before[3:])


async def test_an_ended_session_accepts_no_turn(model, tmp_path):
    """Its tokens can still be read."""
    async with serving(model, tmp_path) as service:
        await service.run(PROMPT, max_tokens=1)
        await service.turns.sessions.end(KEY)
        with pytest.raises(ReportedError):
            await service.run([1], max_tokens=1)
        assert len(await context_of(service)) == len(PROMPT) + 1
