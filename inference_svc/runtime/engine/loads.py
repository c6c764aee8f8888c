"""Loads: give each admitted request its memory, and its history from where that is.

    resident, large enough   its KV, as it is; on pages, with more of them if need be
    resident, too small      a larger sequence KV, KV copied layer by layer
    another's resident       a sequence KV, the prefix they share copied layer by layer; on pages,
                             a sequence KV that begins with the same ones
    another's turn           the same, of what it has computed so far
    kvd                      a sequence KV, KV loaded layer by layer
    none                     an empty sequence KV

`Loads.begin` returns once it is known how many tokens there will be; `finish` copies them behind
the sequence KV's gate (paper §3.2.1). Both run on the event loop; copies run on the load thread.

`LoadTasks` runs one task for each load, from admission to the last token. The task outlives a
request that is cancelled: a copy under way is never interrupted, and the request's memory is
released when the copy ends. A request whose load failed may be admitted again while the task of
that load still returns its lease: the newest load counts.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.start_gate import HBM
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.engine.engine_request import EngineRequest, Load
from inference_svc.runtime.engine.requests import RequestMemory, Requests
from inference_svc.runtime.kv.copy_stream import CopyProgress, CopyStream
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate, LoadGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest, SessionStore
from inference_svc.runtime.transfer.layer_load import copy_layer
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.serving.tracing import child_span
from shared.types.load_choice import Traffic
from shared.types.units import NS_PER_S

MOST_FAILED_LOADS = 2  # failed loads of one turn, after which it is computed


@dataclass(frozen=True)
class PreloadPolicy:
    """How many layers of a history are loaded before its turn runs.

    Values other than the default are for measurements.

    Attributes:
        is_layerwise: whether computing waits layer by layer; False: for all layers (paper: NO-PL).
        buffer_layers: number of layers loaded before the turn joins the batch; the load of the
            others waits for that. None: it joins with as many as the start gate asks for, and
            the load never pauses.
    """

    is_layerwise: bool = True
    buffer_layers: int | None = None


class Loads:
    """Gives one request at a time its memory, and copies its history there.

    Attributes:
        policy: load policy of requests that have none of their own; a reload sets it.
        preload: how many layers are loaded before a turn runs; a bench sets it.
    """

    def __init__(
        self,
        pool: KVPool,
        ring: WriteRing,
        store: SessionStore,
        residents: ResidentSequences,
        load_thread: WorkerThread,
        counters: Counters,
        *,
        num_layers: int,
        policy: LoadPolicy,
        preload: PreloadPolicy,
    ) -> None:
        self._pool = pool
        self._ring = ring
        self._store = store
        self._residents = residents
        self._load_thread = load_thread
        self._counters = counters
        self._num_layers = num_layers
        self.policy = policy
        self.preload = preload

    async def begin(self, request: EngineRequest, load: Load, traffic: Traffic) -> None:
        """Lend the request a new sequence KV and a write buffer, and begin to load from the store.

        The KV's `num_tokens` counts all tokens that are going to be loaded. The caller owes
        `finish` or `cancel`. Whether loading pays depends on `traffic`, the engine's other work.
        """
        kv = request.kv = self._pool.new_kv(request.capacity_tokens, load.admission.pages)
        begun = await self._store.loads.begin(
            LoadRequest(
                key=request.key,
                token_ids=request.token_bytes(len(request.token_ids) - 1),
                kv=kv,
                policy=self._policy_of(request),
                may_wait=not request.num_failed_loads,
                lineage=request.lineage,
                traffic=traffic,
                history_tokens=request.history_tokens,
            )
        )
        _note_outcome(request, begun.end_token, dict(begun.tier_tokens), begun.reason)
        kv.num_tokens, load.boundary = begun.end_token, begun.tail_from
        load.window_from = begun.window_from
        kv.begin_at(begun.window_from)
        if self._saves(request):
            request.write_buffer = self._ring.lend(begun.tail_from, begun.end_token)
        if begun.grant is not None:
            load.begun = begun
            load.gate = kv.gate = LoadGate(self._num_layers, kv.device)

    def begin_resident(self, request: EngineRequest, load: Load) -> None:
        """Give the request a resident's KV, or new KV to copy that to, and its write buffer."""
        admission, source = load.admission, load.admission.source
        assert source is not None, "no resident to begin with"  # noqa: S101
        load.window_from = request.window_from
        take = self._residents.take if admission.in_place else self._residents.get
        resident, num_tokens = take(source), admission.resident_tokens
        load.boundary = resident.tail_from
        if self._saves(request):
            request.write_buffer = self._residents.next_buffer(resident, num_tokens, self._ring)
        self._counters.add("resident_hits" if source == request.key else "prefixes_shared")
        _note_outcome(request, num_tokens, {HBM: num_tokens}, "")
        if admission.in_place:
            self._residents.release_tail(resident)
        if admission.in_place and not admission.pages:
            request.kv = resident.kv
            request.kv.num_tokens = num_tokens
        else:
            self._new_kv(request, load, resident.kv)

    def _new_kv(self, request: EngineRequest, load: Load, source: SequenceKv | None) -> None:
        """Lend the request new KV, which begins with pages of `source` or gets a copy of it."""
        admission = load.admission
        kv = request.kv = self._pool.new_kv(request.capacity_tokens, admission.pages)
        kv.num_tokens = admission.resident_tokens
        kv.begin_at(request.window_from)
        if source is not None and source.states is not None:
            kv.states = source.states.fork()
        if admission.is_copy:
            assert source is not None, "a copy has a source"  # noqa: S101
            load.gate = kv.gate = LoadGate(self._num_layers, kv.device)
            load.source = source
            load.held.enter_context(source.hold())

    def begin_shared(self, request: EngineRequest, load: Load, source: SequenceKv | None) -> None:
        """Give the request whole blocks of a running turn's KV, and its write buffer.

        The blocks are copied from `source`; None: the request shares their pages.
        """
        num_tokens = load.boundary = load.admission.resident_tokens
        load.window_from = request.window_from
        self._new_kv(request, load, source)
        if self._saves(request):
            request.write_buffer = self._ring.lend(num_tokens, num_tokens)
        self._counters.add("prefixes_shared")
        _note_outcome(request, num_tokens, {HBM: num_tokens}, "")

    async def finish(self, request: EngineRequest, load: Load) -> None:
        """Copy the KV of a load that was begun; if kvd fails, the gate fails and nothing raises."""
        if load.gate is None or request.kv is None:
            return
        if load.begun is not None:
            fixed = self.fixed_layers(load)
            first = self._num_layers if fixed is None else fixed
            await self._copy(request, load.begun, request.kv, load.gate, first)
        elif load.source is not None:
            if load.admission.source == request.key:
                self._counters.add("moves")
            await self._load_thread.run(_copy_prefix, load.source, request.kv)

    async def cancel(self, load: Load) -> None:
        """Give back the lease of a load whose request is over."""
        if load.begun is not None:
            await self._store.loads.cancel(load.begun)

    def fixed_layers(self, load: Load) -> int | None:
        """Return the read buffer, in layers, that is set for a load; None: the gate chooses."""
        if load.begun is None or self.preload.buffer_layers is None:
            return None
        return min(self.preload.buffer_layers, self._num_layers)

    def _saves(self, request: EngineRequest) -> bool:
        return self._store.saves and request.is_stored

    def _policy_of(self, request: EngineRequest) -> LoadPolicy:
        if not request.is_stored or request.num_failed_loads >= MOST_FAILED_LOADS:
            return LoadPolicy.NEVER
        return request.load_policy or self.policy

    async def _copy(
        self, request: EngineRequest, begun: BegunLoad, kv: SequenceKv, gate: LayerGate, first: int
    ) -> None:
        """Copy from kvd: the first layers at once, the others when the turn is in the batch."""
        tail, shown = request.write_buffer, gate
        if not self.preload.is_layerwise:
            shown = LayerGate(self._num_layers)  # the forward sees no layer until all are loaded
        rest = range(first, self._num_layers)
        # An abandoned save releases the buffer: the hold keeps that until it is loaded.
        with nullcontext() if tail is None else tail.hold():
            if first:
                await self._store.loads.finish(begun, kv, tail, shown, range(first))
            if rest:
                await request.in_batch.wait()
            if rest and shown.error is None:
                await self._store.loads.finish(begun, kv, tail, shown, rest)
        if shown is not gate:
            _open_all(shown, gate)


def _copy_prefix(source: SequenceKv, target: SequenceKv) -> None:
    """Copy the target's tokens from another sequence, layer by layer behind the target's gate.

    Runs on the load thread.
    """
    gate = target.gate
    assert gate is not None, "a copy has a gate"  # noqa: S101
    stream = CopyStream(target.device)
    copied = CopyProgress(gate.open)
    with target.hold(), stream.copies(behind_computing=True):
        try:
            for layer_index in range(gate.num_layers):
                copy_layer(source, target, layer_index, target.num_tokens)
                mark = stream.mark()
                gate.on_copies_enqueued(layer_index + 1, mark)
                copied.add(mark)
            copied.finish()
        except BaseException as error:
            gate.fail(error)
            raise
    gate.confirm()


def _open_all(hidden: LayerGate, gate: LayerGate) -> None:
    """Open a gate for all layers at once, or fail it, as the hidden gate says."""
    if hidden.error is not None:
        gate.fail(hidden.error)
    else:
        gate.open(gate.num_layers)
        gate.confirm()


def _note_outcome(
    request: EngineRequest, num_tokens: int, tier_tokens: dict[str, int], reason: str
) -> None:
    """Record from where the history came; a request that was preempted keeps its first record."""
    if request.has_returned:
        return
    outcome = request.outcome
    outcome.tokens, outcome.tier_tokens, outcome.reason = num_tokens, tier_tokens, reason


class LoadTasks:
    """Runs the loads of admitted requests, one task each.

    Args:
        on_change: callback when a request may start, or a load is over.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Requests,
        memory: RequestMemory,
        loads: Loads,
        saves: Saves,
        tasks: asyncio.TaskGroup,
        *,
        num_layers: int,
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._memory = memory
        self._loads = loads
        self._saves = saves
        self._tasks = tasks
        self._num_layers = num_layers
        self._on_change = on_change

    def start(self, request: EngineRequest, admission: Admission) -> None:
        """Start the load of an admitted request; it owns its resident's KV when this returns."""
        load = request.load = Load(admission)
        load.held.enter_context(self._scheduler.slots.hold_pages(request))
        source = admission.source
        if source is not None and admission.is_running:
            # The same plan may have preempted the turn whose pages are shared: then it has no KV.
            kv = None if admission.pages else self._requests.kv_of(source)
            self._loads.begin_shared(request, load, kv)
        elif source is not None:
            self._loads.begin_resident(request, load)
        if admission.is_shared:
            self._memory.end_copy(request)
        self._tasks.create_task(self._run(request, load), context=request.context.copy())

    def report_progress(self) -> None:
        """Report to the scheduler how many layers of each load have arrived."""
        now_ns = time.monotonic_ns()
        for request in self._requests:
            gate = None if request.load is None else request.load.gate
            if gate is not None and not request.is_over:
                # A failed load lets its request start; its step then fails, and it is restarted.
                layers = self._num_layers if gate.error else gate.num_open
                self._scheduler.gate.on_progress(request, layers, now_ns)

    async def _run(self, request: EngineRequest, load: Load) -> None:
        try:
            with child_span("load") as span:
                await self._load(request, load)
                span.set_attributes(
                    {f"kv.{k}_tokens": n for k, n in request.outcome.tier_tokens.items()}
                )
        except Exception as error:  # noqa: BLE001  # fails this turn alone, which logs it
            self._requests.fail(request, error)
        finally:
            load.held.close()
            if request.load is load:  # else a later one: the request does not wait for this one
                request.load = None
                if request.is_over and not request.is_kept:
                    self._requests.release(request)
            self._on_change()

    async def _load(self, request: EngineRequest, load: Load) -> None:
        """Begin a load, announce it to the scheduler, and finish it."""
        if load.admission.source is None:
            await self._saves.wait_for_end(request.key)
            traffic = self._scheduler.traffic(request, time.monotonic_ns())
            await self._loads.begin(request, load, traffic)
        if request.state is not RequestState.LOADING:
            await self._loads.cancel(load)
            return
        try:
            self._announce(request, load)
        except Exception:  # kvd must not keep the lease of a turn that fails
            await self._loads.cancel(load)
            raise
        await self._loads.finish(request, load)
        if request.load is load:
            self._on_loaded(request, load)

    def _announce(self, request: EngineRequest, load: Load) -> None:
        """Report to the scheduler how many tokens will be loaded; the request may start then."""
        assert request.kv is not None, "a load gives a sequence's KV"  # noqa: S101
        now_ns = time.monotonic_ns()
        if load.gate is None:
            request.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        if request.write_buffer is not None:
            source = load.admission.source
            shared_from = None if source == request.key else source
            self._memory.open_save(request, request.write_buffer, shared_from)
        self._scheduler.announce(
            request,
            request.kv.num_tokens,
            now_ns,
            layers_ready=self._num_layers if load.gate is None else 0,
            is_saved=request.write_buffer is not None,
            tier=load.tier,
            fixed_layers=self._loads.fixed_layers(load),
            boundary=load.boundary,
            window_from=load.window_from,
        )
        if request.write_buffer is not None:  # in a tight ring it begins behind a partial block
            block_tokens = self._scheduler.limits.block_tokens
            request.note_block_end(request.write_buffer.first_token, block_tokens)
        if not request.is_started:
            request.is_started = True
            request.sink.on_start(request)
        if load.gate is not None:
            # Each layer may complete the read buffer, so that the request can start.
            loop = asyncio.get_running_loop()
            load.gate.on_change = partial(loop.call_soon_threadsafe, self._on_change)
        self._on_change()

    def _on_loaded(self, request: EngineRequest, load: Load) -> None:
        """Record that a load is over; its gate says whether it succeeded."""
        now_ns = time.monotonic_ns()
        request.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        if request.is_over:  # a resident that was the source of a copy stays
            return
        self._scheduler.gate.on_progress(request, self._num_layers, now_ns)
        if load.admission.is_copy:
            self._memory.end_copy(request)
