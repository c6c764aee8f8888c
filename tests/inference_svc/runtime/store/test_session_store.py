"""The session store against a peer that fails or answers nonsense: a miss, and settled."""

import asyncio
import threading

import pytest
import torch

from inference_svc.core.counters import Counters
from inference_svc.core.discards import kept_runs
from inference_svc.core.rates.rates import LoadPolicy, Rates, pairs
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate, StepNotDoneError
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.store.kvd_loads import CopyThreads
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.session_store import LoadRequest
from inference_svc.runtime.worker_thread import WorkerThread
from kvd.tiers.progress import Progress
from shared.kvd_client.arena_map import LoadProgress, ProgressWords
from shared.kvd_client.attachment import KvdUnavailableError
from shared.kvd_client.grants import KvdProtocolError, LoadGrant, StoreGrant
from shared.types.errors import LoadFailedError
from shared.types.granted_slots import LoadSpan, Lookup, StoreBlock
from shared.types.lineage import WHOLE
from shared.types.session_key import SessionKey

CPU = torch.device("cpu")

KEY = SessionKey("default", "m", "s")
PROMPT = list(range(20, 60))


class MemoryArena:
    """Slots in ordinary memory."""

    def __init__(self, slot_bytes, num_slots):
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.memory = memoryview(bytearray(slot_bytes * num_slots))


class Peer:
    """A kvd of one session in memory, granting `grant_tokens` at a time; faults by argument."""

    attached = True

    def __init__(self, layout, fail_at="", grant_tokens=16, pending=""):
        self.arena = MemoryArena(layout.block_bytes, 8)
        self.fail_at = fail_at
        self.grant_tokens = grant_tokens
        self.stored = b""
        self.open_leases = set()
        self.next_lease = 0
        self.pending = pending  # what becomes of loads under way: "arrives", "fails", "never"
        self.progress = Progress(4)
        self.words = ProgressWords(self.progress.fd, 4)
        self.num_layers = len(layout.layers)
        self.dram_tokens = 1000  # what is beyond is on SSD
        self.ended = []
        self.lineages = []  # of loads, stores and discards

    def pending_progress(self, lease_id):
        """A load that ends as its argument says, in a thread of its own; "never" has no end."""
        index = self.progress.open(lease_id, self.words.wake)

        def read():
            for layer in range(self.num_layers):
                self.progress.publish(lease_id, layer + (self.pending == "arrives"))
            if self.pending == "fails":
                self.progress.fail(lease_id)

        threading.Thread(target=read).start()
        return LoadProgress(self.words, index, lease_id)

    def lease(self):
        self.next_lease += 1
        self.open_leases.add(self.next_lease)
        return self.next_lease

    def maybe_fail(self, where):
        if self.fail_at == where:
            raise KvdUnavailableError("kvd went away", "history is recomputed")
        if self.fail_at == where + " nonsense":
            raise KvdProtocolError("kvd answered nonsense", "check")

    async def prepare_load(
        self, key, token_ids, from_token, deadline_s, *, accept_pending, dram_only, lineage
    ):
        self.lineages.append(lineage)
        self.maybe_fail("prepare_load" if from_token == 0 else "second prepare_load")
        if dram_only and from_token >= self.dram_tokens:
            return self.load_grant(Lookup.MISS, 0, (), from_token, False, reason="on_ssd")
        num_tokens = min(len(self.stored) // 4, len(token_ids) // 4)
        end = min(from_token + self.grant_tokens, num_tokens)
        if end <= from_token or self.stored[: end * 4] != token_ids[: end * 4]:
            return self.load_grant(Lookup.MISS, 0, (), from_token, False)
        slot_id = from_token // self.grant_tokens
        if self.fail_at == "slot":
            slot_id = 99
        tier = "dram" if from_token < self.dram_tokens else "ssd"
        span = LoadSpan(slot_id, 0, end - from_token, from_token, tier, 1)
        more = end < num_tokens
        lease_id = self.lease()
        if accept_pending and self.pending:
            progress = self.pending_progress(lease_id)
            return self.load_grant(Lookup.PENDING, lease_id, (span,), end, more, progress)
        return self.load_grant(Lookup.HIT, lease_id, (span,), end, more)

    def load_grant(self, lookup, lease_id, spans, end_token, more, progress=None, reason="evicted"):
        return LoadGrant(
            lookup=lookup,
            lease_id=lease_id,
            spans=spans,
            end_token=end_token,
            more=more,
            miss_reason="" if spans else reason,
            arena=self.arena,
            progress=progress,
        )

    async def complete_load(self, grant):
        self.open_leases.discard(grant.lease_id)
        self.progress.close(grant.lease_id)
        self.maybe_fail("complete_load")

    async def prepare_store(self, key, token_ids, from_token, deadline_s, *, lineage):
        self.lineages.append(lineage)
        self.maybe_fail("prepare_store")
        num_tokens = len(token_ids) // 4
        if self.stored[: len(token_ids)] == token_ids:
            return StoreGrant(0, (), num_tokens, more=False, refused_reason="", arena=self.arena)
        end = min(from_token + self.grant_tokens, num_tokens)
        slot_id = 99 if self.fail_at == "slot" else from_token // self.grant_tokens
        block = StoreBlock(slot_id, from_token, end - from_token, 1)
        self.wanted = token_ids[: end * 4]
        return StoreGrant(
            lease_id=self.lease(),
            blocks=(block,),
            end_token=end,
            more=end < num_tokens,
            refused_reason="",
            arena=self.arena,
        )

    async def discard(self, key, token_ids, ranges, *, lineage=WHOLE):
        self.maybe_fail("discard")
        self.lineages.append(lineage)
        assert token_ids.startswith(self.stored)
        kept = kept_runs(ranges, len(self.stored) // 4)
        self.stored = b"".join(self.stored[4 * start : 4 * end] for start, end in kept)
        return len(self.stored) // 4

    async def end_session(self, key):
        self.ended.append(key)
        self.maybe_fail("end_session")

    async def complete_store(self, grant, success):
        self.open_leases.discard(grant.lease_id)
        self.maybe_fail("complete_store")
        if success and grant.blocks:
            self.stored = self.wanted
        return len(self.stored) // 4


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return loaded, calibrate(loaded)


@pytest.fixture
def copy_threads():
    threads = WorkerThread("load"), WorkerThread("read"), WorkerThread("store")
    yield threads
    for thread in threads:
        thread.close()


class Scene:
    """A store beside a peer, and memory for sequences' KV."""

    def __init__(self, model, threads, deadline_s=30.0, peer=None, **faults):
        self.model = model
        layout = model[1].layout
        self.peer = peer or Peer(layout, **faults)
        self.counters = Counters()
        self.rates = Rates()
        self.store = KvdSessionStore(
            *(self.peer, model[1], CopyThreads(*threads), self.counters, self.rates),
            saves=True,
            deadline_s=deadline_s,
        )
        self.runner = ModelRunner(*model)
        shapes = [layer.shape for layer in model[1].layers]
        self.pool = KVPool(shapes, 2000, device=model[0].device, dtype=model[0].dtype)

    def computed(self):
        """A sequence's KV and a write buffer with the prompt."""
        kv, buffer = self.pool.new_kv(64), self.pool.new_write_buffer(0, 64)
        self.runner.step([Chunk(kv, PROMPT, want_logits=False, write_buffer=buffer)])
        return kv, buffer

    async def save(self):
        return await self.store.save(KEY, as_token_bytes(PROMPT), 0, self.computed()[1])

    async def load(self, policy=LoadPolicy.ALWAYS):
        """Both halves; returns what was begun, the sequence's KV, and its gate's error."""
        kv, wanted = self.pool.new_kv(64), as_token_bytes(PROMPT[:-1])
        begun = await self.store.loads.begin(LoadRequest(KEY, wanted, kv, policy))
        error = None
        if begun.grant is not None:
            gate = LayerGate(len(self.model[1].layers))
            tail = self.pool.new_write_buffer(begun.tail_from, 64)
            layers = range(gate.num_layers)
            await self.store.loads.finish(begun, kv, tail, gate, layers)
            assert gate.is_settled
            error = gate.error
        if error is None:
            kv.num_tokens = begun.end_token
        return begun, kv, error

    def check_logits(self, kv):
        """What follows the loaded rows is what follows the computed ones."""
        computed, _ = self.computed()
        last = [
            self.runner.step([Chunk(each, tokens, want_logits=True)])
            for each, tokens in ((computed, [7]), (kv, [PROMPT[-1], 7]))
        ]
        assert torch.allclose(*last, atol=1e-4)


async def saved_scene(model, threads, **faults):
    scene = Scene(model, threads, **faults)
    await scene.save()
    return scene


async def test_what_was_saved_is_loaded_but_for_the_last_token(model, copy_threads):
    """In several grants, each completed; the logits after loading are those of computing."""
    scene = await saved_scene(model, copy_threads)
    begun, kv, error = await scene.load()
    assert error is None
    assert (begun.end_token, begun.tier_tokens, begun.reason) == (39, {"dram": 39}, "")
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["load_hits"] == 1
    assert scene.counters.snapshot()["stored_tokens"] == 40
    scene.check_logits(kv)


@pytest.mark.parametrize(
    "fail_at",
    ["prepare_load", "prepare_load nonsense", "second prepare_load", "slot"],
)
async def test_a_load_that_fails_early_is_a_miss_and_leaves_no_rows(model, copy_threads, fail_at):
    """No lease stays open, and the next one may succeed."""
    scene = await saved_scene(model, copy_threads)
    scene.peer.fail_at = fail_at
    begun, kv, _ = await scene.load()
    assert (begun.end_token, kv.num_tokens, begun.tier_tokens) == (0, 0, {})
    assert begun.reason in {"kvd_unavailable", "kvd_protocol", "copy_failed"}
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["load_errors"] == 1
    scene.peer.fail_at = ""
    assert (await scene.load())[0].end_token == 39


@pytest.mark.parametrize("fail_at", ["complete_load", "complete_load nonsense"])
async def test_a_lease_that_is_not_confirmed_fails_the_gate(model, copy_threads, fail_at):
    """Its rows may have changed while they were copied: nothing computed over them is believed."""
    scene = await saved_scene(model, copy_threads, grant_tokens=64)
    scene.peer.fail_at = fail_at
    begun, _, error = await scene.load()
    assert begun.end_token == 39
    assert error is not None
    assert scene.counters.snapshot()["load_failed_late"] == 1
    assert not scene.peer.open_leases


@pytest.mark.parametrize("pending", ["arrives", "fails"])
async def test_a_load_under_way(model, copy_threads, pending):
    """Layer by layer as they arrive; grants before the last are asked for again if they fail."""
    scene = await saved_scene(model, copy_threads, pending=pending)
    begun, kv, error = await scene.load()
    assert (begun.end_token, begun.tier_tokens, begun.reason) == (39, {"dram": 39}, "")
    assert error is None
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["loads_retried"] == (1 if pending == "fails" else 0)
    assert scene.counters.snapshot()["load_errors"] == 0
    scene.check_logits(kv)


@pytest.mark.parametrize("pending", ["fails", "never"])
async def test_a_load_that_breaks_off_fails_the_gate(model, copy_threads, pending):
    """Nobody waits longer than the deadline; the engine then computes."""
    saved = await saved_scene(model, copy_threads, grant_tokens=64, pending=pending)
    scene = Scene(model, copy_threads, deadline_s=0.2, peer=saved.peer)
    _, _, error = await scene.load()
    assert isinstance(error, LoadFailedError)
    assert not scene.peer.open_leases


async def test_what_is_read_slower_than_computed_is_not_waited_for(model, copy_threads):
    """DRAM's part is loaded, SSD's is recomputed; with `always` it is loaded all the same."""
    scene = await saved_scene(model, copy_threads)
    scene.peer.dram_tokens = 16
    for num_tokens in (16, 64, 256, 1024):
        for _ in range(3):
            scene.rates.loads.note("ssd", num_tokens, 10.0 * num_tokens)
            scene.rates.loads.note("dram", num_tokens, 1e-9 * num_tokens)
            scene.rates.steps.note(num_tokens, pairs(0, num_tokens), 1e-3 * num_tokens)
            scene.rates.steps.note(1, 9 * num_tokens, 1e-3)
    begun, kv, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason) == (16, "recompute_cheaper")
    assert kv.num_tokens == 16
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["loads_refused"] == 1
    begun, kv, _ = await scene.load(LoadPolicy.ALWAYS)
    assert begun.tier_tokens == {"dram": 16, "ssd": 23}
    scene.check_logits(kv)


@pytest.mark.parametrize("fail_at", ["prepare_store", "complete_store", "slot"])
async def test_a_save_that_fails_is_counted_and_settled(model, copy_threads, fail_at):
    """The turn is answered already; the next one recomputes."""
    scene = Scene(model, copy_threads, fail_at=fail_at)
    assert await scene.save() is None
    assert scene.counters.snapshot()["save_errors"] == 1
    assert not scene.peer.open_leases
    scene.peer.fail_at = ""
    assert (await scene.load())[0].end_token == 0


@pytest.mark.parametrize("fail_at", ["", "complete_store"])
async def test_a_save_that_is_cancelled_ends_as_cancelled(model, copy_threads, fail_at):
    """Even when kvd has gone, too: or the service would not end."""
    scene = Scene(model, copy_threads, fail_at=fail_at)
    _, buffer = scene.computed()
    clock = StepClock(len(model[1].layers), CPU)
    tokens = as_token_bytes(PROMPT)
    save = asyncio.create_task(scene.store.save(KEY, tokens, 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    save.cancel()
    clock.fail(StepNotDoneError("the step failed"))
    with pytest.raises(asyncio.CancelledError):
        await save
    assert not scene.peer.open_leases


async def test_a_save_whose_step_failed_stores_nothing_and_is_no_error(model, copy_threads):
    """Its rows come again."""
    scene = Scene(model, copy_threads)
    _, buffer = scene.computed()
    clock = StepClock(len(model[1].layers), CPU)
    clock.enqueued(clock.num_layers)
    save = asyncio.create_task(scene.store.save(KEY, as_token_bytes(PROMPT), 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    clock.fail(StepNotDoneError("the step failed"))
    assert await save is None
    assert not scene.peer.stored
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["save_errors"] == 0


@pytest.mark.parametrize("part", ["kv", "tail"])
async def test_a_load_holds_the_rows_it_copies_to(model, copy_threads, part):
    """A turn that is cancelled gives its rows back; they are lent again once the copy has ended."""
    scene = await saved_scene(model, copy_threads, grant_tokens=64)
    lent = {"kv": scene.pool.new_kv(64)}
    request = LoadRequest(KEY, as_token_bytes(PROMPT[:-1]), lent["kv"], LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    lent["tail"] = scene.pool.new_write_buffer(begun.tail_from, 64)
    gate = LayerGate(len(model[1].layers))
    before, seen = scene.pool.num_free, []

    def cancel():
        if not seen:
            scene.pool.release(lent[part])
            seen.append(scene.pool.num_free)

    gate.on_change = cancel
    layers = range(gate.num_layers)
    await scene.store.loads.finish(begun, lent["kv"], lent["tail"], gate, layers)
    assert gate.error is None
    assert seen == [before]
    assert scene.pool.num_free == before + 64


async def test_a_save_holds_the_rows_it_copies(model, copy_threads):
    """They are lent again once the save has ended, whoever has given them back meanwhile."""
    scene = Scene(model, copy_threads)
    _, buffer = scene.computed()
    before = scene.pool.num_free
    clock = StepClock(len(model[1].layers), CPU)
    tokens = as_token_bytes(PROMPT[:16])
    save = asyncio.create_task(scene.store.save(KEY, tokens, 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    scene.pool.release(buffer)
    assert scene.pool.num_free == before
    clock.enqueued(clock.num_layers)
    clock.confirm()
    assert await save == ""
    assert scene.pool.num_free == before + 64


def clock_is_awaited(clock):
    """Return when a thread is blocked at a gate."""
    while not clock._changed._waiters:
        pass


@pytest.mark.parametrize("fail_at", ["", "discard"])
async def test_what_is_of_a_deleted_session_is_of_no_use(model, copy_threads, fail_at):
    """It is dropped; if kvd is away it receives the session's end when it is back."""
    scene = await saved_scene(model, copy_threads, fail_at=fail_at)
    await scene.store.forget(KEY, as_token_bytes(PROMPT))
    assert scene.peer.ended == ([KEY] if fail_at else [])
    assert bool(scene.peer.stored) == bool(fail_at)
    await scene.store.forget(KEY, b"")  # of a session without turns there is nothing


async def test_an_end_that_kvd_does_not_hear_costs_nothing(model, copy_threads):
    """The client reports it later; nobody waits for that."""
    scene = Scene(model, copy_threads, fail_at="end_session")
    await scene.store.end_session(KEY)
    assert scene.peer.ended == [KEY]


async def test_load_policy_never_does_not_ask(model, copy_threads):
    """History is saved, and recomputed all the same."""
    scene = await saved_scene(model, copy_threads)
    assert (await scene.load(LoadPolicy.NEVER))[0].reason == "load_policy_never"


async def test_a_discard_is_handed_on_with_its_lineage(model, copy_threads):
    """So is that of what is stored and loaded."""
    scene = await saved_scene(model, copy_threads)
    token_ids, ranges = as_token_bytes(PROMPT), ((0, 10), (20, 21))
    await scene.store.discard(KEY, token_ids, ranges, WHOLE)
    after = WHOLE.after(token_ids, ranges)
    assert len(scene.peer.stored) == 4 * 29
    await scene.store.discard(KEY, scene.peer.stored, ((0, 1),), after)
    await scene.store.save(KEY, token_ids, 0, scene.computed()[1], lineage=after)
    kv = scene.pool.new_kv(64)
    request = LoadRequest(KEY, token_ids, kv, LoadPolicy.ALWAYS, lineage=after)
    await scene.store.loads.cancel(await scene.store.loads.begin(request))
    assert scene.counters.snapshot()["store_discards"] == 2
    assert set(scene.peer.lineages) == {None, WHOLE, after}, "not named is not whole"
    assert scene.peer.lineages[-4:] == [after] * 4


@pytest.mark.parametrize("fail_at", ["discard", "discard nonsense"])
async def test_a_discard_that_kvd_does_not_hear_of_is_counted(model, copy_threads, fail_at):
    """Nobody gets an error: a later load misses what is not there."""
    scene = await saved_scene(model, copy_threads)
    scene.peer.fail_at = fail_at
    await scene.store.discard(KEY, as_token_bytes(PROMPT), ((0, 10),))
    assert scene.counters.snapshot()["store_discards_failed"] == 1
    assert scene.counters.snapshot()["store_discards"] == 0
    begun, _, _ = await scene.load()
    assert begun.end_token == 39


async def test_a_save_of_what_is_stored_already_waits_for_its_step(model, copy_threads):
    """The step writes to the buffer all the same: what it computes may not be forgotten before."""
    scene = Scene(model, copy_threads)
    assert await scene.save() == ""
    clock = StepClock(len(model[1].layers), CPU)
    buffer = scene.computed()[1]
    saving = asyncio.create_task(scene.store.save(KEY, as_token_bytes(PROMPT), 0, buffer, clock))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not saving.done()
    clock.open(clock.num_layers)
    clock.confirm()
    assert await saving == ""
