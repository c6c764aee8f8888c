"""Loads that fail or are abandoned, and the engine's gauges."""

import asyncio

import pytest

from inference_svc.core.errors import EngineFailedError
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.runtime.engine.loads import PreloadPolicy
from tests.memory_engine import POISON, Sink, alone, loaded_model, running_engine

FIRST = list(range(20, 60))


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def run_stored_turn(engine):
    """Run a turn whose KV is in the store only; return the next one's prompt."""
    first = await engine.run(FIRST)
    await engine.loop.idle.wait()
    return [*first.token_ids, *range(80, 120)]


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_turn_cancelled_while_its_load_begins_frees_everything(model, is_stored):
    """Sequence KV and write buffer; the store may drop its lease."""
    async with running_engine(model, keeps_residents=False) as engine:
        following = await run_stored_turn(engine) if is_stored else FIRST
        engine.store.order.clear()
        engine.store.is_asked.clear()
        engine.store.may_begin.clear()
        request = engine.request(following)
        answer = asyncio.create_task(engine.loop.generate(request))
        await engine.store.is_asked.wait()
        answer.cancel()
        await asyncio.wait([answer])
        engine.store.may_begin.set()
        await engine.all_released()
        assert engine.store.order == ["load", *(["cancel"] if is_stored else [])]
        turn = await engine.run(following)
        assert turn.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_load_that_cannot_begin_fails_only_its_turn(model):
    """With its error; nothing of it stays."""
    async with running_engine(model) as engine:
        engine.store.load_error = RuntimeError("a bug")
        with pytest.raises(RuntimeError, match="a bug"):
            await engine.loop.generate(engine.request(FIRST))
        engine.store.load_error = None
        await engine.all_released()
        assert (await engine.run(FIRST)).sink.token_ids == await alone(model, FIRST)
        await engine.all_released()


class StumblingSink(Sink):
    """Raises when its turn starts."""

    def on_start(self, request):
        raise RuntimeError("a bug")


async def test_a_turn_that_fails_at_the_announcement_of_its_load_frees_the_lease(model):
    """Otherwise the lease of the found blocks would stay."""
    async with running_engine(model, keeps_residents=False) as engine:
        request = engine.request(await run_stored_turn(engine))
        request.sink = StumblingSink(8)
        with pytest.raises(RuntimeError, match="a bug"):
            await engine.loop.generate(request)
        await engine.all_released()
        assert engine.store.order[-1] == "cancel"


@pytest.mark.parametrize("policy", [LoadPolicy.NEVER, LoadPolicy.ALWAYS])
async def test_a_turn_may_have_its_own_load_policy(model, policy):
    """Others use the engine's."""
    async with running_engine(model, keeps_residents=False) as engine:
        following = await run_stored_turn(engine)
        engine.loop._loading._loads.policy = (
            LoadPolicy.NEVER if policy is LoadPolicy.ALWAYS else LoadPolicy.ALWAYS
        )
        request = engine.request(following)
        request.load_policy = policy
        await engine.loop.generate(request)
        engine.loop.keep(request, request.token_ids[:-1])
        assert request.outcome.tokens == (47 if policy is LoadPolicy.ALWAYS else 0)
        await engine.all_released()
        other = await engine.run([*request.token_ids, 7])
        assert (other.outcome.tokens > 0) == (policy is LoadPolicy.NEVER)
        await engine.all_released()


@pytest.mark.parametrize("is_resident", [True, False])
async def test_a_load_has_the_length_of_the_sessions_history(model, is_resident):
    """Some of it may be elsewhere. KV in the engine's memory is not requested at all."""
    async with running_engine(model, keeps_residents=is_resident) as engine:
        request = engine.request(await run_stored_turn(engine), history_tokens=47)
        await engine.loop.generate(request)
        engine.loop.keep(request, request.token_ids[:-1])
        assert engine.store.histories == ([0] if is_resident else [0, 47])
        await engine.all_released()


@pytest.mark.parametrize("num_failures", [0, 1])
async def test_a_load_announced_as_complete_may_break_off(model, num_failures):
    """The turn fails even without separate layers."""
    preload = PreloadPolicy(is_layerwise=False, buffer_layers=99)
    async with running_engine(model, preload, keeps_residents=False) as engine:
        following = await run_stored_turn(engine)
        engine.store.num_failing_loads = num_failures
        turn = await engine.run(following)
        assert turn.num_preemptions == 0
        assert turn.num_failed_loads == num_failures
        assert turn.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_turn_joins_the_batch_when_its_read_buffer_is_loaded(model, monkeypatch):
    """The load of other layers waits for that; other turns do not wait for the last layer."""
    monkeypatch.setattr("inference_svc.core.scheduling.start_gate.HOLD_LIMIT_NS", 1 << 60)
    async with running_engine(model, PreloadPolicy(buffer_layers=1), keeps_residents=False) as e:
        following = await run_stored_turn(e)
        async with asyncio.timeout(60):  # otherwise it would make no progress
            turn = await e.run(following)
        assert turn.buffer_layers == 1
        assert turn.sink.token_ids == await alone(model, following)
        await e.all_released()


async def test_a_failed_step_of_several_is_repeated_one_by_one(model):
    """Also with saves: those of the others are stored, and nothing waits for the rest."""
    async with running_engine(model) as engine:
        running = engine.request(FIRST, 30, session="running")
        answer = asyncio.create_task(engine.loop.generate(running))
        await running.sink.has_token.wait()
        good_ids = list(range(30, 70))
        good, bad = (
            asyncio.create_task(engine.run(ids, session=name))
            for name, ids in (("good", good_ids), ("bad", [*good_ids, POISON]))
        )
        with pytest.raises(EngineFailedError):
            await bad
        assert (await good).sink.token_ids == await alone(model, good_ids)
        await answer
        assert running.sink.token_ids == await alone(model, FIRST, 30)
        engine.loop.keep(running, running.token_ids[:-1])
        await engine.all_released()
        assert engine.counters.snapshot()["steps_failed"] >= 2
        assert {key.session_id for key in engine.store.rows} == {"good", "running"}


async def test_the_number_of_residents_is_bounded(model):
    """The least recently used one is freed."""
    async with running_engine(model, most_residents=2) as engine:
        for first, name in enumerate("abc"):
            await engine.run([20 + first, 21, 22], session=name)
        await engine.loop.idle.wait()
        gauges = engine.loop.gauges()
        assert gauges["resident_sessions"] == 2
        assert (
            gauges["pool_token_slots"] - gauges["pool_free_token_slots"]
            >= gauges["resident_token_slots"]
            > 0
        )
        assert engine.counters.snapshot()["residents_evicted"] == 1
        assert (await engine.run([20, 21, 23], session="a")).outcome.tier_tokens == {}
        await engine.all_released()


async def test_the_engines_gauges(model):
    """Running and waiting turns, reserved and saved memory; all zero at the end."""
    async with running_engine(model, max_running=1, max_loading=1) as engine:
        loop = engine.loop
        loop.scheduler.queue.weights = {"default": 2.0}
        assert loop.scheduler.estimates.retry_after_s() > 0
        running = engine.request(FIRST, 200, session="running")
        answers = [asyncio.create_task(loop.generate(running))]
        await running.sink.has_token.wait()
        late = engine.request(FIRST, session="late", priority=-1)
        later = engine.request(FIRST, session="later", priority=-1)
        answers += [asyncio.create_task(loop.generate(request)) for request in (late, later)]
        await asyncio.sleep(0)
        assert (loop.scheduler.num_running, len(loop.scheduler.queue)) == (1, 2)
        assert later.start_tag - late.start_tag == (40 + 8) / 2
        gauges = loop.gauges()
        assert gauges["reserved_token_slots"] >= 40
        assert gauges["saves_under_way"] == 1
        assert gauges["compute_busy_s"] > 0
        for answer in answers:
            answer.cancel()
        await asyncio.wait(answers)
        await engine.all_released()
        assert (loop.scheduler.num_running, len(loop.scheduler.queue)) == (0, 0)
        assert loop.gauges()["saves_under_way"] == 0
