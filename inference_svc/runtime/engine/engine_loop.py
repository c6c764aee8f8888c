"""The one task that owns the scheduler: carries its plans out, steps the batch, hands tokens out.

    submit ─► waiting ─► load (loads.py) ─► step, step, … (stepping.py) ─► done ─► keep: resident
                 ▲            │                    │                         └──► drop
                 └────────────┴── preempted ◄──────┘   saves (save_stream.py) go on beside all this
                                  window full: cut (discards.py)

Threads: the event loop, one compute thread (steps), one load thread and one store thread (copies).
The scheduler and all jobs belong to the event loop. Invariants:
    1. memory is given back only when no step and no copy uses it: the pool's holds see to that;
    2. whoever gets an answer owes `keep` or `drop`; until then its rows stay reserved;
    3. rows computed over a load are neither shown nor saved before that is confirmed;
    4. an exception that is nobody's turn's fault ends the loop, and with it the process.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range, merge_ranges
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import PlannedChunk, StepPlan, StepResult
from inference_svc.runtime.engine.discards import ContextCut, Discards
from inference_svc.runtime.engine.engine_job import EngineJob, as_token_bytes
from inference_svc.runtime.engine.job_memory import JobMemory
from inference_svc.runtime.engine.jobs import Jobs
from inference_svc.runtime.engine.load_tasks import LoadTasks
from inference_svc.runtime.engine.loads import Loads
from inference_svc.runtime.engine.step_parts import follow_step, settle_load, step_input
from inference_svc.runtime.engine.stepping import StepOutput, Stepper
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import SessionStore
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.kvd_client.progress_words import LoadFailedError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S


class EngineLoop:
    """See the module docstring.

    Args:
        num_layers: of the model.
        saves_first: a step waits until what was computed before it is stored (for measuring).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stepper: Stepper,
        loads: Loads,
        saves: Saves,
        residents: ResidentSequences,
        shifts: Compactor,
        pool: KVPool,
        store: SessionStore,
        counters: Counters,
        *,
        num_layers: int,
        saves_first: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._saves = saves
        self._pool = pool
        self._store = store
        self._counters = counters
        self._num_layers = num_layers
        self._saves_first = saves_first
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        store.follow_queue(scheduler.feed)
        self._tasks = asyncio.TaskGroup()
        self._memory = JobMemory(
            *(scheduler, pool, residents, saves, store, counters, self._tasks, self._changed)
        )
        self._discards = Discards(
            *(scheduler, self._memory, residents, shifts, counters, self._tasks, self._changed)
        )
        self._jobs = Jobs(
            *(scheduler, self._memory, counters),
            is_loading=self._is_loading,
            changed=self._changed,
        )
        self._loading = LoadTasks(
            *(scheduler, loads, saves, self._memory, self._tasks),
            num_layers=num_layers,
            failed=self._jobs.fail,
            ended=self._jobs.give_up,
            changed=self._changed,
        )

    # ---------------------------------------------------------------------------- for people

    @property
    def num_running(self) -> int:
        """Turns that are being computed."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Turns not yet admitted."""
        return self._scheduler.num_waiting

    @property
    def retry_after_s(self) -> float:
        """When a turn that is refused now may well be taken."""
        return self._scheduler.retry_after_s()

    def gauges(self) -> dict[str, float]:
        """What goes up and down, by name."""
        return {
            "reserved_rows": self._scheduler.reserved_rows,
            "resident_rows": self._scheduler.resident_rows,
            "resident_sessions": self._scheduler.num_resident,
            "pool_rows": self._pool.num_token_slots,
            "pool_free_rows": self._pool.num_free,
            "pool_misses": self._pool.num_outside,  # rows found no room in the pool: only slower
            "saves_under_way": self._memory.num_saving,
            "compute_busy_s": self._stepper.busy_s,
        }

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share the service otherwise among tenants; what waits keeps its place."""
        self._scheduler.set_tenant_weights(weights)

    async def wait_idle(self) -> None:
        """Wait until nothing is computed, loaded, saved or dropped."""
        await self._idle.wait()

    # ------------------------------------------------------------------------- for the turns

    async def generate(self, job: EngineJob, cut: ContextCut | None = None) -> None:
        """Compute a job's answer; on return the caller owes `keep` or `drop`.

        Args:
            job: to be queued.
            cut: what its session's context gives up for it, once it has its place: the job's
                request is of what is left. It stays given up if the job fails.

        Raises:
            QueueFullError: it was not even queued.
            ReportedError: it failed; nothing is owed.
        """
        self._scheduler.submit(job.request)
        self._jobs.add(job)
        self._idle.clear()
        self._wake.set()
        try:
            if cut is not None:
                await self.discard(job.key, cut.token_ids, cut.ranges, cut.lineage)
            await job.done
        except BaseException:
            self.drop(job)
            raise

    def keep(self, job: EngineJob, token_ids: Sequence[int]) -> None:
        """Save the job's KV in the background, and keep it in memory while there is room.

        `token_ids` are the first of the request's tokens, all computed: they are what is kept.
        """
        self._memory.keep(job, token_ids)
        self._jobs.forget(job)

    async def discard(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Iterable[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Drop tokens of a session of which nothing is computed; the others keep their KV.

        Returns once that in memory is in order. The store is told behind the session's saves, and
        before its next load and save; if that fails, a later load misses. Where it has been done
        before, nothing changes.

        Args:
            key: whose.
            token_ids: of its context before, those that were computed.
            ranges: positions in these.
            lineage: of these; None: not named.

        Raises:
            InvalidDiscardError: for a range that is empty or outside the context.
        """
        merged = merge_ranges(ranges, len(token_ids))
        if merged:
            self._idle.clear()
            await self._discards.discard(key, token_ids, merged, lineage)

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Have the KV of a session dropped that is deleted."""
        self.release_resident(key)
        await self._saves.settled(key)
        await self._store.forget(key, as_token_bytes(token_ids))

    async def end_session(self, key: SessionKey) -> None:
        """Note that a session will not come back, after the save of its last turn."""
        self.release_resident(key)
        await self._saves.settled(key)
        await self._store.end_session(key)

    def release_resident(self, key: SessionKey) -> None:
        """Give up a session's resident sequence, if it has one that is not in use."""
        self._memory.release_resident(key)

    def drop(self, job: EngineJob) -> None:
        """Give the job up wherever it is; does nothing for one that is kept or released."""
        if self._jobs.drop(job):
            self._wake.set()

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._tasks:
            while True:
                self._wake.clear()
                self._jobs.settle_dropped()
                if self._saves_first:
                    await self._all_saved()
                self._loading.note_progress()
                plan = self._scheduler.schedule(time.monotonic_ns())
                self._carry_out(plan)
                if plan.chunks:
                    await self._step(plan.chunks)
                else:
                    await self._sleep(plan.wake_ns)

    async def _all_saved(self) -> None:
        """Wait until what has been computed is stored, answers that are just complete included."""
        while any(job.request.state is RequestState.FINISHED for job in self._jobs):
            await self._wake.wait()  # for their `keep`, or `drop`
            self._wake.clear()
            self._jobs.settle_dropped()
        await self._saves.caught_up()

    async def _sleep(self, wake_ns: int | None) -> None:
        """Until something happens, or the scheduler wants to look again."""
        if wake_ns is None:
            await self._wake.wait()
            return
        left_s = max(0.0, (wake_ns - time.monotonic_ns()) / NS_PER_S)
        timer = asyncio.get_running_loop().call_later(left_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _carry_out(self, plan: StepPlan) -> None:
        for request in plan.preempted:
            self._counters.add("preempted")
            self._memory.preempt(self._jobs.of(request))
        for request in plan.overflowed:
            self._discards.truncate(self._jobs.of(request))
        for key in plan.evicted:
            self._memory.evict(key)
        for request in plan.expired:
            self._jobs.expire(self._jobs.of(request))
        for admission in plan.admitted:
            self._loading.start(self._jobs.of(admission.request), admission)

    # --------------------------------------------------------------------------------- steps

    async def _step(self, chunks: Sequence[PlannedChunk]) -> None:
        inputs = [step_input(self._jobs.of(chunk.request), chunk) for chunk in chunks]
        clock = follow_step(inputs, self._num_layers)
        outputs = await self._stepper.step(inputs, clock)
        computed = [c for c, output in zip(chunks, outputs, strict=True) if output.error is None]
        sampled = {
            part.job.request.number: output.token.token_id
            for part, output in zip(inputs, outputs, strict=True)
            if output.token is not None
        }
        self._scheduler.apply(StepResult(computed, sampled), time.monotonic_ns())
        for part, output in zip(inputs, outputs, strict=True):
            if not part.job.request.is_over:  # its load may have failed it under the step
                settle_load(part.job)
                self._hand_out(part.job, output)

    def _hand_out(self, job: EngineJob, output: StepOutput) -> None:
        """Give the token to the turn; end the request if the answer does, or if it failed."""
        if isinstance(output.error, LoadFailedError):
            self._jobs.restart(job)
        elif output.error is not None:
            self._jobs.fail(job, output.error)
        elif output.token is not None:
            try:
                is_over = job.sink.sampled(output.token) or self._discards.is_end(job)
            except Exception as error:  # noqa: BLE001  # the turn's, which logs it
                self._jobs.fail(job, error)
                return
            if is_over:
                self._scheduler.finish(job.request, time.monotonic_ns())
                job.end()

    def _is_loading(self, job: EngineJob) -> bool:
        return self._loading.is_loading(job)

    def _changed(self) -> None:
        self._wake.set()
        if not (self._jobs or self._memory.num_saving or self._discards.num_shifting):
            self._idle.set()
