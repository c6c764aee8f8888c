"""The one task that owns the scheduler: carries its plans out, steps the batch, hands tokens out.

    submit ─► waiting ─► load (loads.py) ─► step, step, … (stepping.py) ─► done ─► keep: resident
                 ▲            │                    │                         └──► drop
                 └────────────┴── preempted ◄──────┘   saves (save_stream.py) go on beside all this

Threads: the event loop, one compute thread (steps), one load thread and one store thread (copies).
The scheduler and all jobs belong to the event loop. Invariants:
    1. memory is given back only when no step and no copy uses it: the pool's holds see to that;
    2. whoever gets an answer owes `keep` or `drop`; until then its rows stay reserved;
    3. rows computed over history that is still being loaded are neither shown nor saved before
       that load is confirmed;
    4. an exception that is nobody's turn's fault ends the loop, and with it the process.
"""

import asyncio
import time
from collections.abc import Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.errors import DeadlineExceededError
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import PlannedChunk, StepPlan, StepResult
from inference_svc.runtime.compute.model_runner import Chunk
from inference_svc.runtime.compute.stepping import StepInput, StepOutput, Stepper
from inference_svc.runtime.engine.engine_job import EngineJob, as_token_bytes
from inference_svc.runtime.engine.job_memory import JobMemory
from inference_svc.runtime.engine.load_tasks import LoadTasks
from inference_svc.runtime.engine.loads import Loads
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.resident_slabs import ResidentSlabs
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import SessionStore
from shared.progress_words import LoadFailedError
from shared.session_key import SessionKey
from shared.units import NS_PER_S


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
        residents: ResidentSlabs,
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
        self._jobs: dict[int, EngineJob] = {}  # by request number, until their slab is given up
        self._dropped: list[EngineJob] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        store.follow_queue(scheduler.feed)
        self._tasks = asyncio.TaskGroup()
        self._memory = JobMemory(
            *(scheduler, pool, residents, saves, store, counters, self._tasks, self._changed)
        )
        self._loading = LoadTasks(
            *(scheduler, loads, saves, self._memory, self._tasks),
            num_layers=num_layers,
            failed=self._fail,
            ended=self._give_up,
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
        scheduler = self._scheduler
        return {
            "reserved_rows": scheduler.reserved_rows,
            "resident_rows": scheduler.resident_rows,
            "resident_sessions": scheduler.num_resident,
            "pool_rows": self._pool.num_rows,
            "pool_free_rows": self._pool.num_free,
            "pool_misses": self._pool.num_outside,  # rows found no room in the pool: only slower
            "saves_under_way": self._memory.num_saving,
            "compute_busy_s": self._stepper.busy_s,
        }

    async def wait_idle(self) -> None:
        """Wait until nothing is computed, loaded or saved."""
        await self._idle.wait()

    # ------------------------------------------------------------------------- for the turns

    async def generate(self, job: EngineJob) -> None:
        """Compute a job's answer; on return the caller owes `keep` or `drop`.

        Raises:
            QueueFullError: it was not even queued.
            ReportedError: it failed; nothing is owed.
        """
        self._scheduler.submit(job.request)
        self._jobs[job.request.number] = job
        self._idle.clear()
        self._wake.set()
        try:
            await job.done
        except asyncio.CancelledError:
            self.drop(job)
            raise

    def keep(self, job: EngineJob, token_ids: Sequence[int]) -> None:
        """Save the job's KV in the background, and keep it in memory while there is room.

        `token_ids` are the first of the request's tokens, all computed: they are what is kept.
        """
        self._memory.keep(job, token_ids)
        self._forget(job)

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Have the KV of a deleted session dropped, after the save of its last turn."""
        self.release_resident(key)
        await self._saves.settled(key)
        await self._store.forget(key, as_token_bytes(token_ids))

    async def end_session(self, key: SessionKey) -> None:
        """Note that a session will not come back, after the save of its last turn."""
        self.release_resident(key)
        await self._saves.settled(key)
        await self._store.end_session(key)

    def release_resident(self, key: SessionKey) -> None:
        """Give up a session's resident slab, if it has one that is not in use."""
        self._memory.release_resident(key)

    def drop(self, job: EngineJob) -> None:
        """Give the job up wherever it is; does nothing for one that is kept or released."""
        if not job.is_kept and job.request.number in self._jobs:
            self._dropped.append(job)
            self._wake.set()

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._tasks:
            while True:
                self._wake.clear()
                self._settle_dropped()
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
        while any(job.request.state is RequestState.FINISHED for job in self._jobs.values()):
            await self._wake.wait()  # for their `keep`, or `drop`
            self._wake.clear()
            self._settle_dropped()
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

    def _settle_dropped(self) -> None:
        """No step is under way: stop what was dropped, and release it unless a load uses it."""
        dropped, self._dropped = self._dropped, []
        for job in dropped:
            if not job.request.is_over:
                self._scheduler.stop(job.request, RequestState.CANCELLED, time.monotonic_ns())
            self._give_up(job)

    def _carry_out(self, plan: StepPlan) -> None:
        for request in plan.preempted:
            self._counters.add("preempted")
            self._memory.preempt(self._jobs[request.number])
        for key in plan.evicted:
            self._memory.evict(key)
        for request in plan.expired:
            self._counters.add("expired")
            self._expire(self._jobs[request.number])
        for admission in plan.admitted:
            self._loading.start(self._jobs[admission.request.number], admission)

    # --------------------------------------------------------------------------------- steps

    async def _step(self, chunks: Sequence[PlannedChunk]) -> None:
        inputs = [self._input(chunk) for chunk in chunks]
        clock = self._follow(inputs)
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
                self._settle_load(part.job)
                self._hand_out(part.job, output)

    def _input(self, chunk: PlannedChunk) -> StepInput:
        request = chunk.request
        job = self._jobs[request.number]
        assert job.slab is not None, "a running request has a slab"  # noqa: S101
        job.in_batch.set()
        if job.gate is not None:
            job.gate.on_change = None  # who is in the batch waits in the forward
        start = request.computed_tokens
        token_ids = request.token_ids[start : start + chunk.num_tokens]
        return StepInput(job, Chunk(job.slab, token_ids, chunk.sample, job.write_buffer))

    def _follow(self, inputs: Sequence[StepInput]) -> StepClock | None:
        """Have saves follow the step layer by layer, where history is certain."""
        clock = None
        for part in inputs:
            job, slab = part.job, part.chunk.slab
            end_token = slab.num_tokens + len(part.chunk.token_ids)
            if job.saves is not None and slab.gate is None and job.saves.wants(end_token):
                clock = clock or StepClock(self._num_layers, slab.device)
                job.saves.follow(job.token_bytes(end_token), clock)
        return clock

    def _settle_load(self, job: EngineJob) -> None:
        """After the first step over a load: its gate has done its duty, and saving may begin."""
        slab = job.slab
        if slab is None or slab.gate is None or not slab.gate.is_settled:
            return
        job.outcome.stall_s += slab.gate.waited_s
        if slab.gate.error is not None:
            return
        slab.gate = None
        if job.saves is not None and job.saves.wants(slab.num_tokens):
            job.saves.follow(job.token_bytes(slab.num_tokens), None)

    def _hand_out(self, job: EngineJob, output: StepOutput) -> None:
        """Give the token to the turn; end the request if the answer does, or if it failed."""
        if isinstance(output.error, LoadFailedError):
            self._restart(job)
        elif output.error is not None:
            self._fail(job, output.error)
        elif output.token is not None:
            try:
                is_over = job.sink.sampled(output.token)
            except Exception as error:  # noqa: BLE001  # the turn's, which logs it
                self._fail(job, error)
                return
            if is_over:
                self._scheduler.finish(job.request, time.monotonic_ns())
                job.end()

    # ---------------------------------------------------------------------------------- ends

    def _restart(self, job: EngineJob) -> None:
        """Its history did not arrive: what was computed over it is void, it is admitted anew."""
        job.num_failed_loads += 1
        self._memory.void(job)
        self._scheduler.restart(job.request, time.monotonic_ns())

    def _expire(self, job: EngineJob) -> None:
        job.end(
            DeadlineExceededError(
                "the turn's deadline passed before it was complete",
                "submit it again with more time, or when the service is less busy",
            )
        )
        self._give_up(job)

    def _fail(self, job: EngineJob, error: Exception) -> None:
        if not job.request.is_over:
            self._scheduler.stop(job.request, RequestState.FAILED, time.monotonic_ns())
        job.end(error)
        self._give_up(job)

    def _give_up(self, job: EngineJob) -> None:
        """Release a job that has no answer, unless its load is under way, which does it then."""
        job.in_batch.set()  # a load that waits for it goes on
        if not self._loading.is_loading(job) and self._forget(job):
            self._memory.give_up(job)

    def _forget(self, job: EngineJob) -> bool:
        """Forget a job that is over; False if it was before."""
        is_known = self._jobs.pop(job.request.number, None) is not None
        self._changed()
        return is_known

    def _changed(self) -> None:
        self._wake.set()
        if not self._jobs and not self._memory.num_saving:
            self._idle.set()
