"""An engine over the tiny model and a store in memory whose loads and saves a test controls."""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from inference_svc.core.answers import SamplingParams
from inference_svc.core.counters import Counters
from inference_svc.core.ranges import kept_runs
from inference_svc.core.rates.rates import LoadPolicy, Rates
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import SchedulerLimits
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.graph_choice import StepMemory, choose_graphs
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.drafts import Drafter
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.engine.loads import Loads, PreloadPolicy
from inference_svc.runtime.engine.stepping import Stepper
from inference_svc.runtime.kv.layer_gate import StepNotDoneError
from inference_svc.runtime.kv.page_pool import make_pool
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import BegunLoad
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.kvd_client.grants import LoadGrant
from shared.types.errors import LoadFailedError
from shared.types.granted_slots import Lookup
from shared.types.session_key import SessionKey
from tests.split_attention import attend_pages

POISON = 13  # a runner with a fault raises when it is fed this token
BLOCK_TOKENS = 16
PAGE_TOKENS = 4
REPLAYED_TOKENS = 64  # steps of longer sequences are computed: what stands in for a kernel is slow
LIMITS = {
    "max_running": 4,
    "max_loading": 4,
    "max_waiting": 16,
    "kv_slots": 4000,
    "step_tokens": 64,
    "mixed_step_tokens": 32,
    "answer_tokens": 8,
    "write_slots": 4000,
    "keeps_residents": True,
}


class FaultyRunner(ModelRunner):
    """Fails as a model would that cannot compute one of the requests."""

    def step(self, chunks, clock=None):
        if any(POISON in chunk.token_ids for chunk in chunks):
            raise RuntimeError("out of memory")
        return super().step(chunks, clock)


class MemoryStore:
    """Keeps the position-free KV of saved sessions; tests decide when saves end.

    Attributes:
        order: the calls, oldest first.
        histories: tokens that the sessions had before, as given in loads.
        is_asked, may_begin: set when a load arrives; loads wait for the second.
        load_error: raised by the next load that begins; None: no error.
        is_away: whether discards and grafts do not reach it.
        offers_grafts: whether it supports grafts.
        is_grafting, may_graft: set when a graft arrives; grafts wait for the second.
        has_discarded: set when it received a discard.
        num_failing_loads: so many loads break off after they were announced.
        may_give_back: loads that broke off end.
    """

    saves = True
    state = "attached"
    loads = property(lambda self: self)

    def __init__(self):
        self.order = []
        self.is_asked, self.may_begin, self.may_end = (asyncio.Event() for _ in range(3))
        self.may_give_back = asyncio.Event()
        for may in (self.may_begin, self.may_end, self.may_give_back):
            may.set()
        self.load_error = None
        self.is_away = self.offers_grafts = False
        self.is_grafting, self.may_graft = asyncio.Event(), asyncio.Event()
        self.may_graft.set()
        self.has_discarded = asyncio.Event()
        self.num_failing_loads = 0
        self.rows = {}  # key -> token ids, keys and values of all layers
        self.lineages = {}  # of the tokens in this list
        self.ended = []
        self.retained = []
        self.expected = []
        self.histories = []

    async def begin(self, request):
        self.order.append("load")
        self.histories.append(request.history_tokens)
        self.is_asked.set()
        await self.may_begin.wait()
        if self.load_error is not None:
            raise self.load_error
        stored = self.rows.get(request.key, (b"", [], []))[0]
        num_tokens = 0
        is_of_it = self.lineages.get(request.key) == request.lineage
        if is_of_it and request.token_ids.startswith(stored):
            num_tokens = min(len(stored) // 4, request.num_tokens)
        if not num_tokens or request.policy is LoadPolicy.NEVER:
            return BegunLoad(reason="miss")
        begun = BegunLoad(num_tokens, num_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        begun.tier_tokens["dram"] = num_tokens
        begun.grant = LoadGrant(Lookup.HIT, 1, (), num_tokens, False, "", None)
        self.begun_key = request.key
        return begun

    async def finish(self, begun, kv, tail, gate, layers):
        if self.num_failing_loads:
            self.num_failing_loads -= 1
            gate.fail(LoadFailedError("it broke off", "compute"))
            await self.may_give_back.wait()
            return
        _, keys, values = self.rows[self.begun_key]
        for layer in layers:
            rotary = self.calibration.layers[layer].key.rotary
            free = keys[layer][: begun.end_token]
            with kv.keys.filling(layer, 0, begun.end_token) as out:
                out.copy_(rotary.rotate(free, 0))
            with kv.values.filling(layer, 0, begun.end_token) as out:
                out.copy_(values[layer][: begun.end_token])
            count = begun.end_token - tail.first_token
            places = tail.places(tail.first_token, count)
            for kept, rows in ((tail.keys, keys), (tail.values, values)):
                places.write(kept[layer], rows[layer][tail.first_token : begun.end_token])
            gate.open(layer + 1)
        if layers.stop == gate.num_layers:
            gate.confirm()

    async def cancel(self, begun):
        self.order.append("cancel")

    async def save(self, key, token_ids, from_token, buffer, clock=None, lineage=None):
        await self.may_end.wait()
        self.order.append("save")
        if clock is not None:
            try:
                await asyncio.to_thread(clock.wait_confirmed)
            except StepNotDoneError:
                return None
        if self.lineages.get(key) != lineage:
            self.rows.pop(key, None)
        stored, keys, values = self.rows.get(key, (b"", [], []))
        if from_token > len(stored) // 4:  # sessions share equal prefixes
            begins = token_ids[: 4 * from_token]
            stored, keys, values = next(
                (
                    rows
                    for other, rows in self.rows.items()
                    if rows[0].startswith(begins) and self.lineages.get(other) == lineage
                ),
                (b"", [], []),
            )
        if not (from_token <= len(stored) // 4 and stored.startswith(token_ids[: 4 * from_token])):
            return "gap"
        num_tokens = len(token_ids) // 4
        self.lineages[key] = lineage
        places = buffer.places(from_token, num_tokens - from_token)
        new = [[places.read(r) for r in rows.layers] for rows in (buffer.keys, buffer.values)]
        self.rows[key] = (
            token_ids,
            *(
                [_join_rows(old, rows, from_token) for old, rows in _pairs(olds, news)]
                for olds, news in zip((keys, values), new, strict=True)
            ),
        )
        return ""

    async def discard(self, key, token_ids, ranges, lineage=None):
        self.order.append("discard")
        self.has_discarded.set()
        if self.is_away or self.lineages.get(key) != lineage:  # also if the discard is repeated
            return
        stored, keys, values = self.rows.pop(key, (b"", [], []))
        if not stored or not token_ids.startswith(stored):
            return
        runs = kept_runs(ranges, len(stored) // 4)
        if not runs:
            return
        self.lineages[key] = None if lineage is None else lineage.after(token_ids, ranges)
        self.rows[key] = (
            b"".join(stored[4 * start : 4 * end] for start, end in runs),
            *([torch.cat([r[s:e] for s, e in runs]) for r in rows] for rows in (keys, values)),
        )

    async def graft(self, key, token_ids, lineage, source):
        self.order.append("graft")
        self.is_grafting.set()
        await self.may_graft.wait()
        stored, *own = self.rows.get(key, (b"", [], []))
        theirs, *others = self.rows.get(source.key, (b"", [], []))
        end = min(source.end, len(theirs) // 4)
        is_here = self.lineages.get(key) == lineage and stored == token_ids
        if self.is_away or not is_here or end <= source.start:
            return 0
        self.lineages[key] = source.lineage_after(token_ids, lineage)
        self.rows[key] = (
            stored + theirs[4 * source.start : 4 * end],
            *(
                [torch.cat((one, other[source.start : end])) for one, other in _pairs(*both)]
                for both in zip(own, others, strict=True)
            ),
        )
        return end - source.start

    async def retain(self, key, retention, prefix):
        self.order.append("retain")
        self.retained.append((key, retention, prefix))

    async def expect(self, key, tools, *, superseded):
        self.order.append("expect")
        self.expected.append((key.session_id, tools, superseded))

    async def end_session(self, key):
        self.order.append("end")
        self.ended.append(key)

    async def forget(self, key, token_ids):
        self.rows.pop(key, None)

    def follow_queue(self, feed):
        self.queue = feed


def _pairs(olds, news):
    return zip(olds or [None] * len(news), news, strict=True)


def _join_rows(old, new, from_token):

    if old is None or not from_token:
        assert not from_token, "a gap"
        return new.clone()
    assert old.shape[0] >= from_token, "a gap"
    return torch.cat((old[:from_token], new))


class Sink:
    """A sink that collects tokens up to a limit."""

    def __init__(self, max_tokens):
        self.max_tokens = max_tokens
        self.token_ids = []
        self.has_token = asyncio.Event()
        self.num_started = 0
        self.is_cut_off = False

    def on_start(self, request):
        self.num_started += 1

    def on_token(self, token):
        self.token_ids.append(token.token_id)
        self.has_token.set()
        return len(self.token_ids) == self.max_tokens

    def on_window_full(self):
        self.is_cut_off = True


def loaded_model(directory):
    """Return the model, calibrated."""
    loaded = load_model(directory, "float32", "cpu")
    return loaded, calibrate(loaded)


class Engine:
    """An engine over a store in memory, with a factory for requests."""

    def __init__(self, model, store, given, preload, saves_first, capture, draft_tokens):
        loaded, calibration = model
        store.calibration = calibration
        self.store = store
        self.counters, rates = Counters(), Rates()
        self.threads = WorkerThread("compute"), WorkerThread("load")
        limits = SchedulerLimits(**{**LIMITS, **given})
        is_on_pages = os.environ.get("INFERENCE_SCHEDULER__WORKING_KV") == "pages"
        if is_on_pages and "page_tokens" not in given:
            size = min(PAGE_TOKENS, limits.kv_slots)
            limits = replace(limits, kv_slots=limits.kv_slots // size * size, page_tokens=size)
        num_layers = len(calibration.layers)
        self.scheduler = Scheduler(limits, rates, num_layers)
        self.pool = make_pool(
            [layer.shape for layer in calibration.layers],
            self.scheduler.held_slots,
            num_buffer_slots=1000,
            device=loaded.device,
            dtype=loaded.dtype,
        )
        ring = WriteRing(
            [layer.shape for layer in calibration.layers],
            self.scheduler.write_slots,
            device=loaded.device,
            dtype=loaded.dtype,
        )
        residents = ResidentSequences(self.pool, BLOCK_TOKENS)
        saves = self.saves = Saves(store, self.counters, block_tokens=BLOCK_TOKENS, group_tokens=32)
        loads = Loads(
            *(self.pool, ring, store, residents, self.threads[1], self.counters),
            num_layers=num_layers,
            policy=LoadPolicy.ALWAYS,
            preload=preload or PreloadPolicy(),
        )
        shifts = Compactor(calibration, self.threads[1])
        attention = graphs = None
        if capture is not None:
            attention = PagedAttention(attend_pages)
            memory = StepMemory(self.pool, ring, limits.max_running, REPLAYED_TOKENS)
            graphs = choose_graphs("auto", capture, *model, attention, memory)
        runner = FaultyRunner(*model, attention, graphs)
        stepper = Stepper(runner, self.threads[0], self.counters, rates, TurnHistograms())
        self.loop = EngineLoop(
            *(self.scheduler, stepper, loads, saves, residents, shifts, self.pool, ring, store),
            self.counters,
            Drafter(rates.decodes, most_tokens=draft_tokens, end_ids=loaded.eos_ids),
            num_layers=num_layers,
            saves_first=saves_first,
        )
        self._number = 0

    def request(self, token_ids, max_tokens=8, session="s", **fields):
        self._number += 1
        key = SessionKey("default", "m", session)
        return EngineRequest(
            *(self._number, key, list(token_ids), max_tokens, 0),
            sampler=Sampler(SamplingParams()),
            sink=Sink(max_tokens),
            **fields,
        )

    async def run(self, token_ids, max_tokens=8, session="s", **fields):
        """Run one turn and keep its session; return its tokens."""
        request = self.request(token_ids, max_tokens, session, **fields)
        await self.loop.generate(request)
        self.loop.keep(request, request.token_ids[:-1])
        return request

    async def all_released(self):
        """Return whether no request is active and only residents hold memory."""
        await self.loop.idle.wait()
        self.scheduler.check()
        assert not self.scheduler.slots.reserved_slots
        for key in list(self.loop.memory._residents._residents):
            self.loop.memory.release_resident(key)
        assert self.pool.num_free == self.pool.num_token_slots
        slots = self.scheduler.write_slots
        assert slots.num_free == slots.num_slots
        assert not len(self.scheduler.queue)


@asynccontextmanager
async def running_engine(
    model, preload=None, saves_first=False, capture=None, draft_tokens=8, **limits
):
    engine = Engine(model, MemoryStore(), limits, preload, saves_first, capture, draft_tokens)
    life = engine.life = asyncio.create_task(engine.loop.run())
    try:
        yield engine
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        for thread in engine.threads:
            thread.close()


async def alone(model, token_ids, max_tokens=8):
    """Return the answer of a turn that runs alone, one token per step."""
    async with running_engine(model, draft_tokens=0) as engine:
        return (await engine.run(token_ids, max_tokens)).sink.token_ids
