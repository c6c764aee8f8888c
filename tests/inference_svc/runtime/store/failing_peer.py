"""A peer in kvd's place that fails, or answers nonsense, on request."""

import threading

import torch

from inference_svc.core.counters import Counters
from inference_svc.core.ranges import kept_runs
from inference_svc.core.rates.rates import LoadPolicy, Rates
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.kvd_loads import CopyThreads
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.session_store import LoadRequest
from kvd.tiers.progress import Progress
from shared.kvd_client.arena_map import LoadProgress, ProgressWords
from shared.kvd_client.attachment import KvdUnavailableError
from shared.kvd_client.grants import KvdProtocolError, LoadGrant, StoreGrant
from shared.types.granted_slots import GrantedState, LoadSpan, Lookup, StoreBlock
from shared.types.lineage import WHOLE
from shared.types.load_choice import IDLE
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "m", "s")
PROMPT = list(range(20, 60))


class MemoryArena:
    """Slots in ordinary memory."""

    def __init__(self, slot_bytes, num_slots):
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.memory = memoryview(bytearray(slot_bytes * num_slots))


class Peer:
    """A kvd with one session in memory, granting `grant_tokens` at a time; faults are arguments."""

    attached = True

    def __init__(self, layout, fail_at="", grant_tokens=16, pending=""):
        self.arena = MemoryArena(layout.block_bytes, 8)
        self.fail_at = fail_at
        self.grant_tokens = grant_tokens
        self.stored = b""
        self.open_leases = set()
        self.next_lease = 0
        self.pending = pending  # how pending loads end: "arrives", "fails", "never"
        self.progress = Progress(4)
        self.words = ProgressWords(self.progress.fd, 4)
        self.num_layers = len(layout.layers)
        self.dram_tokens = 1000  # tokens beyond this are on SSD
        self.ended = []
        self.retained = []
        self.expected = []
        self.is_old = False  # whether it supports hints about sessions
        self.lineages = []  # of loads, stores and discards
        self.fetch_waits_s = []  # that loads allowed
        self.histories = []  # that loads named
        self.fetch_waited_s = 0.0  # what it says to have waited
        self.states = {}  # by position: the slots of those that are stored
        self.wanted_states = ()
        self.free_slots = [7, 6, 5, 4]  # slots for states
        self.state_slots = layout.state_slots
        self.queue = self
        self.feed = None  # of the queue

    def pending_progress(self, lease_id):
        """Let a load end as its argument says, in a thread of its own; "never" does not end."""
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
        self,
        key,
        token_ids,
        from_token,
        deadline_s,
        *,
        accept_pending,
        dram_only,
        lineage,
        fetch_wait_s,
        history_tokens,
    ):
        self.lineages.append(lineage)
        self.histories.append(history_tokens)
        self.fetch_waits_s.append(fetch_wait_s)
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
        span = LoadSpan(slot_id, 0, end - from_token, from_token, 1, tier)
        more = end < num_tokens
        lease_id = self.lease()
        if accept_pending and self.pending:
            progress = self.pending_progress(lease_id)
            return self.load_grant(Lookup.PENDING, lease_id, (span,), end, more, progress)
        return self.load_grant(Lookup.HIT, lease_id, (span,), end, more)

    def load_grant(self, lookup, lease_id, spans, end_token, more, progress=None, reason="evicted"):
        state = None
        if spans and end_token in self.states:
            state = GrantedState(end_token, self.states[end_token], ())
        return LoadGrant(
            lookup=lookup,
            lease_id=lease_id,
            spans=spans,
            end_token=end_token,
            more=more,
            miss_reason="" if spans else reason,
            arena=self.arena,
            progress=progress,
            state=state,
            fetch_waited_s=self.fetch_waited_s,
        )

    async def complete_load(self, grant):
        self.open_leases.discard(grant.lease_id)
        self.progress.close(grant.lease_id)
        self.maybe_fail("complete_load")

    async def prepare_store(self, key, token_ids, from_token, deadline_s, *, lineage, load_ends=()):
        self.lineages.append(lineage)
        self.maybe_fail("prepare_store")
        num_tokens = len(token_ids) // 4
        self.wanted_states = ()
        if self.stored[: len(token_ids)] == token_ids:
            return StoreGrant(0, (), num_tokens, more=False, refused_reason="", arena=self.arena)
        end = min(from_token + self.grant_tokens, num_tokens)
        slot_id = 99 if self.fail_at == "slot" else from_token // self.grant_tokens
        block = StoreBlock(slot_id, from_token, end - from_token, 1)
        self.wanted = token_ids[: end * 4]
        self.wanted_states = tuple(
            GrantedState(position, self.take_slots(), ())
            for position in load_ends
            if from_token < position <= end and len(self.free_slots) >= self.state_slots
        )
        return StoreGrant(
            lease_id=self.lease(),
            blocks=(block,),
            end_token=end,
            more=end < num_tokens,
            refused_reason="",
            arena=self.arena,
            states=self.wanted_states,
        )

    def take_slots(self):
        return tuple(self.free_slots.pop() for _ in range(self.state_slots))

    async def discard(self, key, token_ids, ranges, *, lineage=WHOLE):
        self.maybe_fail("discard")
        self.lineages.append(lineage)
        assert token_ids.startswith(self.stored)
        assert ranges[-1][1] <= len(token_ids) // 4
        kept = kept_runs(ranges, len(self.stored) // 4)
        self.stored = b"".join(self.stored[4 * start : 4 * end] for start, end in kept)
        return len(self.stored) // 4

    def follow(self, feed):
        self.feed = feed

    async def retain_session(self, key, retain_s, prefix_token_ids=b""):
        self.maybe_fail("retain_session")
        self.retained.append((key.session_id, retain_s, prefix_token_ids))
        return retain_s

    async def expect_session(self, key, tools=(), *, superseded=False):
        self.maybe_fail("expect_session")
        if not self.is_old:
            self.expected.append((key, tools, superseded))
        return not self.is_old

    async def end_session(self, key):
        self.ended.append(key)
        self.maybe_fail("end_session")

    async def complete_store(self, grant, success):
        self.open_leases.discard(grant.lease_id)
        self.maybe_fail("complete_store")
        if success and grant.blocks:
            self.stored = self.wanted
            self.states |= {state.position: state.slot_ids for state in self.wanted_states}
        return len(self.stored) // 4


class Scene:
    """A store with a peer, and memory for sequences' KV."""

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
        self.pool = KVPool(
            [layer.shape for layer in model[1].layers],
            2000,
            device=model[0].device,
            dtype=model[0].dtype,
            states=model[1].state_shapes,
        )

    def computed(self, marks=()):
        """Make KV and a write buffer with the prompt, and the states at these positions."""
        kv, buffer = self.pool.new_kv(64), self.pool.new_write_buffer(0, 64)
        for first, end in zip((0, *marks), (*marks, len(PROMPT)), strict=True):
            self.runner.step([Chunk(kv, PROMPT[first:end], False, write_buffer=buffer)])
            if end in marks:
                buffer.note_state(kv)
        return kv, buffer

    async def save(self, marks=()):
        buffer = self.computed(marks)[1]
        return await self.store.save(KEY, as_token_bytes(PROMPT), 0, buffer)

    async def load(self, policy=LoadPolicy.ALWAYS, traffic=IDLE, pauses=False, **named):
        """Load in both phases; return what was begun, the sequence's KV, and its gate's error.

        `pauses`: the second phase has a break, as with a configured read buffer.
        """
        kv, wanted = self.pool.new_kv(64), as_token_bytes(PROMPT[:-1])
        request = LoadRequest(KEY, wanted, kv, policy, traffic=traffic, **named)
        begun = await self.store.loads.begin(request)
        error = None
        if begun.grant is not None:
            gate = LayerGate(len(self.model[1].layers))
            tail = self.pool.new_write_buffer(begun.tail_from, 64)
            ends = (0, 1, gate.num_layers) if pauses else (0, gate.num_layers)
            for layers in map(range, ends, ends[1:]):
                await self.store.loads.finish(begun, kv, tail, gate, layers)
            assert gate.is_settled
            error = gate.error
        if error is None:
            kv.num_tokens = begun.end_token
        return begun, kv, error

    def check_logits(self, kv):
        """Check that new tokens have the same logits behind loaded and computed rows."""
        computed, _ = self.computed()
        last = [
            self.runner.step([Chunk(each, tokens, want_logits=True)])
            for each, tokens in ((computed, [7]), (kv, [*PROMPT[kv.num_tokens :], 7]))
        ]
        assert torch.allclose(*last, atol=1e-4)


async def save_scene(model, threads, **faults):
    scene = Scene(model, threads, **faults)
    await scene.save()
    return scene
