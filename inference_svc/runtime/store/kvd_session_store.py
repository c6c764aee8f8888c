"""The store of sessions behind kvd: saves from a write buffer, discards and ends of sessions.

Invariants: 1. every lease that was granted is completed, however the copy ends; 2. a failure costs
a later turn a recomputation, nothing else.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range
from inference_svc.core.rates.rates import Rates
from inference_svc.core.retention import Retention
from inference_svc.runtime.kv.arena_kv import ArenaKv, OpenArena
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_gate import StepClock, StepNotDoneError, WaitLayer, no_wait
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.kv.states import SequenceStates
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotation import EmbedKernel
from inference_svc.runtime.store.kvd_loads import CopyThreads, KvdLoads, KvdTalk
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

WAKE_UPS = 4  # of the store thread while it follows a step
PREFIX = "prefix-"  # what names of sessions begin with that are what others begin with


class KvdSessionStore:
    """The store of sessions' KV in kvd; see SessionStore.

    Args:
        saves: whether anything is stored.
        deadline_s: most seconds that one load, or one save, may wait for kvd.
        open_arena: what views kvd's memory.
        embed: what embeds keys that are loaded; None: torch.
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
        embed: EmbedKernel | None = None,
    ) -> None:
        self.saves = saves
        self._client = client
        self._talk = talk = KvdTalk(calibration.layout, counters, open_arena)
        self.loads: SessionLoads = KvdLoads(
            client, calibration, talk, threads, rates, deadline_s, embed
        )
        self._calibration = calibration
        self._store_thread = threads.store
        self._deadline_s = deadline_s

    @property
    def state(self) -> StoreState:
        """Whether kvd is there."""
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
        except StepNotDoneError:  # its KV is computed anew, and saved with the next piece
            return None
        except Exception as error:  # noqa: BLE001  # whatever it is, the turn is answered
            self._talk.note_problem("save", error)
            return None
        self._talk.note_success()
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
        """Store as much as there is room for; return why it is not all."""
        deadline_s = time.monotonic() + self._deadline_s
        num_tokens = len(token_ids) // TOKEN_BYTES
        # They are ours until they are copied, though the buffer may give some up meanwhile.
        states = {
            position: buffer.states[position]
            for position in sorted(buffer.states)
            if position <= num_tokens
        }
        has_windows = self._talk.layout.window > 0
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
        try:
            await self._store_thread.run(self._copy, buffer, states, grant, clock)
        except BaseException:
            with suppress(ReportedError):  # which must not take the place of a cancellation
                await self._client.complete_store(grant, success=False)
            raise
        await self._client.complete_store(grant, success=True)
        self._talk.counters.add("stored_tokens", sum(block.num_tokens for block in grant.blocks))
        self._talk.counters.add("stored_states", len(grant.states))
        window_tokens = sum(window.num_tokens for window in grant.windows)
        self._talk.counters.add("stored_window_tokens", window_tokens)

    def _copy(
        self,
        buffer: WriteBuffer,
        states: Mapping[int, SequenceStates],
        grant: StoreGrant,
        clock: StepClock | None,
    ) -> None:
        """Copy, on the store thread; with a clock, behind the step that computes it.

        States are of steps before: they wait for these, and not for the one that is under way.
        """
        if not (grant.blocks or grant.states or grant.windows):
            if clock is not None:  # the step is about to write to the buffer all the same
                clock.wait_confirmed()
            return
        tensors = self._talk.as_tensors(grant.arena)
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
            if clock is not None:  # a step that fails after its last layer is computed anew
                clock.wait_confirmed()

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """See SessionStore. Without kvd it keeps what no context matches any more."""
        try:
            await self._client.discard(key, token_ids, ranges, lineage=lineage)
        except Exception as error:  # noqa: BLE001  # whatever it is, a later load misses
            self._talk.counters.add("store_discards_failed")
            self._talk.note_problem("discard", error)
        else:
            self._talk.counters.add("store_discards")

    @property
    def offers_grafts(self) -> bool:
        """See SessionStore."""
        return self.saves and self._client.offers_grafts

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """See SessionStore. Without kvd it is nothing: what would follow is computed."""
        try:
            return await self._client.graft(key, token_ids, lineage, source)
        except ReportedError as error:
            self._talk.note_problem("graft", error)
            return 0

    async def retain(self, key: SessionKey, retention: Retention, prefix: bytes) -> None:
        """See SessionStore. A hint: without kvd it is lost, and a later turn's takes its place.

        Whole blocks of the prefix are retained, under a name that follows from their tokens.
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
            self._talk.note_problem("retain", error)

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """See SessionStore. Without kvd, with an old one or of nothing stored it is lost."""
        is_told = False
        try:
            is_told = await self._client.expect_session(key, tools, superseded=superseded)
        except ReportedError as error:
            self._talk.note_problem("expect", error)
        self._talk.counters.add("expectations" if is_told else "expectations_lost")

    async def end_session(self, key: SessionKey) -> None:
        """See SessionStore. Without kvd the client reports it when kvd is back."""
        try:
            await self._client.end_session(key)
        except ReportedError as error:
            self._talk.note_problem("end_session", error)

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """See SessionStore. Told as the session's end, too: whoever else keeps it drops it."""
        if not token_ids:
            return
        try:
            await self._client.discard(key, token_ids, [(0, len(token_ids) // TOKEN_BYTES)])
        except ReportedError as error:
            self._talk.note_problem("forget", error)
        await self.end_session(key)

    def follow_queue(self, feed: QueueFeed) -> None:
        """See SessionStore."""
        self._client.queue.follow(feed)


def _in_groups(clock: StepClock, stream: CopyStream) -> WaitLayer:
    """Wait for a layer together with those beside it: each wake-up costs the forward a little."""
    group = ceil_div(clock.num_layers, WAKE_UPS)

    def wait_layer(layer_index: int) -> int:
        end_of_group = min((layer_index // group + 1) * group, clock.num_layers)
        clock.wait(end_of_group - 1)
        end = max(end_of_group, clock.num_open)  # of all layers, behind a step that was replayed
        stream.wait(clock.computed_mark(end - 1))
        return end

    return wait_layer
