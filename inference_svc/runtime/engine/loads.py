"""Gives an admitted request its memory and its history, from wherever that is.

    resident, large enough   its KV, as it is
    resident, too small      a larger sequence KV, KV moved layer by layer
    kvd                      a sequence's KV, KV loaded layer by layer
    nowhere                  an empty sequence KV

`begin` returns once it is known how many tokens there will be; `finish` copies them behind the
sequence KV's gate (paper §3.2.1). Runs on the event loop; the copies run on the load thread.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.runtime.engine.engine_request import EngineRequest, Load
from inference_svc.runtime.kv.copy_stream import CopyStream, DoneInOrder
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest, SessionStore
from inference_svc.runtime.transfer.layer_load import move_layer
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread

MOST_FAILED_LOADS = 2  # of one turn, after which it is computed
HBM = "hbm"


@dataclass(frozen=True)
class PreloadPolicy:
    """How far ahead of its turn a history is loaded; what is not the default is for measuring.

    Attributes:
        is_layerwise: False: computing waits for the whole history (paper: NO-PL).
        buffer_layers: layers loaded before the turn joins the batch; the rest follows then.
    """

    is_layerwise: bool
    buffer_layers: int


class Loads:
    """See the module docstring.

    Attributes:
        policy: of requests that have none of their own; a reload sets it.
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
        self._preload = preload

    async def begin(self, request: EngineRequest, load: Load) -> None:
        """Give the request a new sequence KV and what the store has, and its write buffer.

        The sequence's KV counts all tokens that will be there.
        """
        kv = request.kv = self._pool.new_kv(request.capacity_tokens)
        begun = await self._store.loads.begin(
            LoadRequest(
                key=request.key,
                token_ids=request.token_bytes(len(request.token_ids) - 1),
                kv=kv,
                policy=self._policy_of(request),
                may_wait=not request.num_failed_loads,
                lineage=request.lineage,
            )
        )
        _note_outcome(request, begun.end_token, dict(begun.tier_tokens), begun.reason)
        kv.num_tokens = begun.end_token
        if self._store.saves:
            request.write_buffer = self._ring.lend(begun.tail_from, begun.end_token)
        if begun.grant is not None:
            load.begun = begun
            load.gate = kv.gate = LayerGate(self._num_layers)

    def begin_resident(self, request: EngineRequest, load: Load) -> None:
        """Give the request its session's resident KV or a larger one, and its write buffer."""
        admission, key = load.admission, request.key
        resident = self._residents.take(key) if admission.in_place else self._residents.get(key)
        num_tokens = self._residents.usable_tokens(resident, admission.resident_tokens)
        if self._store.saves:
            request.write_buffer = self._residents.next_buffer(resident, num_tokens, self._ring)
        self._counters.add("resident_hits")
        _note_outcome(request, num_tokens, {HBM: num_tokens}, "")
        if admission.in_place:
            self._residents.release_tail(resident)
            request.kv = resident.kv
        else:
            request.kv = self._pool.new_kv(request.capacity_tokens)
            load.gate = request.kv.gate = LayerGate(self._num_layers)
        request.kv.num_tokens = num_tokens

    async def finish(self, request: EngineRequest, load: Load) -> None:
        """Copy what is to be copied; never raises because of kvd."""
        if load.gate is None or request.kv is None:
            return
        if load.begun is not None:
            await self._copy(request, load.begun, request.kv, load.gate)
        else:
            self._counters.add("moves")
            source = self._residents.get(request.key).kv
            await self._load_thread.run(_move_rows, source, request.kv)

    async def cancel(self, load: Load) -> None:
        """End a load that was begun for a request that is over."""
        if load.begun is not None:
            await self._store.loads.cancel(load.begun)

    def tier_of(self, load: Load) -> str | None:
        """Return the slowest tier that KV is copied from; None: from none."""
        if load.gate is None:
            return None
        # "ssd" > "dram"
        return HBM if load.begun is None else max(load.begun.tier_tokens, default=None)

    def enough_layers(self, load: Load) -> int | None:
        """Return with how many layers a request may start whatever the rates say; None: all."""
        num_layers = self._preload.buffer_layers
        # Beyond the buffer nothing is loaded before the request is in the batch.
        return num_layers if load.begun is not None and num_layers < self._num_layers else None

    def _policy_of(self, request: EngineRequest) -> LoadPolicy:
        if request.num_failed_loads >= MOST_FAILED_LOADS:
            return LoadPolicy.NEVER
        return request.load_policy or self.policy

    async def _copy(
        self, request: EngineRequest, begun: BegunLoad, kv: SequenceKv, gate: LayerGate
    ) -> None:
        """Copy from kvd: all at once, or with a pause until the turn is in the batch."""
        tail, shown = request.write_buffer, gate
        if not self._preload.is_layerwise:
            shown = LayerGate(self._num_layers)  # the forward sees nothing until all is there
        first = min(self._preload.buffer_layers, self._num_layers)
        rest = range(first, self._num_layers)
        # A turn that goes on without being saved gives its buffer up: not before it is loaded.
        with nullcontext() if tail is None else tail.hold():
            if first:
                await self._store.loads.finish(begun, kv, tail, shown, range(first))
            if rest:
                await request.in_batch.wait()
            if rest and shown.error is None:
                await self._store.loads.finish(begun, kv, tail, shown, rest)
        if shown is not gate:
            _hand_over(shown, gate)


def _move_rows(source: SequenceKv, target: SequenceKv) -> None:
    """Copy all KV, on the load thread, layer by layer behind the target's gate."""
    gate = target.gate
    assert gate is not None, "a move has a gate"  # noqa: S101
    stream = CopyStream(target.device)
    moved = DoneInOrder(gate.open)
    with source.hold(), target.hold(), stream.copies(behind_computing=True):
        try:
            for layer_index in range(gate.num_layers):
                move_layer(source, target, layer_index, target.num_tokens)
                moved.enqueued(stream.mark())
            moved.finish()
        except BaseException as error:
            gate.fail(error)
            raise
    gate.confirm()


def _hand_over(hidden: LayerGate, gate: LayerGate) -> None:
    if hidden.error is not None:
        gate.fail(hidden.error)
    else:
        gate.open(gate.num_layers)
        gate.confirm()


def _note_outcome(
    request: EngineRequest, num_tokens: int, tier_tokens: dict[str, int], reason: str
) -> None:
    """Record where the history was; a turn that has come back keeps its first record."""
    if request.is_back:
        return
    outcome = request.outcome
    outcome.tokens, outcome.tier_tokens, outcome.reason = num_tokens, tier_tokens, reason
