"""Arriving turns: the store is notified while their text is still being encoded."""

import pytest

from inference_svc.core.submission import TextInput
from shared.types.queue_delta import QueuedRequest, RunningRequest
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, LIMITS, block_thread, failure_of, make_turn, serving, until


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def make_text_turn(text, **fields):
    """Make a turn of text."""
    return make_turn([], **{"input": TextInput(text), "request_id": text, **fields})


def take_news(service):
    """Return the queue's news for the store: waiting, running and left turns."""
    feed = service.engine.store.queue
    update = feed.next_update(100)
    if update is None:
        return [], [], []
    feed.on_acknowledge(update.sequence, send_full=False)
    return list(update.change.waiting), list(update.change.running), list(update.change.left)


async def test_a_turn_waits_in_the_queue_before_its_text_is_encoded(model, tmp_path):
    """With the history of its session; its request takes over the entry, by its number."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        await service.turns.idle.wait()
        take_news(service)
        async with block_thread(service.thread):
            turn = await service.turns.submit(make_text_turn("And then?", priority=3))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            ((waiting,), running, left) = take_news(service)
            assert (waiting.key, waiting.rank[0], waiting.history_tokens) == (KEY, -3, 27)
            assert (running, left) == ([], [])
            assert turn.request is None
            assert len(service.engine.scheduler.queue) == 0
        number = waiting.rank[2]
        await until(lambda: turn.request is not None)
        assert turn.request.number == number
        assert not service.engine.scheduler.queue.is_arriving(KEY)
        _ = [event async for event in turn.follow()]
        waiting, running, _ = take_news(service)
        assert running in ([], [RunningRequest(number, KEY)])
        assert waiting in ([], [QueuedRequest((-3, 0.0, number), KEY, 27)])


async def test_a_turn_cancelled_meanwhile_is_withdrawn(model, tmp_path):
    """As soon as the text thread has finished."""
    async with serving(model, tmp_path) as service:
        async with block_thread(service.thread):
            turn = await service.turns.submit(make_text_turn("And then?"))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            ((waiting,), _, _) = take_news(service)
            service.turns.cancel(KEY, "")
        await service.turns.idle.wait()
        assert take_news(service) == ([], [], [waiting.rank[2]])
        assert turn.request is None


async def test_a_turn_refused_after_encoding_is_withdrawn(model, tmp_path):
    """It is too long; another one finds the queue full."""
    async with serving(model, tmp_path, max_waiting=0) as service:
        for text, reason in (
            ("word " * LIMITS.window_tokens, "input_too_long"),
            ("a", "queue_full"),
        ):
            async with block_thread(service.thread):
                turn = await service.turns.submit(make_text_turn(text))
                await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
                ((waiting,), _, _) = take_news(service)
            assert (await failure_of(turn)).reason == reason
            await service.turns.idle.wait()
            assert take_news(service) == ([], [], [waiting.rank[2]])


async def test_turns_handed_back_by_a_drain_are_withdrawn(model, tmp_path):
    """Many of them, each with its session; those that come and go at once are not reported."""
    async with serving(model, tmp_path) as service:
        keys = [KEY._replace(session_id=f"s-{number}") for number in range(8)]
        async with block_thread(service.thread):
            turns = [
                await service.turns.submit(make_text_turn("Hi", key=key, request_id=str(key)))
                for key in keys
            ]
            queue = service.engine.scheduler.queue
            await until(lambda: all(queue.is_arriving(key) for key in keys))
            waiting, _, _ = take_news(service)
            assert {one.key for one in waiting} == set(keys)
            service.turns.refuse_new()
        for turn in turns:
            assert (await failure_of(turn)).reason == "draining"
        await service.turns.idle.wait()
        waiting, running, left = take_news(service)
        assert (waiting, running) == ([], [])
        assert len(left) == len(keys)


async def test_a_turn_that_waits_for_its_session_has_not_arrived(model, tmp_path):
    """The session's KV is with the previous turn."""
    async with serving(model, tmp_path) as service:
        first = await service.turns.submit(make_turn(range(20, 40), 60, "first"))
        await until(lambda: first.has_started)
        second = await service.turns.submit(make_text_turn("And then?"))
        assert not service.engine.scheduler.queue.is_arriving(KEY)
        _ = [event async for event in first.follow()]
        _ = [event async for event in second.follow()]
        assert second.request.number > first.request.number


async def test_an_arriving_turn_ends_expectations_of_its_session(model, tmp_path):
    """It is the expected one."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        await service.turns.idle.wait()
        async with block_thread(service.thread):
            turn = await service.turns.submit(make_text_turn("And then?"))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            await service.engine.loop.expect(KEY, ("bash",), superseded=False)
            assert service.engine.store.expected == []
        _ = [event async for event in turn.follow()]
