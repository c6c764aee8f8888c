"""The session store against a peer that fails or answers nonsense: a miss, and settled."""

import threading

import pytest
import torch

from inference_svc.core.counters import Counters
from inference_svc.runtime.calibration import calibrate
from inference_svc.runtime.model_loader import load_model
from inference_svc.runtime.model_runner import Chunk, ModelRunner
from inference_svc.runtime.session_store import KvdSessionStore
from inference_svc.runtime.worker_thread import WorkerThread
from kvd.tiers.progress import Progress
from shared.grants import KvdProtocolError, LoadGrant, LoadSpan, Lookup, StoreBlock, StoreGrant
from shared.kvd_attachment import KvdUnavailableError
from shared.progress_words import LoadProgress, ProgressWords
from shared.session_key import SessionKey

KEY = SessionKey("default", "m", "s")
PROMPT = list(range(20, 60))


class MemoryArena:
    """Slots in a bytearray."""

    def __init__(self, slot_bytes, num_slots):
        self.slots = [bytearray(slot_bytes) for _ in range(num_slots)]
        self.num_slots = num_slots

    def slot(self, slot_id):
        return memoryview(self.slots[slot_id])


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

    def pending_progress(self, lease_id):
        """A load that ends as it was told, in a thread of its own; "never" has no end."""
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

    async def prepare_load(self, key, token_ids, from_token, deadline_s, *, accept_pending):
        self.maybe_fail("prepare_load" if from_token == 0 else "second prepare_load")
        num_tokens = min(len(self.stored) // 4, len(token_ids) // 4)
        end = min(from_token + self.grant_tokens, num_tokens)
        if end <= from_token or self.stored[: end * 4] != token_ids[: end * 4]:
            return self.load_grant(Lookup.MISS, 0, (), from_token, False)
        slot_id = from_token // self.grant_tokens
        if self.fail_at == "slot":
            slot_id = 99
        span = LoadSpan(slot_id, 0, end - from_token, from_token, "dram", 1)
        more = end < num_tokens
        lease_id = self.lease()
        if accept_pending and self.pending:
            progress = self.pending_progress(lease_id)
            return self.load_grant(Lookup.PENDING, lease_id, (span,), end, more, progress)
        return self.load_grant(Lookup.HIT, lease_id, (span,), end, more)

    def load_grant(self, lookup, lease_id, spans, end_token, more, progress=None):
        return LoadGrant(
            lookup=lookup,
            lease_id=lease_id,
            spans=spans,
            end_token=end_token,
            more=more,
            miss_reason="" if spans else "evicted",
            arena=self.arena,
            progress=progress,
        )

    async def complete_load(self, grant):
        self.open_leases.discard(grant.lease_id)
        self.progress.close(grant.lease_id)
        self.maybe_fail("complete_load")

    async def prepare_store(self, key, token_ids, from_token, deadline_s):
        self.maybe_fail("prepare_store")
        num_tokens = len(token_ids) // 4
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

    async def complete_store(self, grant, success):
        self.open_leases.discard(grant.lease_id)
        self.maybe_fail("complete_store")
        if success:
            self.stored = self.wanted
        return len(self.stored) // 4


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return loaded, calibrate(loaded)


@pytest.fixture
def copy_thread():
    thread = WorkerThread("copy")
    yield thread
    thread.close()


def store_of(model, peer, thread, loads=True, deadline_s=30.0):
    counters = Counters()
    store = KvdSessionStore(peer, model[1], thread, counters, loads=loads, deadline_s=deadline_s)
    return store, counters


def computed_slab(model):
    runner = ModelRunner(*model)
    slab = runner.new_slab(64, save=True)
    runner.step([Chunk(slab, PROMPT, want_logits=False)])
    return runner, slab


async def saved_peer(model, thread, **faults):
    peer = Peer(model[1].layout, **faults)
    store, counters = store_of(model, peer, thread)
    _, slab = computed_slab(model)
    await store.save(slab, KEY, PROMPT)
    return peer, store, counters


async def test_what_was_saved_is_loaded_but_for_the_last_token(model, copy_thread):
    """In several grants, each completed; the logits after loading are those of computing."""
    peer, store, counters = await saved_peer(model, copy_thread)
    runner, computed = computed_slab(model)
    slab = runner.new_slab(64, save=True)
    outcome = await store.load(slab, KEY, PROMPT)
    assert (outcome.tokens, outcome.tier_tokens) == (39, {"dram": 39})
    assert slab.num_tokens == 39
    assert not peer.open_leases
    assert counters.snapshot()["load_hits"] == 1
    last = [
        runner.step([Chunk(each, tokens, want_logits=True)])
        for each, tokens in ((computed, [7]), (slab, [PROMPT[-1], 7]))
    ]
    assert torch.allclose(*last, atol=1e-5)


@pytest.mark.parametrize(
    "fail_at",
    [
        "prepare_load",
        "prepare_load nonsense",
        "second prepare_load",
        "complete_load",
        "complete_load nonsense",
        "slot",
    ],
)
async def test_a_load_that_fails_is_a_miss_and_leaves_no_rows(model, copy_thread, fail_at):
    """Rows whose lease was not confirmed are never used, and no lease stays open."""
    peer, store, counters = await saved_peer(model, copy_thread)
    peer.fail_at = fail_at
    slab = ModelRunner(*model).new_slab(64, save=True)
    outcome = await store.load(slab, KEY, PROMPT)
    assert (outcome.tokens, slab.num_tokens, slab.save_from) == (0, 0, 0)
    assert outcome.tier_tokens == {}
    assert outcome.reason in {"kvd_unavailable", "kvd_protocol", "copy_failed"}
    assert not peer.open_leases
    assert counters.snapshot()["load_errors"] == 1
    peer.fail_at = ""
    assert (await store.load(slab, KEY, PROMPT)).tokens == 39


@pytest.mark.parametrize("pending", ["arrives", "fails"])
async def test_a_load_under_way(model, copy_thread, pending):
    """Layer by layer as they arrive; if they do not, the same tokens by a load that waits."""
    peer, store, counters = await saved_peer(model, copy_thread, pending=pending)
    runner, computed = computed_slab(model)
    slab = runner.new_slab(64, save=True)
    outcome = await store.load(slab, KEY, PROMPT)
    assert (outcome.tokens, outcome.tier_tokens, outcome.reason) == (39, {"dram": 39}, "")
    assert not peer.open_leases
    assert counters.snapshot()["loads_retried"] == (1 if pending == "fails" else 0)
    assert counters.snapshot()["load_errors"] == 0
    last = [
        runner.step([Chunk(each, tokens, want_logits=True)])
        for each, tokens in ((computed, [7]), (slab, [PROMPT[-1], 7]))
    ]
    assert torch.allclose(*last, atol=1e-5)


async def test_a_load_that_never_arrives(model, copy_thread):
    """The turn waits no longer than the deadline, and is recomputed."""
    peer, _, _ = await saved_peer(model, copy_thread, pending="never")
    store, counters = store_of(model, peer, copy_thread, deadline_s=0.2)
    slab = ModelRunner(*model).new_slab(64, save=True)
    outcome = await store.load(slab, KEY, PROMPT)
    assert (outcome.tokens, outcome.reason) == (0, "deadline")
    assert not peer.open_leases
    assert counters.snapshot()["load_misses"] == 1


@pytest.mark.parametrize("fail_at", ["prepare_store", "complete_store", "slot"])
async def test_a_save_that_fails_is_counted_and_settled(model, copy_thread, fail_at):
    """The turn is answered already; the next one recomputes."""
    peer, store, counters = await saved_peer(model, copy_thread, fail_at=fail_at)
    assert counters.snapshot()["save_errors"] == 1
    assert not peer.open_leases
    peer.fail_at = ""
    slab = ModelRunner(*model).new_slab(64, save=True)
    assert (await store.load(slab, KEY, PROMPT)).tokens == 0


async def test_load_policy_never_does_not_ask(model, copy_thread):
    """History is saved, and recomputed all the same."""
    peer, _, _ = await saved_peer(model, copy_thread)
    store, _ = store_of(model, peer, copy_thread, loads=False)
    slab = ModelRunner(*model).new_slab(64, save=True)
    assert (await store.load(slab, KEY, PROMPT)).reason == "load_policy_never"
