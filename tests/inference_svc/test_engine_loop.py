"""The engine loop on a tiny model: faults, cancellation, saves before loads, order."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from inference_svc.core.counters import Counters
from inference_svc.core.errors import EngineFailedError
from inference_svc.core.request import Request
from inference_svc.core.sampling_params import SamplingParams
from inference_svc.core.scheduler import Scheduler, SchedulerLimits
from inference_svc.runtime.calibration import calibrate
from inference_svc.runtime.engine_job import EngineJob
from inference_svc.runtime.engine_loop import EngineLoop
from inference_svc.runtime.model_loader import load_model
from inference_svc.runtime.model_runner import ModelRunner
from inference_svc.runtime.sampling import Sampler
from inference_svc.runtime.session_store import LoadOutcome, NoSessionStore
from inference_svc.runtime.stepping import Stepper
from inference_svc.runtime.transfers import Transfers
from inference_svc.runtime.worker_thread import WorkerThread
from shared.session_key import SessionKey

POISON = 13  # a runner with a fault raises when it is fed this token
LIMITS = SchedulerLimits(
    max_running=4, max_loading=4, max_waiting=16, kv_tokens=4000, step_tokens=64
)


class FaultyRunner(ModelRunner):
    """Fails as a model would that cannot compute one request."""

    def step(self, chunks):
        if any(POISON in chunk.token_ids for chunk in chunks):
            raise RuntimeError("out of memory")
        return super().step(chunks)


class SlowStore(NoSessionStore):
    """Notes the order of loads and saves; a save ends when it is allowed to."""

    def __init__(self):
        self.order = []
        self.may_end = asyncio.Event()

    async def load(self, slab, key, token_ids):
        self.order.append("load")
        return LoadOutcome()

    async def save(self, slab, key, token_ids):
        await self.may_end.wait()
        self.order.append("save")


class Sink:
    """Collects tokens up to a number of them."""

    def __init__(self, max_tokens):
        self.max_tokens = max_tokens
        self.token_ids = []
        self.has_token = asyncio.Event()
        self.is_started = False

    def started(self, request, outcome):
        self.is_started = True

    def sampled(self, token):
        self.token_ids.append(token.token_id)
        self.has_token.set()
        return len(self.token_ids) == self.max_tokens


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return loaded, calibrate(loaded)


@asynccontextmanager
async def running_engine(model, store=None, limits=LIMITS):
    """An engine, its scheduler and a maker of jobs."""
    store = store or NoSessionStore()
    runner = FaultyRunner(*model)
    threads = WorkerThread("compute"), WorkerThread("copy")
    scheduler = Scheduler(limits)
    stepper = Stepper(runner, threads[0], Counters())
    engine = EngineLoop(scheduler, stepper, Transfers(runner, store, threads[1]), store)
    life = asyncio.create_task(engine.run())
    try:
        yield engine, scheduler
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        for thread in threads:
            thread.close()


def job(number, token_ids, max_tokens=8, session="s"):
    return EngineJob(
        request=Request(number, list(token_ids), max_tokens, arrived_ns=0),
        key=SessionKey("default", "m", session),
        history_tokens=0,
        is_final=False,
        sampler=Sampler(SamplingParams()),
        sink=Sink(max_tokens),
        done=asyncio.get_running_loop().create_future(),
    )


async def test_one_faulty_request_does_not_fail_the_others(model):
    """A step that raises is repeated one by one; only the request at fault gets the error."""
    async with running_engine(model) as (engine, scheduler):
        good, bad = job(1, range(20, 30)), job(2, [20, POISON, 21], session="bad")
        good_done = asyncio.create_task(engine.generate(good))
        with pytest.raises(EngineFailedError, match="RuntimeError"):
            await engine.generate(bad)
        await good_done
        alone = job(3, range(20, 30))
        await engine.generate(alone)
        assert good.sink.token_ids == alone.sink.token_ids
        for finished in (good, alone):
            engine.drop(finished)
        await engine.wait_idle()
        scheduler.check()
        assert not scheduler._reserved_tokens


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_job_gives_its_budget_back(model, times):
    """Wherever it was, and however often it is dropped, others run on and the engine is idle."""
    async with running_engine(model) as (engine, scheduler):
        jobs = [job(number, range(20, 60), max_tokens=300) for number in range(8)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in jobs]
        await jobs[3].sink.has_token.wait()
        for each, task in zip(jobs, tasks, strict=True):
            task.cancel()
            for _ in range(times - 1):
                engine.drop(each)
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.wait_idle()
        scheduler.check()
        assert not scheduler._reserved_tokens
        assert not scheduler.num_waiting


async def test_a_load_waits_for_the_save_of_its_sessions_previous_turn(model):
    """Otherwise it would miss what that turn computed."""
    store = SlowStore()
    async with running_engine(model, store) as (engine, _):
        first, second, other = (
            job(1, [20, 21]),
            job(2, [20, 21, 22]),
            job(3, [20], session="other"),
        )
        await engine.generate(first)
        engine.keep(first, first.request.token_ids[:-1])
        waiting = asyncio.create_task(engine.generate(second))
        await engine.generate(other)
        engine.drop(other)
        assert not second.sink.is_started
        store.may_end.set()
        await waiting
        engine.drop(second)
        await engine.wait_idle()
    assert store.order == ["load", "load", "save", "load"]


async def test_a_budget_for_one_serves_many_in_order(model):
    """Requests that do not fit together run one after another."""
    limits = SchedulerLimits(4, 4, 16, kv_tokens=32, step_tokens=8)
    async with running_engine(model, limits=limits) as (engine, _):
        ends = []

        async def serve(number):
            served = job(number, range(20, 40))
            await engine.generate(served)
            ends.append(number)
            engine.drop(served)

        await asyncio.gather(*(serve(number) for number in range(5)))
    assert ends == sorted(ends)
