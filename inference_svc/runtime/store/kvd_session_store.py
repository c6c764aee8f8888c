"""The store of sessions' KV in kvd: saves from write buffers, discards and ends of sessions.

Loads are in `kvd_loads.py`. Invariants: 1. every lease that was granted is completed, however the
copy ends; 2. a failure costs a later turn a recomputation, nothing else.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from inference_svc.core.counters import Counters
from inference_svc.core.ranges import Range
from inference_svc.core.rates.rates import Rates
from inference_svc.core.retention import Retention
from inference_svc.runtime.kv.arena_kv import ArenaKv, OpenArena
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_gate import StepClock, StepNotDoneError, WaitLayer, no_wait
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.kv.states import SequenceStates
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from inference_svc.runtime.store.kvd_loads import CopyThreads, KvdCalls, KvdLoads
from inference_svc.runtime.store.session_store import SessionLoads, StoreState
from inference_svc.runtime.transfer.layer_store import store_blocks
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import StoreGrant
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import ReportedError
from shared.types.graft_source import GraftSource
from shared.types.lineage import Lineage
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey
from shared.types.units import ceil_div

WAKE_UPS = 4  # how often the store thread wakes up while it follows a step
PREFIX = "prefix-"  # begins the ids of sessions in kvd that are shared prefixes of others


class KvdSessionStore:
    """The SessionStore that keeps KV in kvd.

    Args:
        client: calls kvd.
        calibration: the model's layout and recipes.
        threads: the threads that copy to and from kvd's arena.
        counters: the service's counters.
        rates: learns how long loads take.
        saves: whether anything is stored.
        deadline_s: most seconds that one load, or one save, may wait for kvd.
        open_arena: opens kvd's arena as tensors.
        kernels: those that load tokens.
    """

    def __init__(
        self,
        client: KvdClient,
        calibration: Calibration,
        threads: CopyThreads,
        counters: Counters,
        rates: Rates,
        *,
        saves: bool,
        deadline_s: float,
        open_arena: OpenArena = ArenaKv,
        kernels: LoadKernels = BY_TORCH,
    ) -> None:
        self.saves = saves
        self._client = client
        self._calls = calls = KvdCalls(calibration.layout, counters, open_arena)
        self.loads: SessionLoads = KvdLoads(
            client, calibration, calls, threads, rates, deadline_s, kernels
        )
        self._calibration = calibration
        self._store_thread = threads.store
        self._deadline_s = deadline_s

    @property
    def state(self) -> StoreState:
        """Whether kvd is attached."""
        return "attached" if self._client.attached else "detached"

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None = None,
        lineage: Lineage | None = None,
    ) -> str | None:
        """See SessionStore."""
        try:
            refused_reason = await self._save_all(
                key, token_ids, from_token, buffer, clock, lineage
            )
        except StepNotDoneError:  # the KV is computed again, and saved with the next piece
            return None
        except Exception as error:  # noqa: BLE001  # no failure to save may fail the turn
            self._calls.record_failure("save", error)
            return None
        self._calls.record_success()
        return refused_reason

    async def _save_all(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None,
        lineage: Lineage | None,
    ) -> str:
        """Store as much as there is room for; return the reason if that is not all, else ""."""
        deadline_s = time.monotonic() + self._deadline_s
        num_tokens = len(token_ids) // TOKEN_BYTES
        # The references keep the states until they are copied: the buffer may drop some meanwhile.
        states = {
            position: buffer.states[position]
            for position in sorted(buffer.states)
            if position <= num_tokens
        }
        has_windows = self._calls.layout.window > 0
        positions = buffer.load_ends_within(num_tokens) if has_windows else list(states)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            grant = await self._client.prepare_store(
                key, token_ids, from_token, left_s, lineage=lineage, load_ends=positions
            )
            await self._save_grant(buffer, states, grant, clock)
            if grant.refused_reason or not grant.more or grant.end_token <= from_token:
                return grant.refused_reason
            from_token = grant.end_token

    async def _save_grant(
        self,
        buffer: WriteBuffer,
        states: Mapping[int, SequenceStates],
        grant: StoreGrant,
        clock: StepClock | None,
    ) -> None:
        """Copy what a grant has slots for, and complete its lease, even if the copy fails."""
        try:
            await self._store_thread.run(self._copy, buffer, states, grant, clock)
        except BaseException:
            with suppress(ReportedError):  # an error here must not replace the cancellation
                await self._client.complete_store(grant, success=False)
            raise
        await self._client.complete_store(grant, success=True)
        self._calls.counters.add("stored_tokens", sum(block.num_tokens for block in grant.blocks))
        self._calls.counters.add("stored_states", len(grant.states))
        window_tokens = sum(window.num_tokens for window in grant.windows)
        self._calls.counters.add("stored_window_tokens", window_tokens)

    def _copy(
        self,
        buffer: WriteBuffer,
        states: Mapping[int, SequenceStates],
        grant: StoreGrant,
        clock: StepClock | None,
    ) -> None:
        """Copy what a grant has slots for, on the store thread; with a clock, behind its step.

        States belong to earlier steps: their copies wait for those, not for the step under way.
        """
        if not (grant.blocks or grant.states or grant.windows):
            # The step still writes to the buffer, which its holder may release when this returns.
            if clock is not None:
                clock.wait_confirmed()
            return
        tensors = self._calls.as_tensors(grant.arena)
        stream = CopyStream(buffer.device)
        wait_layer = no_wait if clock is None else _in_groups(clock, stream)
        with buffer.hold(), stream.copies(behind_computing=clock is None):
            for place in grant.states:
                state = states[place.position]
                if state.written is not None:
                    stream.wait(state.written)
                tensors.write_state(place.slot_ids, state.snapshot())
            store_blocks(
                buffer, tensors, grant.blocks, self._calibration, wait_layer, grant.windows
            )
            if clock is not None:  # a step that fails after its last layer is computed again
                clock.wait_confirmed()

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """See SessionStore. If kvd cannot be reached, it keeps KV that no context matches."""
        try:
            await self._client.discard(key, token_ids, ranges, lineage=lineage)
        except Exception as error:  # noqa: BLE001  # after any failure a later load misses
            self._calls.counters.add("store_discards_failed")
            self._calls.record_failure("discard", error)
        else:
            self._calls.counters.add("store_discards")

    @property
    def offers_grafts(self) -> bool:
        """See SessionStore."""
        return self.saves and self._client.offers_grafts

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """See SessionStore. If kvd cannot be reached, nothing is grafted and the turn computes."""
        try:
            return await self._client.graft(key, token_ids, lineage, source)
        except ReportedError as error:
            self._calls.record_failure("graft", error)
            return 0

    async def retain(self, key: SessionKey, retention: Retention, prefix: bytes) -> None:
        """See SessionStore. If kvd cannot be reached, the hint is lost; a later turn repeats it.

        Whole blocks of the prefix are retained, under a session id derived from their tokens.
        """
        block_bytes = self._calibration.layout.block_tokens * TOKEN_BYTES
        shared = prefix[: len(prefix) // block_bytes * block_bytes]
        try:
            if retention.session_s:
                await self._client.retain_session(key, retention.session_s)
            if retention.prefix_s and shared:
                name = PREFIX + hashlib.blake2b(shared, digest_size=16).hexdigest()
                prefix_key = key._replace(session_id=name)
                await self._client.retain_session(prefix_key, retention.prefix_s, shared)
        except ReportedError as error:
            self._calls.record_failure("retain", error)

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """See SessionStore. Lost if kvd cannot be reached, is too old, or has no such session."""
        is_reported = False
        try:
            is_reported = await self._client.expect_session(key, tools, superseded=superseded)
        except ReportedError as error:
            self._calls.record_failure("expect", error)
        self._calls.counters.add("expectations" if is_reported else "expectations_lost")

    async def end_session(self, key: SessionKey) -> None:
        """See SessionStore. If kvd cannot be reached, the client reports it when kvd is back."""
        try:
            await self._client.end_session(key)
        except ReportedError as error:
            self._calls.record_failure("end_session", error)

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """See SessionStore. Also reports the session's end, so that a remote store drops it."""
        if not token_ids:
            return
        try:
            await self._client.discard(key, token_ids, [(0, len(token_ids) // TOKEN_BYTES)])
        except ReportedError as error:
            self._calls.record_failure("forget", error)
        await self.end_session(key)

    def follow_queue(self, feed: QueueFeed) -> None:
        """See SessionStore."""
        self._client.queue.follow(feed)


def _in_groups(clock: StepClock, stream: CopyStream) -> WaitLayer:
    """Make a wait for layers in WAKE_UPS groups: each wake-up costs the forward a little time."""
    group = ceil_div(clock.num_layers, WAKE_UPS)

    def wait_layer(layer_index: int) -> int:
        end_of_group = min((layer_index // group + 1) * group, clock.num_layers)
        clock.wait(end_of_group - 1)
        # A step that was replayed from a graph opens all layers at once.
        end = max(end_of_group, clock.num_open)
        stream.wait(clock.computed_mark(end - 1))
        return end

    return wait_layer
