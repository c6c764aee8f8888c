"""Turns that arrive: the store knows of them while their text is still being encoded."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from inference_svc.core.submission import TextInput
from shared.types.queue_delta import QueuedRequest, RunningRequest
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, LIMITS, asked, failure_of, serving, until


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@asynccontextmanager
async def held_text(service):
    """Nothing is encoded inside the block."""
    may_go_on = threading.Event()
    holding = asyncio.create_task(service.thread.run(may_go_on.wait))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        may_go_on.set()
        await holding


def said(text, **fields):
    """A turn of text."""
    return asked([], **{"input": TextInput(text), "request_id": text, **fields})


def told(service):
    """What the store is told of the queue now: who waits, who runs, who left."""
    feed = service.engine.store.queue
    update = feed.next_update(100)
    if update is None:
        return [], [], []
    feed.on_acknowledge(update.sequence, send_full=False)
    return list(update.change.waiting), list(update.change.running), list(update.change.left)


async def test_a_turn_waits_for_the_store_before_its_text_is_encoded(model, tmp_path):
    """With the history of its session; its request takes its place over, by its number."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        await service.turns.idle.wait()
        told(service)
        async with held_text(service):
            turn = await service.turns.submit(said("And then?", priority=3))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            ((waiting,), running, left) = told(service)
            assert (waiting.key, waiting.rank[0], waiting.history_tokens) == (KEY, -3, 27)
            assert (running, left) == ([], [])
            assert turn.request is None
            assert len(service.engine.scheduler.queue) == 0
        number = waiting.rank[2]
        await until(lambda: turn.request is not None)
        assert turn.request.number == number
        assert not service.engine.scheduler.queue.is_arriving(KEY)
        _ = [event async for event in turn.follow()]
        waiting, running, _ = told(service)
        assert running in ([], [RunningRequest(number, KEY)])
        assert waiting in ([], [QueuedRequest((-3, 0.0, number), KEY, 27)])


async def test_a_turn_that_is_cancelled_meanwhile_is_taken_back(model, tmp_path):
    """As soon as the text thread lets go of it."""
    async with serving(model, tmp_path) as service:
        async with held_text(service):
            turn = await service.turns.submit(said("And then?"))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            ((waiting,), _, _) = told(service)
            service.turns.cancel(KEY, "")
        await service.turns.idle.wait()
        assert told(service) == ([], [], [waiting.rank[2]])
        assert turn.request is None


async def test_so_is_one_that_is_refused_when_its_prompt_is_known(model, tmp_path):
    """It is too long; another has no place in the queue."""
    async with serving(model, tmp_path, max_waiting=0) as service:
        for text, reason in (
            ("word " * LIMITS.window_tokens, "input_too_long"),
            ("a", "queue_full"),
        ):
            async with held_text(service):
                turn = await service.turns.submit(said(text))
                await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
                ((waiting,), _, _) = told(service)
            assert (await failure_of(turn)).reason == reason
            await service.turns.idle.wait()
            assert told(service) == ([], [], [waiting.rank[2]])


async def test_so_are_turns_that_a_drain_hands_back(model, tmp_path):
    """Many of them, each with its session; nobody hears of those that come and go at once."""
    async with serving(model, tmp_path) as service:
        keys = [KEY._replace(session_id=f"s-{number}") for number in range(8)]
        async with held_text(service):
            turns = [
                await service.turns.submit(said("Hi", key=key, request_id=str(key))) for key in keys
            ]
            queue = service.engine.scheduler.queue
            await until(lambda: all(queue.is_arriving(key) for key in keys))
            waiting, _, _ = told(service)
            assert {one.key for one in waiting} == set(keys)
            service.turns.refuse_new()
        for turn in turns:
            assert (await failure_of(turn)).reason == "draining"
        await service.turns.idle.wait()
        waiting, running, left = told(service)
        assert (waiting, running) == ([], [])
        assert len(left) == len(keys)


async def test_a_turn_that_waits_for_its_session_has_not_arrived(model, tmp_path):
    """The session's KV is with the turn before it."""
    async with serving(model, tmp_path) as service:
        first = await service.turns.submit(asked(range(20, 40), 60, "first"))
        await until(lambda: first.has_started)
        second = await service.turns.submit(said("And then?"))
        assert not service.engine.scheduler.queue.is_arriving(KEY)
        _ = [event async for event in first.follow()]
        _ = [event async for event in second.follow()]
        assert second.request.number > first.request.number


async def test_nothing_is_expected_of_a_session_whose_next_turn_arrives(model, tmp_path):
    """It is what was expected."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        await service.turns.idle.wait()
        async with held_text(service):
            turn = await service.turns.submit(said("And then?"))
            await until(lambda: service.engine.scheduler.queue.is_arriving(KEY))
            await service.engine.loop.expect(KEY, ("bash",), superseded=False)
            assert service.engine.store.expected == []
        _ = [event async for event in turn.follow()]
