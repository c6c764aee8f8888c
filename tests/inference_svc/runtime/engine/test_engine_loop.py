"""The engine loop over the tiny model: failing steps, loads and memory, and cancelled clients."""

import asyncio

import pytest

from inference_svc.core.errors import DeadlineExceededError, EngineFailedError
from inference_svc.core.retention import Retention
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.engine.loads import PreloadPolicy
from shared.types.units import NS_PER_S
from tests.memory_engine import POISON, alone, loaded_model, running_engine


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def test_one_faulty_request_does_not_fail_the_others(model):
    """A step that raises is repeated one by one; only the failing request gets the error."""
    async with running_engine(model) as engine:
        bad = engine.request([20, POISON, 21], session="bad")
        good = asyncio.create_task(engine.run(range(20, 30)))
        with pytest.raises(EngineFailedError, match="RuntimeError"):
            await engine.loop.generate(bad)
        assert (await good).sink.token_ids == await alone(model, range(20, 30))
        await engine.all_released()


async def test_an_engine_is_idle_before_the_first_request(model):
    """A caller that waits for that at once does not wait for ever."""
    async with running_engine(model) as engine:
        assert engine.loop.idle.is_set()
        answer = asyncio.create_task(engine.run([20]))
        await asyncio.sleep(0)
        assert not engine.loop.idle.is_set()
        await answer
        await engine.all_released()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_job_frees_its_memory(model, times):
    """In any state, and however often it is dropped, others continue and the engine is idle."""
    async with running_engine(model) as engine:
        requests = [engine.request(range(20, 60), 300, session=str(number)) for number in range(12)]
        tasks = [asyncio.create_task(engine.loop.generate(each)) for each in requests]
        await requests[3].sink.has_token.wait()
        for each, task in zip(requests, tasks, strict=True):
            task.cancel()
            for _ in range(times - 1):
                engine.loop.drop(each)
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.all_released()


@pytest.mark.parametrize("residents", [True, False])
async def test_a_turn_continues_where_the_previous_one_ended(model, residents):
    """With the resident or from the store: the answer equals recomputation."""
    async with running_engine(model, keeps_residents=residents) as engine:
        prompt = list(range(20, 60))
        for tier_tokens in (0, 47, 97):
            turn = await engine.run(prompt, 8)
            found = {"hbm" if residents else "dram": tier_tokens} if tier_tokens else {}
            assert turn.outcome.tier_tokens == found
            took_s = (turn.finished_ns - turn.admitted_ns) / NS_PER_S
            assert 0 <= turn.outcome.load_s <= took_s
            assert turn.sink.token_ids == await alone(model, prompt)
            prompt = [*turn.token_ids, *range(30, 72)]
        await engine.all_released()
        assert engine.counters.snapshot()["steps"] == 3 * 8
        assert engine.counters.snapshot()["resident_hits"] == 2 * residents


async def test_a_load_waits_for_the_save_of_its_sessions_previous_turn(model):
    """Otherwise it would miss that turn's tokens."""
    async with running_engine(model, keeps_residents=False) as engine:
        engine.store.may_end.clear()
        first = await engine.run([20, 21])
        following = asyncio.create_task(engine.run([*first.token_ids, 22]))
        await engine.run([20], session="other")
        assert not following.done()
        engine.store.may_end.set()
        assert (await following).outcome.tokens == 9
        await engine.all_released()
    assert engine.store.order[:2] == ["load", "load"]


async def test_rows_that_are_still_being_saved_are_not_reused(model):
    """The sequence's KV is lent again at once, the write buffer only after the save."""
    async with running_engine(model, kv_slots=200, keeps_residents=False) as engine:
        engine.store.may_end.clear()
        first = await engine.run(range(20, 60))
        for number in range(4):
            await engine.run(range(30, 50), session=f"other {number}")
        engine.store.may_end.set()
        await engine.loop.idle.wait()
        following = [*first.token_ids, 22]
        assert (await engine.run(following)).sink.token_ids == await alone(model, following)
        await engine.all_released()


@pytest.mark.parametrize("num_failures", [1, 2, 3])
async def test_a_load_that_breaks_off_during_a_step_is_recomputed(model, num_failures):
    """The step's results are void; after some tries the history is not loaded."""
    async with running_engine(model, keeps_residents=False) as engine:
        first = await engine.run(range(20, 60))
        await engine.loop.idle.wait()
        engine.store.num_failing_loads = num_failures
        following = [*first.token_ids, *range(80, 120)]
        turn = await engine.run(following)
        assert turn.sink.token_ids == await alone(model, following)
        assert turn.sink.num_started == 1
        assert turn.outcome.tokens == (47 if num_failures == 1 else 0)
        await engine.all_released()
        again = [*turn.token_ids, 99]
        assert (await engine.run(again)).sink.token_ids == await alone(model, again)


async def test_a_load_that_broke_off_and_ends_late_takes_nothing_from_its_turn(model):
    """The turn is answered by then, and its answer being recorded: its KV is kept and saved."""
    async with running_engine(model) as engine:
        first = await engine.run(range(20, 60))
        await engine.loop.idle.wait()
        engine.loop.memory.release_resident(first.key)
        engine.store.num_failing_loads = 1
        engine.store.may_give_back.clear()
        turn = engine.request([*first.token_ids, 99])
        await engine.loop.generate(turn)
        engine.store.may_give_back.set()
        for _ in range(10):  # the load's task ends
            await asyncio.sleep(0)
        engine.loop.keep(turn, turn.token_ids[:-1])
        await engine.loop.idle.wait()
        assert len(engine.store.rows[turn.key][0]) // 4 == len(turn.token_ids) - 1
        following = await engine.run([*turn.token_ids, 98])
        assert following.outcome.tier_tokens == {"hbm": len(turn.token_ids) - 1}
        await engine.all_released()


async def test_answers_that_outgrow_their_room_move_and_go_on(model):
    """Rows for an answer are given as it grows; others may have the room meanwhile."""
    async with running_engine(model, kv_slots=700, page_tokens=None) as engine:
        turns = await asyncio.gather(
            *(engine.run(range(20 + n, 60 + n), 90, session=str(n)) for n in range(5))
        )
        for number, turn in enumerate(turns):
            expected = await alone(model, range(20 + number, 60 + number), 90)
            assert turn.sink.token_ids == expected
            assert turn.num_preemptions > 0
        await engine.all_released()
        counts = engine.counters.snapshot()
        assert counts["preempted"] == sum(turn.num_preemptions for turn in turns)
        assert 0 < counts["moves"] <= counts["preempted"]


async def test_a_higher_priority_goes_first_and_loses_no_token_of_others(model):
    """A preempted turn waits, finds its rows again and gives the same answer."""
    async with running_engine(model, max_running=1, answer_tokens=200) as engine:
        low = engine.request(range(20, 60), 100, session="low")
        answer = asyncio.create_task(engine.loop.generate(low))
        await low.sink.has_token.wait()
        high = await engine.run(range(30, 70), 4, session="high", priority=1)
        assert len(low.sink.token_ids) < 100
        await answer
        engine.loop.drop(low)
        assert low.num_preemptions == 1
        assert low.sink.token_ids == await alone(model, range(20, 60), 100)
        assert high.sink.token_ids == await alone(model, range(30, 70), 4)
        await engine.all_released()


async def test_a_deadline_ends_a_waiting_turn(model):
    """It leaves nothing behind."""
    async with running_engine(model, max_running=1) as engine:
        running = engine.request(range(20, 60), 300, session="running")
        answer = asyncio.create_task(engine.loop.generate(running))
        await running.sink.has_token.wait()
        late = engine.request(range(20, 60), session="late", deadline_ns=1)
        with pytest.raises(DeadlineExceededError):
            await engine.loop.generate(late)
        assert engine.counters.snapshot()["expired"] == 1
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await engine.all_released()


async def test_memory_for_one_serves_many_in_order(model):
    """Requests that do not fit together run one after another."""
    async with running_engine(model, kv_slots=60, max_running=4) as engine:
        ends = []

        async def serve(number):
            await engine.run(range(20, 40), session=str(number))
            ends.append(number)

        await asyncio.gather(*(serve(number) for number in range(5)))
        await engine.all_released()
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    "preload",
    [
        PreloadPolicy(is_layerwise=False, buffer_layers=0),
        *(PreloadPolicy(buffer_layers=n) for n in (None, 0, 1, 2, 99)),
    ],
)
async def test_every_way_to_preload_gives_the_same_answer(model, preload):
    """The ablations differ only in time."""
    async with running_engine(model, preload, keeps_residents=False) as engine:
        first = await engine.run(range(20, 60))
        await engine.loop.idle.wait()
        following = [*first.token_ids, *range(80, 90)]
        turn = await engine.run(following)
        assert turn.outcome.tokens == 47
        assert turn.sink.token_ids == await alone(model, following)
        if preload.buffer_layers == 0:
            assert turn.buffer_layers == 0
        await engine.all_released()


async def test_an_answer_that_is_cut_before_its_last_preemption(model):
    """A stop string may end an answer before the rows of its newest write buffer begin."""
    async with running_engine(model, answer_tokens=8, page_tokens=None) as engine:
        request = engine.request(range(20, 60), 12)
        await engine.loop.generate(request)
        assert request.num_preemptions == 1
        kept = request.token_ids[: request.write_buffer.first_token - 1]
        engine.loop.keep(request, kept)
        await engine.loop.idle.wait()
        following = [*kept, 99, 98]
        assert (await engine.run(following)).sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_cancelled_turn_keeps_its_sessions_resident(model):
    """Its history is as valid as before."""
    async with running_engine(model) as engine:
        first = await engine.run(range(20, 60))
        following = [*first.token_ids, *range(30, 40)]
        cancelled = engine.request(following, 300, history_tokens=47)
        answer = asyncio.create_task(engine.loop.generate(cancelled))
        await cancelled.sink.has_token.wait()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await engine.loop.idle.wait()
        again = await engine.run([*first.token_ids, *range(50, 60)])
        assert again.outcome.tier_tokens == {"hbm": 47}
        assert again.sink.token_ids == await alone(model, again.token_ids[:58])
        await engine.all_released()


async def test_a_new_engine_is_idle(model):
    """A drain need not wait."""
    async with running_engine(model) as engine:
        assert engine.loop.idle.is_set()
        answer = asyncio.create_task(engine.run(range(20, 40)))
        await engine.store.is_asked.wait()
        assert not engine.loop.idle.is_set()
        await answer
        await engine.all_released()


async def test_the_loop_ends_cleanly_during_a_turn(model):
    """Cancelling it is no error, in any state, and takes no longer than a step."""
    async with running_engine(model, step_tokens=16) as engine:
        request = engine.request(range(20, 220), 300)
        answer = asyncio.create_task(engine.loop.generate(request))
        await request.sink.has_token.wait()
        engine.life.cancel()
        with pytest.raises(asyncio.CancelledError):
            await engine.life
        answer.cancel()


async def test_a_failed_step_during_a_save_stores_nothing_of_it(model):
    """The rows are recomputed, one request at a time, and stored then."""
    async with running_engine(model, keeps_residents=False) as engine:
        bad = engine.request([*range(20, 50), POISON], session="bad")
        good = asyncio.create_task(engine.run(range(20, 90)))
        with pytest.raises(EngineFailedError):
            await engine.loop.generate(bad)
        turn = await good
        await engine.loop.idle.wait()
        assert engine.counters.snapshot()["save_errors"] == 0
        following = [*turn.token_ids, 99]
        again = await engine.run(following)
        assert again.outcome.tokens == 77
        assert again.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_synchronous_saving_delays_the_next_turn(model):
    """Its first token comes after the save of the previous turn."""
    async with running_engine(model, saves_first=True) as engine:
        first = engine.request(range(20, 60))
        await engine.loop.generate(first)
        engine.store.may_end.clear()
        second = engine.request(range(30, 60), session="second")
        answer = asyncio.create_task(engine.loop.generate(second))
        engine.loop.keep(first, first.token_ids[:-1])
        await asyncio.sleep(0)
        assert not second.sink.token_ids
        engine.store.may_end.set()
        await answer
        assert engine.store.order[:4] == ["load", "save", "save", "load"]
        engine.loop.drop(second)
        await engine.all_released()


async def test_a_deleted_session_is_removed_from_memory_too(model):
    """Its resident is freed and its store notified, after its last save."""
    async with running_engine(model) as engine:
        turn = await engine.run(range(20, 60))
        await engine.loop.forget(turn.key, turn.token_ids)
        assert not len(engine.scheduler.residents)
        assert not engine.store.rows
        await engine.all_released()


@pytest.mark.parametrize("saves", [True, False])
async def test_the_end_of_a_session_is_reported_after_its_last_save(model, saves):
    """Once, and its KV is not kept in memory."""
    async with running_engine(model, write_slots=4000 if saves else 0) as engine:
        engine.store.saves = saves
        await engine.run(range(20, 60), session="other")
        assert engine.store.ended == []
        last = await engine.run(range(20, 60), is_final=True)
        await engine.loop.idle.wait()
        assert engine.store.ended == [last.key]
        assert engine.store.order[-1] == "end"
        assert len(engine.scheduler.residents) == 1
        await engine.all_released()


async def test_the_end_of_a_session_is_reported_after_preemptions_and_failed_loads(model):
    """Whatever happened to its last turn; the last save counts."""
    few = {"keeps_residents": False, "answer_tokens": 8, "page_tokens": None}
    async with running_engine(model, **few) as engine:
        first = await engine.run(range(20, 60))
        engine.store.num_failing_loads = 1
        prompt = [*first.token_ids, *range(30, 50)]
        last = await engine.run(prompt, 40, is_final=True)
        assert last.num_preemptions
        assert last.num_failed_loads
        await engine.loop.idle.wait()
        assert engine.store.ended == [last.key]
        assert engine.store.order[-2:] == ["save", "end"]
        await engine.all_released()


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("is_final", [True, False])
async def test_retention_is_reported_after_the_save(model, saves, is_final):
    """With the session's prefix; before its end, which retention must not cancel."""
    wish = Retention(60, 3600)
    async with running_engine(model, write_slots=4000 if saves else 0) as engine:
        engine.store.saves = saves
        await engine.run(range(20, 60), session="other")
        assert engine.store.retained == []
        fields = {"is_final": is_final, "retention": wish, "prefix_tokens": 3}
        turn = await engine.run(range(20, 60), **fields)
        await engine.loop.idle.wait()
        assert engine.store.retained == [(turn.key, wish, as_token_bytes([20, 21, 22]))]
        told = [what for what in engine.store.order if what in ("retain", "end")]
        assert told == ["retain", "end"][: 1 + is_final]
        assert not saves or engine.store.order[-1 - is_final - 1] == "save"
        await engine.all_released()


async def test_expected_tools_are_reported_after_the_save(model):
    """Unless a turn of the session has arrived by then."""
    async with running_engine(model) as engine:
        engine.store.may_end.clear()
        turn = await engine.run(range(20, 60))
        telling = asyncio.create_task(engine.loop.expect(turn.key, ("bash",), superseded=False))
        await asyncio.sleep(0)
        assert engine.store.expected == []
        engine.store.may_end.set()
        await telling
        assert engine.store.expected == [(turn.key.session_id, ("bash",), False)]
        assert engine.store.order[-2:] == ["save", "expect"]
        engine.store.may_end.clear()
        turn = await engine.run(turn.token_ids)
        telling = asyncio.create_task(engine.loop.expect(turn.key, ("late",), superseded=False))
        await asyncio.sleep(0)
        request = engine.request(turn.token_ids)
        await engine.loop.generate(request)
        await engine.loop.expect(turn.key, ("early",), superseded=False)
        engine.loop.drop(request)
        engine.store.may_end.set()
        await telling
        await engine.all_released()
        assert len(engine.store.expected) == 1
        await engine.loop.expect(turn.key, (), superseded=True)
        assert engine.store.expected[1:] == [(turn.key.session_id, (), True)]


async def test_a_session_whose_last_turn_failed_continues(model):
    """The end belonged to that turn."""
    async with running_engine(model) as engine:
        request = engine.request(range(20, 60), is_final=True)
        await engine.loop.generate(request)
        engine.loop.drop(request)
        await engine.all_released()
        assert engine.store.ended == []


async def test_a_turn_runs_until_its_kv_is_kept_or_dropped(model):
    """As reported to its store; a preempted one waits again, a resident does neither."""

    def reported():
        change = engine.store.queue.next_update(100).change
        engine.store.queue.restart()
        waiting = [request.key.session_id for request in change.waiting]
        return waiting, [request.key.session_id for request in change.running]

    async with running_engine(model, max_running=1, max_loading=1, answer_tokens=200) as engine:
        low = engine.request(range(20, 60), 100, session="low")
        answer = asyncio.create_task(engine.loop.generate(low))
        await low.sink.has_token.wait()
        assert reported() == ([], ["low"])
        high = engine.request(range(30, 70), 4, session="high", priority=1)
        await engine.loop.generate(high)
        assert low.num_preemptions == 1
        waiting, running = reported()
        assert "high" in running
        assert "low" in waiting + running
        engine.loop.keep(high, high.token_ids[:-1])
        await answer
        assert reported() == ([], ["low"])
        engine.loop.drop(low)
        await engine.all_released()
        assert reported() == ([], [])


def test_token_bytes_are_little_endian():
    """As kvd needs them."""
    assert as_token_bytes([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
