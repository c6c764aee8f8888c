"""Under random calls, completions and crashes no load is ever wrong, and nothing leaks."""

import struct
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvd.core.records.actions import (
    CompactTokens,
    HashSlots,
    IoOutcome,
    ReadBlock,
    RelocateBlock,
    VerifyExtent,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.entries import CommittedSlot
from kvd.core.records.errors import (
    LeaseLostError,
    SessionChangedError,
    TooManyLeasesError,
    UnknownLineageError,
    UnknownSessionError,
)
from kvd.core.records.records import LeaseState
from kvd.core.records.tier import Admission
from kvd.core.state.limits import TenantLimits
from shared.types.granted_slots import Lookup
from shared.types.queue_delta import QueuedRequest, RunningRequest
from tests.property.cache_operations import OperationsMachine
from tests.property.cache_turns import ENGINE_IDS, EXPORTER, KEYS, TOKENS
from tests.property.cache_world import ADOPTED_ENGINES, BLOCK_TOKENS, LAYOUT, Row, compute
from tests.queue_changes import queue_change
from tests.sampled import examples


class CacheMachine(OperationsMachine):
    """Queues, engines that come and go, completions in any order, and kills."""

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        keys=st.lists(st.sampled_from(KEYS), max_size=4),
        num_running=st.integers(0, 2),
        interval_ns=st.sampled_from([0, 5, 100]),
    )
    def replace_queue(self, engine_id, keys, num_running, interval_ns) -> None:
        if engine_id in self.detached:
            return
        requests = self.requests[engine_id] = dict(enumerate(keys, self.num_requests))
        self.num_requests += len(keys)
        numbers = list(requests)
        change = queue_change(
            [QueuedRequest((0, 0.0, number), requests[number]) for number in numbers[num_running:]],
            [RunningRequest(number, requests[number]) for number in numbers[:num_running]],
            interval_ns=interval_ns,
        )
        self.world.engine.engines.replace_queue(self.ids[engine_id], change)
        self.world.pump()

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        turns=st.lists(st.tuples(st.sampled_from(KEYS), TOKENS), max_size=3),
    )
    def begin_a_day(self, engine_id, keys, turns) -> None:
        """Move sessions to SSD as far as it has room, and queue some of them."""
        for key, new_tokens in turns:
            self.turn(key, new_tokens, engine_id, is_quiet=True)
        self.world.quiesce()
        self.world.engine.release_dram()
        self.world.pump()
        self.world.quiesce()
        self.replace_queue(engine_id, keys, 0, 100)

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        joining=st.lists(st.sampled_from(KEYS), max_size=2),
        data=st.data(),
    )
    def change_queue(self, engine_id, joining, data) -> None:
        """Change the queue: some jobs join, move, start, keep waiting or leave."""
        if engine_id in self.detached:
            return
        requests = self.requests[engine_id]
        what = {n: data.draw(st.sampled_from(["stay", "wait", "run", "leave"])) for n in requests}
        for key in joining:
            what[self.num_requests] = "wait"
            requests[self.num_requests] = key
            self.num_requests += 1
        change = queue_change(
            [
                QueuedRequest((data.draw(st.integers(-1, 1)), 0.0, number), requests[number])
                for number, how in what.items()
                if how == "wait"
            ],
            [
                RunningRequest(number, requests[number])
                for number, how in what.items()
                if how == "run"
            ],
            [number for number, how in what.items() if how == "leave"],
        )
        for number in change.left:
            del requests[number]
        self.world.engine.engines.change_queue(self.ids[engine_id], change)
        self.world.pump()

    @precondition(lambda self: len(self.loads) + len(self.stores) > 2)
    @rule(engine_id=st.sampled_from(ENGINE_IDS))
    def engine_gone(self, engine_id) -> None:
        engine = self.world.engine
        engine.engines.remove(self.ids[engine_id])
        self._forget_loads(engine_id)
        for store in [store for store in self.stores if store.engine_id == engine_id]:
            self.stores.remove(store)
            with pytest.raises(LeaseLostError):
                engine.stores.complete(store.answer.lease_id, self.ids[engine_id], success=True)
        self._attach_anew(engine_id)
        self.world.pump()

    def _forget_loads(self, engine_id: int) -> None:
        for load in [load for load in self.loads if load.engine_id == engine_id]:
            self.loads.remove(load)
            state = self.world.engine.loads.state_of(load.answer.lease_id)
            assert state is LeaseState.LOST, "loads end with the connection"

    def _attach_anew(self, engine_id: int) -> None:
        self.requests[engine_id] = {}
        self.ids[engine_id] += len(ENGINE_IDS)
        self.detached.discard(engine_id)

    @precondition(lambda self: self.stores)
    @rule(engine_id=st.sampled_from(ENGINE_IDS))
    def detach(self, engine_id) -> None:
        """End the engine's connection; its process lives, and may continue to write."""
        if engine_id in self.detached:
            return
        engine = self.world.engine
        engine.engines.detach(self.ids[engine_id])
        self.detached.add(engine_id)
        self.requests[engine_id] = {}
        self._forget_loads(engine_id)
        held = sorted(s.answer.lease_id for s in self.stores if s.engine_id == engine_id)
        assert [
            i.lease_id for i in engine.inspection.leases() if i.engine_id == self.ids[engine_id]
        ] == held
        self.world.pump()

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def reattach(self, data) -> None:
        """Reconnect the engine, which names its leases; it has forgotten all others."""
        engine_id = data.draw(st.sampled_from(sorted(self.detached)))
        stores = [store for store in self.stores if store.engine_id == engine_id]
        kept = [store for store in stores if data.draw(st.booleans())]
        for store in stores:
            self._check_slots(store)
            if store not in kept:
                self.stores.remove(store)
        held = [store.answer.lease_id for store in kept]
        old_id = self.ids[engine_id]
        self._attach_anew(engine_id)
        confirmed, lost = self.world.engine.engines.reattach(
            old_id, self.ids[engine_id], [*held, 1]
        )
        assert (list(confirmed), lost) == (held, (1,)), "what an engine writes to stays its own"
        self.world.pump()

    @rule(elapsed_ns=st.sampled_from([1, 20, 100, 3_000_000_000]))
    def wait(self, elapsed_ns) -> None:
        self.world.now_ns += elapsed_ns
        self.world.engine.expire()
        deadline_ns = self.world.engine.next_deadline_ns()
        assert deadline_ns is None or deadline_ns > self.world.now_ns, "what is due is done"
        self.world.pump()

    @precondition(lambda self: self.world.io)
    @rule(data=st.data(), failure=st.sampled_from([IoOutcome.OK] * 4 + [*IoOutcome]))
    def finish_io(self, data, failure) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.world.io)))
        self.world.finish_io(op_id, self._possible(op_id, failure))

    @rule(
        kind=st.sampled_from(
            [
                HashSlots,
                HashSlots,
                ReadBlock,
                VerifySlot,
                VerifyExtent,
                WriteBlock,
                RelocateBlock,
                CompactTokens,
            ]
        )
    )
    def finish_kind(self, kind) -> None:
        self.world.finish_all(kind)

    def _possible(self, op_id: int, outcome: IoOutcome) -> IoOutcome:
        """Return whether the outcome may occur: only copies compared before use are damaged."""
        action = self.world.io[op_id]
        is_write = isinstance(action, WriteBlock | RelocateBlock)
        impossible = IoOutcome.CORRUPT if is_write else IoOutcome.FULL
        if isinstance(action, HashSlots):
            impossible = IoOutcome.CORRUPT
        return IoOutcome.TRANSIENT if outcome is impossible else outcome

    @rule(key=st.sampled_from(KEYS), max_spans=st.integers(1, 3), gives_up=st.booleans())
    def export(self, key, max_spans, gives_up) -> None:
        """Export a session as an operator does: the rows are those of its tokens."""
        engine = self.world.engine
        tokens: list[int] = []
        rows: list[Row] = []
        refusals = UnknownSessionError, UnknownLineageError, TooManyLeasesError, SessionChangedError
        with suppress(*refusals):
            export = engine.session_files.begin_export(key)
            while not export.is_done:
                answer = engine.session_files.prepare_export(export, max_spans, EXPORTER)
                self.world.pump()
                if answer.lookup is Lookup.PENDING:
                    self.world.quiesce()
                    answer = engine.loads.settle(answer.lease_id)
                if answer.lookup is Lookup.MISS or gives_up:
                    break
                for part in engine.session_files.confirm_export(export, answer.lease_id):
                    slot = self.world.slots[part.slot_id]
                    rows += slot[part.start : part.start + part.num_tokens]
                    tokens += struct.unpack(f"<{part.num_tokens}I", part.token_ids)
                engine.loads.complete(answer.lease_id, EXPORTER)
                self.world.pump()
            known = self.conversations[key].known
            is_right = rows == compute([], tokens) or not export.lineage.is_whole
            assert is_right or all(
                known.get(row) == token for row, token in zip(rows, tokens, strict=True)
            )
        engine.engines.remove(EXPORTER)
        self.world.pump()

    @rule(
        max_sessions=st.sampled_from([1, 2, 100]),
        max_leases=st.sampled_from([3, 100]),
        ttl_ns=st.sampled_from([None, 10, 50]),
        admission=st.sampled_from(Admission),
        quota_blocks=st.sampled_from([None, 2, 4]),
        watermark=st.sampled_from([0, 0.4]),
    )
    def set_limits(
        self, max_sessions, max_leases, ttl_ns, admission, quota_blocks, watermark
    ) -> None:
        """Reload the settings; a restart uses them, too."""
        quota_bytes = None if quota_blocks is None else quota_blocks * LAYOUT.block_bytes
        self.world.limits = replace(
            self.world.limits,
            max_sessions=max_sessions,
            max_leases=max_leases,
            default_ttl_ns=ttl_ns,
            admission=admission,
            tenant_limits=lambda tenant: TenantLimits(
                quota_bytes=quota_bytes if tenant == "a" else None
            ),
            watermark=watermark,
        )
        self.world.engine.set_limits(self.world.limits)
        self.world.pump()

    @rule(num_extents=st.sampled_from([0, 1, 3, 20]))
    def set_capacity(self, num_extents) -> None:
        """Tell kvd that the SSD tier has less room than it seemed, or more."""
        if self.world.limits.num_extents:
            self.world.set_capacity(num_extents)

    @precondition(lambda self: not self.stores)
    @rule()
    def release_dram(self) -> None:
        """Have the layout give up its arena as far as it can, and get another."""
        engine = self.world.engine
        if engine.release_dram():
            engine.drop_slots()
            self.world.pump()
            engine.add_slots(self.world.limits.num_slots, 1)
        self.world.pump()

    @rule()
    def write_dirty(self) -> None:
        self.world.engine.write_dirty()
        self.world.pump()

    @rule(num_actions=st.integers(1, 20))
    def commit(self, num_actions) -> None:
        self.world.commit(num_actions)

    @rule(row_bytes=st.sampled_from([0, 1, 600, 2000]))
    def index_falls_behind(self, row_bytes) -> None:
        """Limit what the index takes at a time, perhaps to nothing, until everything is flushed."""
        self.world.row_bytes = row_bytes

    @rule(newest_first=st.booleans())
    def finish_all_io(self, newest_first) -> None:
        self.world.quiesce(newest_first=newest_first)

    @precondition(lambda self: self.world.index.sessions)
    @rule(
        num_committed=st.integers(0, 5),
        keep_dram=st.booleans(),
        alive=st.sets(st.sampled_from(ENGINE_IDS)),
        data=st.data(),
    )
    def kill(self, num_committed, keep_dram, alive, data) -> None:
        """Start a new kvd on the remains: the index, perhaps the arena, with wrong bytes."""
        world = self.world
        world.index.commit(num_committed)
        for slot_id, record in world.journal.items():
            if isinstance(record, CommittedSlot) and data.draw(st.integers(0, 5)) == 0:
                world.damage_slot(slot_id)
        self.loads, self.scrub_id = [], 0
        alive_ids = {self.ids[engine_id] for engine_id in alive} if keep_dram else set()
        self.stores = [
            replace(store, is_restored=True)
            for store in self.stores
            if self.ids[store.engine_id] in alive_ids
        ]
        self.detached = {store.engine_id for store in self.stores}
        for engine_id in ENGINE_IDS:
            self.ids[engine_id] += ADOPTED_ENGINES
            self.requests[engine_id] = {}
        world.start(keep_dram=keep_dram, alive=alive_ids)

    def teardown(self) -> None:
        """Check that nothing is left when every engine has gone and all is flushed."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for engine_id in ENGINE_IDS:
            world.engine.engines.remove(self.ids[engine_id])
        world.engine.scrubs.end(self.scrub_id)
        world.engine.sessions.flush(None, dry_run=False)
        world.pump()
        world.quiesce()
        stats = world.engine.inspection.stats()
        assert [tier.used_bytes for tier in stats.tiers] == [0, 0], "nothing leaks"
        assert not world.index.blocks
        assert not world.index.sessions
        assert not world.journal
        assert not world.tracked


CacheMachine.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheEngine = CacheMachine.TestCase


@pytest.mark.long
class TestCacheEngineLong(CacheMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(CacheMachine.TestCase.settings, max_examples=3000, stateful_step_count=120)


assert BLOCK_TOKENS == 4  # sizes above are chosen for it
