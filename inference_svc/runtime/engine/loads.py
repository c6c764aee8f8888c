"""Gives an admitted job its memory and its history, from wherever that is.

    resident, large enough   its KV, as it is
    resident, too small      a larger sequence KV, rows moved layer by layer
    kvd                      a sequence's KV, rows loaded layer by layer
    nowhere                  an empty sequence KV

`begin` returns once it is known how many tokens there will be; `finish` copies them behind the
sequence KV's gate (paper §3.2.1). Runs on the event loop; the copies run on the load thread.
"""

from dataclasses import dataclass

from inference_svc.core.counters import Counters
from inference_svc.core.rates.load_or_recompute import LoadPolicy
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.kv.copy_stream import CopyStream, DoneInOrder
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest, SessionStore
from inference_svc.runtime.transfer.layer_load import move_layer
from inference_svc.runtime.transfer.resident_sequences import ResidentSequence, ResidentSequences
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


@dataclass(frozen=True)
class Load:
    """A load that `begin` began.

    Attributes:
        num_tokens: there will be in the sequence's KV.
        begun: to be copied from kvd; None: nothing.
        source: to be moved from; None: nothing.
        gate: of the sequence's KV; None: everything is there.
        tier: the slowest that rows come from; None: from none.
        enough_layers: with which the turn may join the batch whatever the rates say; None: all.
    """

    num_tokens: int
    tier: str | None = None
    enough_layers: int | None = None
    begun: BegunLoad | None = None
    source: ResidentSequence | None = None
    gate: LayerGate | None = None


class Loads:
    """See the module docstring.

    Attributes:
        policy: of jobs that have none of their own; a reload sets it.
    """

    def __init__(
        self,
        pool: KVPool,
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
        self._store = store
        self._residents = residents
        self._load_thread = load_thread
        self._counters = counters
        self._num_layers = num_layers
        self.policy = policy
        self._preload = preload
        # Beyond the buffer nothing is loaded before the turn is in the batch.
        is_held_back = preload.buffer_layers < num_layers
        self._enough_layers = preload.buffer_layers if is_held_back else None

    async def begin(self, job: EngineJob) -> Load:
        """Give the job a new sequence KV and what the store has, and its write buffer.

        The sequence's KV counts all rows that will be there.
        """
        request = job.request
        kv = job.kv = self._pool.new_kv(request.capacity_tokens)
        begun = await self._store.begin_load(
            LoadRequest(
                key=job.key,
                token_ids=job.token_bytes(len(request.token_ids) - 1),
                kv=kv,
                policy=self._policy_of(job),
                may_wait=not job.num_failed_loads,
                lineage=request.lineage,
            )
        )
        _note_outcome(job, begun.end_token, dict(begun.tier_tokens), begun.reason)
        kv.num_tokens = begun.end_token
        if self._store.saves:
            job.write_buffer = self._pool.new_write_buffer(
                begun.tail_from, request.capacity_tokens - begun.tail_from
            )
            job.write_buffer.end_token = begun.end_token
        if begun.grant is None:
            return Load(begun.end_token)
        kv.gate = LayerGate(self._num_layers)
        return Load(
            begun.end_token,
            tier=max(begun.tier_tokens, default=None),  # "ssd" > "dram"
            enough_layers=self._enough_layers,
            begun=begun,
            gate=kv.gate,
        )

    async def finish(self, job: EngineJob, load: Load) -> None:
        """Copy what is to be copied; never raises because of kvd."""
        if load.source is not None:
            await self._move(job, load.source)
        elif load.begun is not None and load.gate is not None and job.kv is not None:
            await self._load(job, load.begun, job.kv, load.gate)

    async def give_up(self, load: Load) -> None:
        """End a load that was begun for a job that is over."""
        if load.begun is not None:
            await self._store.give_up(load.begun)

    def _policy_of(self, job: EngineJob) -> LoadPolicy:
        if job.num_failed_loads >= MOST_FAILED_LOADS:
            return LoadPolicy.NEVER
        return job.load_policy or self.policy

    # ------------------------------------------------------------------------------- residents

    def begin_resident(self, job: EngineJob, admission: Admission) -> Load:
        """Give the job its session's resident sequence or a larger one, and its write buffer."""
        request, key = job.request, job.key
        resident = self._residents.take(key) if admission.in_place else self._residents.get(key)
        num_tokens = self._residents.usable_tokens(resident, admission.resident_tokens)
        if self._store.saves:
            job.write_buffer = self._residents.next_buffer(
                resident, num_tokens, request.capacity_tokens
            )
        self._counters.add("resident_hits")
        _note_outcome(job, num_tokens, {HBM: num_tokens}, "")
        if admission.in_place:
            self._residents.release_tail(resident)
            job.kv = resident.kv
            job.kv.num_tokens = num_tokens
            return Load(num_tokens)
        kv = job.kv = self._pool.new_kv(request.capacity_tokens)
        kv.num_tokens = num_tokens
        kv.gate = LayerGate(self._num_layers)
        return Load(num_tokens, tier=HBM, source=resident, gate=kv.gate)

    async def _move(self, job: EngineJob, source: ResidentSequence) -> None:
        kv = job.kv
        assert kv is not None, "a job that moves has a sequence's KV"  # noqa: S101
        self._counters.add("moves")
        await self._load_thread.run(_move_rows, source.kv, kv)

    # ------------------------------------------------------------------------------------- kvd

    async def _load(
        self, job: EngineJob, begun: BegunLoad, kv: SequenceKv, gate: LayerGate
    ) -> None:
        """Copy from kvd: all at once, or with a pause until the turn is in the batch."""
        tail, shown = job.write_buffer, gate
        if not self._preload.is_layerwise:
            shown = LayerGate(self._num_layers)  # the forward sees nothing until all is there
        first = min(self._preload.buffer_layers, self._num_layers)
        if first:
            await self._store.finish_load(begun, kv, tail, shown, range(first))
        if first < self._num_layers:
            await job.in_batch.wait()
        if first < self._num_layers and shown.error is None:
            await self._store.finish_load(begun, kv, tail, shown, range(first, self._num_layers))
        if shown is not gate:
            _hand_over(shown, gate)


def _move_rows(source: SequenceKv, target: SequenceKv) -> None:
    """Runs on the load thread."""
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
    job: EngineJob, num_tokens: int, tier_tokens: dict[str, int], reason: str
) -> None:
    """Record where the history was; a turn that has come back keeps its first record."""
    if job.request.is_back:
        return
    outcome = job.outcome
    outcome.tokens, outcome.tier_tokens, outcome.reason = num_tokens, tier_tokens, reason
