"""A running turn: its deadline, and its wait for the session."""

import asyncio
import time

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import TurnCancelledError
from inference_svc.core.scheduling.request import Request
from inference_svc.core.submission import Submission, TextInput
from inference_svc.core.turn_record import Finished, Started, Usage
from inference_svc.runtime.turns.turn import Turn
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

FAR_NS = 10**9 * NS_PER_S


def turn(deadline_ns=None):
    return Turn(
        Submission(
            key=SessionKey("default", "m", "s"),
            input=TextInput("Hi"),
            sampling=SamplingParams(max_tokens=4),
            has_max_tokens=True,
            request_id="r",
            digest="d",
            expected_turn=None,
            waits=True,
            is_final=False,
            arrived_ns=0,
            deadline_ns=deadline_ns,
        )
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(5, 9, 9), (9, 5, 9), (5, None, None), (None, 5, None)]
)
def test_a_turn_has_the_latest_deadline_of_its_submissions(first, second, expected):
    """A repeat never shortens what another client was promised."""
    joined = turn(first)
    joined.extend_deadline(second)
    assert joined.deadline_ns == expected


async def test_a_turn_has_started_with_its_first_step():
    """Not while it waits in the engine's queue."""
    waiting = turn()
    assert not waiting.has_started
    waiting.request = Request(1, waiting.submission.key, [1], 4, 1)
    assert not waiting.has_started
    waiting.request.started_ns = 1
    assert waiting.has_started


async def test_no_event_follows_the_last_one():
    """A load or a step of a cancelled turn may still be running."""
    over = turn()
    last = Finished("cancelled", "", Usage(), 1)
    over.publish(last)
    over.publish(Started(0, 0, 0.0, 1))
    assert over.is_answered
    over.close(TurnCancelledError("it was cancelled", "submit it again"))
    assert [event async for event in over.follow()] == [last]


async def test_a_turn_whose_session_is_free_does_not_wait():
    """Even after its deadline: the engine reports that."""
    free = turn(deadline_ns=1)
    free.may_run.set()
    assert await free.wait_for_session()


async def test_a_turn_whose_deadline_has_passed_gives_up():
    """It fails instead of waiting on."""
    assert not await turn(deadline_ns=1).wait_for_session()


async def test_a_turn_waits_for_its_session_until_its_deadline():
    """No longer: no client waits for its answer then."""
    late = turn(time.monotonic_ns() + NS_PER_S // 100)
    async with asyncio.timeout(60):  # otherwise it would make no progress
        assert not await late.wait_for_session()


@pytest.mark.parametrize("deadline_ns", [None, FAR_NS])
async def test_a_turn_waits_for_earlier_turns_of_its_session(deadline_ns):
    """The session's turns before it end, and it goes."""
    waiting = turn(deadline_ns)
    task = asyncio.create_task(waiting.wait_for_session())
    asyncio.get_running_loop().call_soon(waiting.may_run.set)
    assert await task


async def test_an_extended_deadline_is_waited_for():
    """A client with a later one keeps the turn alive past its first deadline."""
    waiting = turn(deadline_ns=time.monotonic_ns() + NS_PER_S // 2)
    loop = asyncio.get_running_loop()
    loop.call_soon(waiting.extend_deadline, FAR_NS)
    loop.call_later(0.6, waiting.may_run.set)
    assert await waiting.wait_for_session()


async def test_a_cancelled_turn_stops_waiting():
    """Cancellation is not mistaken for the deadline."""
    task = asyncio.create_task(turn(FAR_NS).wait_for_session())
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_only_a_running_turn_can_be_cancelled():
    """Not before it has a task, nor when its result is final or its log has ended."""
    for end in ("", "is_settled", "close"):
        one = turn()
        assert not one.cancel(), "nobody computes it yet"
        one.task = asyncio.create_task(asyncio.Event().wait())
        if end == "is_settled":
            one.is_settled = True
        elif end == "close":
            one.close()
        assert one.cancel() is not bool(end)
        assert one.is_cancelled is not bool(end)
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)


async def test_the_last_follower_that_leaves_cancels_a_turn():
    """However many have joined."""
    one = turn()
    one.task = asyncio.create_task(asyncio.Event().wait())
    one.join()
    one.join()
    one.leave()
    assert not one.is_cancelled
    one.leave()
    assert one.is_cancelled
    await asyncio.gather(one.task, return_exceptions=True)


def test_a_turn_that_has_not_started_has_computed_nothing():
    """Its tenant is not charged for it."""
    assert turn().computed_tokens == 0
