"""Turns against the real service, without kvd: sessions, repeats, cancellation, order, restarts."""

import asyncio
import shutil
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
    StateError,
)
from tests.inference_processes import InferenceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = pb.Sampling(max_tokens=12, ignore_eos=True)
LONG = pb.Sampling(max_tokens=1500, ignore_eos=True)  # an answer whose end no test waits for
WHOLE = pb.Sampling(max_tokens=300, ignore_eos=True)  # an answer that takes a while, and ends


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model):
    """Run one service for all tests of this module; each test uses its own sessions."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    async with InferenceProcess(tiny_model, directory) as process:
        yield process
    shutil.rmtree(directory)


@pytest_asyncio.fixture(loop_scope="module")
async def client(service):
    async with service.client() as connected:
        yield connected


def user(content):
    return [pb.ChatMessage(role="user", content=content)]


async def expect_refusal(awaitable, kind, reason):
    """Check that the call is refused with this class and slug; return the error."""
    with pytest.raises(kind) as caught:
        await awaitable
    assert caught.value.reason == reason
    assert caught.value.remedy
    return caught.value


async def next_event(events, kind):
    """Read a turn's events up to the first of a kind."""
    async for event in events:
        if event.WhichOneof("event") == kind:
            return event
    raise AssertionError(f"no {kind}")


async def test_events_come_in_order_and_usage_adds_up(client):
    """Accepted, started, tokens, finished; every prompt token is reused, recomputed or new."""
    kinds = []
    result = await client.submit(
        turn_request(user("Hello"), sampling=GREEDY),
        on_event=lambda event: kinds.append(event.WhichOneof("event")),
    )
    assert kinds[:3] == ["accepted", "started", "tokens"]
    assert kinds[-1] == "finished"
    assert result.accepted.session_id
    assert len(result.token_ids) == result.usage.output_tokens == 12
    assert "".join(token.text for token in result.tokens) == result.text
    session = await client.get_session(result.accepted.session_id, with_turns=True)
    (record,) = session.turn_records
    assert list(record.output_ids) == result.token_ids
    assert result.usage.new_tokens == len(record.input_ids)


async def test_history_is_recomputed_without_kvd(client):
    """The second turn computes the first one's tokens again, and gives the reason."""
    await client.submit(turn_request(user("One"), "history", sampling=GREEDY))
    second = await client.submit(turn_request(user("Two"), "history", sampling=GREEDY))
    session = await client.get_session("history", with_turns=True)
    first_tokens = len(session.turn_records[0].input_ids) + 12
    assert second.usage.history_tokens == second.usage.recomputed_tokens == first_tokens - 1
    assert second.usage.recompute_reason == "mode_recompute"
    assert (second.accepted.turn, second.finished.turns) == (1, 2)


async def test_interleaved_sessions_answer_as_if_alone(client):
    """Sessions that run in one batch give the tokens that each gives by itself."""

    async def talk(session_id):
        return [
            (
                await client.submit(
                    turn_request(f"{session_id[-1]} turn {turn} ", session_id, sampling=GREEDY)
                )
            ).token_ids
            for turn in range(3)
        ]

    together = await asyncio.gather(*(talk(f"together-{number}") for number in range(6)))
    alone = [await talk(f"alone-{number}") for number in range(6)]
    assert together == alone


async def test_a_fork_is_independent(client):
    """A fork at a turn has that history; the original does not see the fork's additions."""
    for text in ("One ", "Two "):
        await client.submit(turn_request(text, "forked", sampling=GREEDY))
    fork = await client.fork_session("forked", at_turn=1)
    assert fork.turns == 1
    again = await client.submit(turn_request("Two ", fork.session_id, sampling=GREEDY))
    other = await client.submit(turn_request("Else ", fork.session_id, sampling=GREEDY))
    original = await client.get_session("forked", with_turns=True)
    assert original.turns == 2
    assert again.token_ids == list(original.turn_records[1].output_ids)
    assert other.accepted.turn == 2
    whole = await client.fork_session("forked", new_session_id="whole-fork")
    assert whole.turns == 2
    await expect_refusal(
        client.fork_session("forked", new_session_id="whole-fork"), StateError, "session_exists"
    )
    await expect_refusal(client.fork_session("forked", at_turn=3), NotFoundError, "unknown_turn")


async def test_a_repeat_of_a_complete_turn_replays_its_record(client):
    """The same request id returns the same tokens, text and usage, and adds no turn."""
    sampling = pb.Sampling(max_tokens=12, temperature=1.0, logprobs=2)
    request = turn_request(user("Hi"), "repeat", sampling=sampling, request_id="once")
    first, second = await client.submit(request), await client.submit(request)
    assert not first.accepted.replayed
    assert second.accepted.replayed
    assert second.finished == first.finished
    assert list(second.tokens) == list(first.tokens)
    assert (await client.get_session("repeat")).turns == 1


async def test_a_repeat_with_another_input_is_refused(client):
    """A request id names one input and one sampling."""
    await client.submit(turn_request("Hi", "reused", sampling=GREEDY, request_id="once"))
    other = turn_request("Ho", "reused", sampling=GREEDY, request_id="once")
    await expect_refusal(client.submit(other), InvalidInputError, "request_id_reused")


async def test_a_repeat_of_a_running_turn_joins_it(client):
    """Both clients see the whole turn, and when one of them leaves it does not end."""
    request = turn_request("Go ", "joined", sampling=WHOLE, request_id="once")
    async with aclosing(client.stream_turn(request)) as first:
        await next_event(first, "tokens")
        joined = asyncio.create_task(client.submit(request))
        async with aclosing(client.stream_turn(request)) as third:
            await next_event(third, "tokens")
    result = await joined
    assert len(result.token_ids) == WHOLE.max_tokens
    assert not result.accepted.replayed
    assert (await client.get_session("joined")).turns == 1


async def test_expected_turn_must_match(client):
    """A client that expects another number of turns learns the actual one."""
    opened = turn_request("Hi", "expected", sampling=GREEDY, expected_turn=0)
    await client.submit(opened)
    error = await expect_refusal(client.submit(opened), StateError, "turn_mismatch")
    assert "1 complete turns" in error.message
    unknown = turn_request("Hi", "never-opened", sampling=GREEDY, expected_turn=3)
    await expect_refusal(client.submit(unknown), StateError, "turn_mismatch")
    await expect_refusal(client.get_session("never-opened"), NotFoundError, "unknown_session")


async def test_a_busy_session_refuses_or_queues(client):
    """A second turn gets session_busy, or waits and then sees the first one's history."""
    async with aclosing(
        client.stream_turn(turn_request("Long ", "busy", sampling=WHOLE))
    ) as running:
        await next_event(running, "started")
        second = turn_request("Next ", "busy", sampling=GREEDY)
        await expect_refusal(client.submit(second), ConflictError, "session_busy")
        await expect_refusal(client.delete_session("busy"), ConflictError, "session_busy")
        await expect_refusal(client.end_session("busy"), ConflictError, "session_busy")
        second.wait = True
        waiting = asyncio.create_task(client.submit(second))
        finished = await next_event(running, "finished")
    assert finished.finished.turns == 1
    result = await waiting
    assert result.accepted.turn == 1
    assert result.usage.history_tokens > WHOLE.max_tokens


async def test_a_cancelled_turn_does_not_change_the_session(client):
    """CancelTurn ends the stream with `cancelled`; no part of the turn is recorded."""
    await client.submit(turn_request("One ", "cancelled", sampling=GREEDY))
    before = await client.get_session("cancelled", with_turns=True)
    request = turn_request("Long ", "cancelled", sampling=LONG, request_id="long")
    async with aclosing(client.stream_turn(request)) as running:
        await next_event(running, "tokens")
        assert await client.cancel("cancelled", "long") == 1
        finished = await next_event(running, "finished")
    assert finished.finished.finish_reason == "cancelled"
    assert finished.finished.turns == 1
    assert await client.get_session("cancelled", with_turns=True) == before
    again = await client.submit(turn_request("Two ", "cancelled", sampling=GREEDY))
    assert again.accepted.turn == 1
    await expect_refusal(client.cancel("cancelled"), NotFoundError, "unknown_turn")


async def test_a_client_that_leaves_cancels_its_turn(client):
    """The session is free again once the service has noticed."""
    async with aclosing(client.stream_turn(turn_request("Go ", "left", sampling=LONG))) as running:
        await next_event(running, "tokens")
    result = await client.submit(turn_request("Next ", "left", sampling=GREEDY, wait=True))
    assert result.accepted.turn == 0


async def test_a_waiting_turn_can_be_cancelled(client):
    """It ends with an error, because it was never accepted; the running one continues."""
    long = turn_request("Go ", "queue", sampling=WHOLE, request_id="first")
    async with aclosing(client.stream_turn(long)) as running:
        await next_event(running, "started")
        second = turn_request("Next ", "queue", sampling=GREEDY, request_id="second", wait=True)
        waiting = asyncio.create_task(client.submit(second))
        while True:
            try:
                await client.cancel("queue", "second")
                break
            except NotFoundError:  # it has not arrived yet
                await asyncio.sleep(0)
        await expect_refusal(waiting, ConflictError, "cancelled")
        assert (await next_event(running, "finished")).finished.finish_reason == "length"


async def test_stop_strings_end_the_answer_and_are_not_recorded(client):
    """The text ends before the stop string, and the recorded tokens say exactly that text."""
    plain = await client.submit(turn_request("Tell ", sampling=pb.Sampling(max_tokens=40)))
    stop = plain.text[9:13]
    assert plain.text.index(stop) > 0
    sampling = pb.Sampling(max_tokens=40, stop=[stop])
    stopped = await client.submit(turn_request("Tell ", "stopped", sampling=sampling))
    assert stopped.finished.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert "".join(token.text for token in stopped.tokens) == stopped.text
    more = await client.submit(turn_request("More ", "stopped", sampling=GREEDY))
    session = await client.get_session("stopped", with_turns=True)
    assert list(session.turn_records[0].output_ids) == stopped.token_ids
    assert more.usage.history_tokens <= len(session.turn_records[0].input_ids) + len(
        stopped.token_ids
    )


async def test_logprobs_and_seeds(client):
    """A seed repeats an answer, a different seed changes it; logprobs are sent on request."""

    async def sample(seed):
        sampling = pb.Sampling(max_tokens=16, temperature=1.0, seed=seed, logprobs=3, top_p=0.9)
        return await client.submit(turn_request("Roll ", sampling=sampling))

    first, same, other = await sample(1), await sample(1), await sample(2)
    assert first.token_ids == same.token_ids != other.token_ids
    assert all(token.logprob <= 0 and len(token.top) == 3 for token in first.tokens)
    greedy = await client.submit(turn_request("Roll ", sampling=GREEDY))
    assert not any(token.HasField("logprob") for token in greedy.tokens)


async def test_a_final_turn_ends_the_session(client):
    """Nothing can be added after it, but it can be read and forked."""
    await client.submit(turn_request("Bye ", "final", sampling=GREEDY, final=True))
    await expect_refusal(
        client.submit(turn_request("More ", "final", sampling=GREEDY)), StateError, "session_ended"
    )
    assert (await client.get_session("final")).ended
    fork = await client.fork_session("final")
    await client.submit(turn_request("More ", fork.session_id, sampling=GREEDY))


async def test_a_session_can_be_ended_without_a_turn(client):
    """It is the same as with a final turn.

    Ending it twice changes nothing, unknown ones are errors.
    """
    await client.submit(turn_request("One ", "over", sampling=GREEDY))
    for _ in range(2):
        await client.end_session("over")
    await expect_refusal(
        client.submit(turn_request("More ", "over", sampling=GREEDY)), StateError, "session_ended"
    )
    session = await client.get_session("over")
    assert (session.ended, session.turns) == (True, 1)
    await expect_refusal(client.end_session("nobody"), NotFoundError, "unknown_session")


async def test_a_deleted_session_does_not_exist_any_more(client):
    """Its id opens a new session."""
    await client.submit(turn_request("One ", "deleted", sampling=GREEDY))
    await client.delete_session("deleted")
    await expect_refusal(client.get_session("deleted"), NotFoundError, "unknown_session")
    await expect_refusal(client.delete_session("deleted"), NotFoundError, "unknown_session")
    again = await client.submit(turn_request("One ", "deleted", sampling=GREEDY))
    assert again.accepted.turn == 0


async def test_a_turn_that_does_not_fit_names_the_numbers(client):
    """The message has history, new tokens, max_tokens and the window."""
    await client.submit(turn_request([5] * 100, "long", sampling=GREEDY))
    request = turn_request([5] * 1900, "long", sampling=pb.Sampling(max_tokens=100))
    request.overflow.policy = "reject"
    error = await expect_refusal(client.submit(request), InvalidInputError, "input_too_long")
    for number in ("112", "1900", "100", "2048"):
        assert number in error.message
    # without max_tokens, the answer may take all of the rest
    request.sampling.ClearField("max_tokens")
    assert (await client.submit(request)).usage.output_tokens <= 36


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.SubmitTurnRequest(), "empty_turn"),
        (pb.SubmitTurnRequest(text=""), "empty_turn"),
        (turn_request([1, 5_000_000]), "invalid_input"),
        (turn_request("Hi", "bad id!"), "invalid_name"),
        (turn_request("Hi", sampling=pb.Sampling(temperature=-1, top_p=3)), "invalid_sampling"),
    ],
)
async def test_invalid_input_is_refused(client, request_, reason):
    """Each error has its slug; a refused turn opens no session."""
    await expect_refusal(client.submit(request_), InvalidInputError, reason)


async def test_sessions_survive_a_restart_of_the_service(tiny_model, short_dir):
    """After SIGKILL another process continues each session from its transcript."""
    service = InferenceProcess(tiny_model, short_dir)
    await service.start()
    try:
        async with service.client() as client:
            turn = turn_request("One ", "kept", sampling=GREEDY, request_id="one")
            first = await client.submit(turn)
        await service.kill()
        await service.start()
        async with service.client() as client:
            assert (await client.submit(turn)).accepted.replayed
            second = await client.submit(turn_request("Two ", "kept", sampling=GREEDY))
            assert second.accepted.turn == 1
            session = await client.get_session("kept", with_turns=True)
            assert list(session.turn_records[0].output_ids) == first.token_ids
    finally:
        await service.stop()


async def test_sigterm_lets_running_turns_finish(tiny_model, short_dir):
    """A drain accepts no turns, finishes running ones, and exits with 0."""
    service = InferenceProcess(tiny_model, short_dir)
    await service.start()
    async with service.client() as client:
        request = turn_request("Go ", "drained", sampling=WHOLE)
        async with aclosing(client.stream_turn(request)) as running:
            await next_event(running, "tokens")
            stopping = asyncio.create_task(service.stop())
            finished = await next_event(running, "finished")
        assert finished.finished.finish_reason == "length"
        await stopping
    with pytest.raises(ReportedError):
        async with service.client() as client:
            await client.get_model()
