"""Loads from kvd into a sequence's KV, and the failures and arena that loads and saves share.

Invariants: 1. a gate is confirmed only when kvd has confirmed the lease *after* all KV was
copied; 2. every lease that was granted is completed, however the copy ends; 3. any failure is a
miss: the turn is recomputed.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import DRAM, SSD, LoadChooser, LoadPolicy, Rates
from inference_svc.runtime.kv.arena_kv import ArenaKv, OpenArena
from inference_svc.runtime.kv.copy_stream import CopyProgress, CopyStream
from inference_svc.runtime.kv.layer_gate import LayerGate, no_wait
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.spans import check_spans, check_windows
from inference_svc.runtime.worker_thread import WorkerThread
from shared.kvd_client.arena_map import ArenaMap, LoadProgress
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import LoadGrant
from shared.process.log import get_logger
from shared.types.errors import LoadFailedError, ReportedError
from shared.types.granted_slots import Lookup
from shared.types.kv_layout import KVLayout


class KvdCalls:
    """The state that loads and saves share in their calls to kvd: its last failure, its arena.

    Attributes:
        layout: the model's layout.
        counters: the service's counters.
    """

    def __init__(
        self, layout: KVLayout, counters: Counters, open_arena: OpenArena = ArenaKv
    ) -> None:
        self.layout = layout
        self.counters = counters
        self._open_arena = open_arena
        self._last_problem = ""
        self._tensors: tuple[ArenaMap, ArenaKv] | None = None

    def as_tensors(self, arena: ArenaMap) -> ArenaKv:
        """Return the arena as tensors, which are made once per arena."""
        opened = self._tensors  # read once: another thread may replace it
        if opened is None or opened[0] is not arena:
            opened = self._tensors = arena, self._open_arena(arena, self.layout)
        return opened[1]

    def record_failure(self, what: str, error: Exception) -> str:
        """Count a failure, log it once until a call succeeds again, and return its slug.

        Args:
            what: "load", "save", "discard", "graft", "retain", "expect", "end_session" or
                "forget".
            error: the exception that the call raised.
        """
        if what in ("load", "save"):
            self.counters.add(f"{what}_errors")
        slug = error.reason if isinstance(error, ReportedError) else "copy_failed"
        if slug != self._last_problem:
            # An error that kvd did not report is a bug of ours: it needs its traceback.
            trace = None if isinstance(error, ReportedError) else error
            log.warning("session_store_failed", what=what, reason=slug, exc_info=trace)
        self._last_problem = slug
        return slug

    def record_success(self) -> None:
        """Log that kvd works again, if the last call failed."""
        if self._last_problem:
            log.info("session_store_works_again", after=self._last_problem)
        self._last_problem = ""


RECOMPUTE_CHEAPER = "recompute_cheaper"
NO_STATE = "no_state"  # tokens are stored, but no state behind them
NO_WINDOW = "no_window"  # tokens are stored, but no KV of layers that attend to the last ones only
PARTIAL = "partial"  # kvd gives no reason why it has no more: it is old, or never had it

log = get_logger(__name__)


@dataclass(frozen=True)
class CopyThreads:
    """The threads that copy between working KV and the arena.

    Attributes:
        load: loads blocks that are in DRAM.
        read: loads blocks that kvd is still reading; a thread of its own, so that a slow disk does
            not delay loads from DRAM.
        store: copies KV that is saved.
    """

    load: WorkerThread
    read: WorkerThread
    store: WorkerThread


class KvdLoads:
    """The SessionLoads of kvd.

    Args:
        deadline_s: most seconds that one load may wait for kvd, not counting the time for which
            kvd fetches its session from a remote store.
        kernels: those that load tokens.
    """

    def __init__(
        self,
        client: KvdClient,
        calibration: Calibration,
        calls: KvdCalls,
        threads: CopyThreads,
        rates: Rates,
        deadline_s: float,
        kernels: LoadKernels = BY_TORCH,
    ) -> None:
        self._client = client
        self._calibration = calibration
        self._calls = calls
        self._threads = threads
        self._rates = rates
        self._chooser = LoadChooser(rates)
        self._deadline_s = deadline_s
        self._kernels = kernels
        self._layers = range(len(calibration.layers))

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """See SessionLoads. On return all grants but the last are copied."""
        if request.policy is LoadPolicy.NEVER:
            return BegunLoad(reason="load_policy_never")
        choice = request.policy, DRAM, 0, request.num_tokens, request.traffic
        if not self._chooser.should_load(*choice):
            self._calls.counters.add("loads_refused")
            return BegunLoad(reason=RECOMPUTE_CHEAPER)
        begun = BegunLoad(began_s=time.monotonic())
        try:
            await self._begin(request, begun)
        except Exception as error:  # noqa: BLE001  # after any failure the turn can be recomputed
            await self._release(begun.grant)
            request.kv.reset()
            begun = BegunLoad(reason=self._calls.record_failure("load", error))
        else:
            self._calls.record_success()
        if missing := self._missing_part(begun):
            await self._release(begun.grant)
            request.kv.reset()
            begun = BegunLoad(reason=missing)
        # Without a grant not even a tail's pre-RoPE keys can be copied: a partial block stays as
        # short as it is, and the next one begins behind it.
        if begun.grant is None:
            begun.tail_from = begun.end_token
        self._calls.counters.add("load_hits" if begun.end_token else "load_misses")
        return begun

    async def finish(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """See SessionLoads."""
        grant = begun.grant
        assert grant is not None, "a load with nothing left to copy is not finished"  # noqa: S101
        try:
            await self._copy(grant, kv, tail, gate, layers, self._deadline(begun))
            if layers.stop < self._layers.stop:
                return
            await self._client.complete_load(grant)
        except asyncio.CancelledError:
            gate.fail(_late_failure("the service stops"))
            await self._release(grant)
            raise
        except Exception as error:  # noqa: BLE001  # as in begin
            gate.fail(error if isinstance(error, LoadFailedError) else _late_failure(str(error)))
            await self._release(grant)
            self._calls.counters.add("load_failed_late")
            self._calls.record_failure("load", error)
        else:
            # A load that is finished in two calls has waited for its turn: its time is no rate.
            if layers.start == 0:
                self._note_rate(begun)
            self._calls.counters.add("loaded_states", grant.state is not None)
            num_tokens = sum(window.num_tokens for window in grant.windows)
            self._calls.counters.add("loaded_window_tokens", num_tokens)
            gate.confirm()

    async def cancel(self, begun: BegunLoad) -> None:
        """See SessionLoads."""
        await self._release(begun.grant)

    async def _begin(self, request: LoadRequest, begun: BegunLoad) -> None:
        """Request grants up to the last one; copy those before it.

        Blocks that kvd is still reading are requested, too. Once such a load has failed, the
        remaining tokens are requested again without them: kvd then grants only what it could read.
        """
        may_wait, num_tokens = request.may_wait, request.num_tokens
        fetch_wait_s = self._chooser.fetch_wait_s(
            request.policy, num_tokens, request.traffic, self._deadline_s
        )
        # Takes the first token; says whether reading the tokens from there on from SSD pays.
        wants_ssd = partial(
            self._chooser.should_load,
            request.policy,
            SSD,
            end=num_tokens,
            traffic=request.traffic,
        )
        while begun.end_token < num_tokens:
            left_s = self._deadline(begun) - time.monotonic()
            if left_s <= 0:
                begun.reason = "deadline"
                return
            dram_only, called_s = not wants_ssd(begun.end_token), time.monotonic()
            grant = await self._client.prepare_load(
                request.key,
                request.token_ids,
                begun.end_token,
                left_s,
                accept_pending=may_wait,
                dram_only=dram_only,
                lineage=request.lineage,
                fetch_wait_s=fetch_wait_s,
                history_tokens=request.history_tokens,
            )
            # The fetch from a remote store counts neither for the load's rate nor for its deadline.
            begun.began_s += min(grant.fetch_waited_s, time.monotonic() - called_s)
            fetch_wait_s = 0.0  # later grants do not wait for a fetch again
            if grant.lookup is Lookup.MISS:
                begun.reason = self._miss_reason(grant)
                return
            begun.grant = grant
            end_token = check_spans(request.kv, grant.spans, self._calls.layout)
            is_rest_refused = dram_only and not wants_ssd(end_token)
            is_last = not grant.more or is_rest_refused
            if not is_last and not await self._copy_now(request, begun, grant):
                may_wait = False
                continue
            self._add_spans(begun, grant)
            if is_last:
                begun.reason = "" if end_token == num_tokens else grant.miss_reason or PARTIAL
                if grant.more:
                    self._calls.counters.add("loads_refused")
                    begun.reason = RECOMPUTE_CHEAPER
                return
            request.kv.num_tokens = end_token

    def _missing_part(self, begun: BegunLoad) -> str:
        """Return the slug of a part without which the tokens are useless; "": none is missing."""
        layout, grant = self._calls.layout, begun.grant
        if not begun.end_token:
            return ""
        if layout.state_bytes and (grant is None or grant.state is None):
            return NO_STATE
        return NO_WINDOW if layout.window and (grant is None or not grant.windows) else ""

    def _miss_reason(self, grant: LoadGrant) -> str:
        """Return the slug of a grant that is a miss; "on_ssd" is our own choice, see `_begin`."""
        if grant.miss_reason == "on_ssd":
            self._calls.counters.add("loads_refused")
            return RECOMPUTE_CHEAPER
        return grant.miss_reason

    def _add_spans(self, begun: BegunLoad, grant: LoadGrant) -> None:
        """Add a grant's tokens to the load."""
        for span in grant.spans:
            begun.tier_tokens[span.tier] += span.num_tokens
        last = grant.spans[-1]
        begun.end_token = grant.end_token
        if grant.windows:
            begun.window_from = check_windows(grant.windows, grant.end_token, self._calls.layout)
        is_partial = last.num_tokens < self._calls.layout.block_tokens
        begun.tail_from = last.token_offset if is_partial else grant.end_token

    async def _copy_now(self, request: LoadRequest, begun: BegunLoad, grant: LoadGrant) -> bool:
        """Copy a grant that is followed by another; False if kvd could not read all of it."""
        gate = LayerGate(self._layers.stop)
        try:
            await self._copy(grant, request.kv, None, gate, self._layers, self._deadline(begun))
        except LoadFailedError as error:
            if grant.progress is None:
                raise
            log.info("load_failed_under_way", error=str(error))
            self._calls.counters.add("loads_retried")
            begun.grant = None
            await self._release(grant)  # kvd may have ended the lease already
            return False
        begun.grant = None
        await self._client.complete_load(grant)
        return True

    async def _copy(
        self,
        grant: LoadGrant,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
        deadline_s: float,
    ) -> None:
        """Copy layers of a grant on the load thread, or, while kvd reads, on a read thread."""
        tensors = self._calls.as_tensors(grant.arena)
        loader = LayerLoader(
            kv,
            tensors,
            grant.spans,
            self._calibration,
            tail,
            self._kernels,
            windows=grant.windows,
        )

        def copy(wait_layer: Callable[[int], object]) -> None:
            stream = CopyStream(kv.device)
            loaded = CopyProgress(lambda num_layers: gate.open(layers.start + num_layers))
            state, room = grant.state if layers.start == 0 else None, None
            if state is not None:
                assert kv.states is not None, "a layout with states"  # noqa: S101
                # Allocated here, where the computing stream is still the current one.
                room = kv.states.allocate()
            with ExitStack() as held:
                held.enter_context(kv.hold())
                if tail is not None:
                    held.enter_context(tail.hold())
                held.enter_context(stream.copies(behind_computing=True))
                if layers.start == 0 and (grant.state is not None or grant.windows):
                    # Progress is counted by layers; states and windows are there with the last one.
                    wait_layer(self._layers.stop - 1)
                if state is not None and kv.states is not None:
                    kv.states.restore(tensors.read_state(state.slot_ids), room)
                    if kv.states.num_tokens != grant.end_token:
                        raise LoadFailedError(
                            f"a state after {kv.states.num_tokens} tokens was granted with "
                            f"{grant.end_token} tokens",
                            "the turn is recomputed",
                        )
                for layer_index in layers:
                    wait_layer(layer_index)
                    loader.load(layer_index)
                    mark = stream.mark()
                    gate.on_copies_enqueued(layer_index + 1, mark)
                    loaded.add(mark)
                loaded.finish()

        # First let the loop launch the step, for which a copy thread would take the lock of Python.
        await asyncio.sleep(0)
        if grant.progress is None:
            await self._threads.load.run(copy, no_wait)
        else:
            await self._threads.read.run(copy, _wait_layer_until(grant.progress, deadline_s))

    def _deadline(self, begun: BegunLoad) -> float:
        return begun.began_s + self._deadline_s

    def _note_rate(self, begun: BegunLoad) -> None:
        """Add a load's time to the rates; all of it counts for the slowest tier it came from."""
        tier = SSD if begun.tier_tokens[SSD] else DRAM
        self._rates.loads.note(tier, begun.end_token, time.monotonic() - begun.began_s)

    async def _release(self, grant: LoadGrant | None) -> None:
        """Complete the lease of a grant whose KV is not used; a failure to do so is ignored."""
        if grant is not None:
            with suppress(ReportedError):
                await self._client.complete_load(grant)


def _wait_layer_until(progress: LoadProgress, deadline_s: float) -> Callable[[int], None]:
    """Make the function that waits for a layer until the deadline, on the thread that copies it."""

    def wait_layer(layer_index: int) -> None:
        progress.wait_layer(layer_index, max(0.0, deadline_s - time.monotonic()))

    return wait_layer


def _late_failure(why: str) -> LoadFailedError:
    """Return the error of a load that failed after it was announced."""
    return LoadFailedError(f"a load failed before it was complete: {why}", "the turn is recomputed")
