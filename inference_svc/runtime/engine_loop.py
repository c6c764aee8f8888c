"""The one task that owns the scheduler: admits requests, steps the batch, hands tokens out.

    submit ─► waiting ─► load (transfers.py) ─► step, step, … (stepping.py) ─► done ─► keep: save
                                                                                  └──► drop

Threads: the event loop, one compute thread (steps), one copy thread (slabs, loads, saves). The
scheduler and all jobs belong to the event loop. Invariants:
    1. a slab is given up only when no step and no copy uses it: cancellations are settled between
       steps, and a load is never interrupted;
    2. whoever gets an answer owes `keep` or `drop`; until then the budget stays reserved;
    3. an exception that is nobody's turn's fault ends the loop, and with it the process.
"""

import asyncio
import time
from collections.abc import Sequence

from inference_svc.core.request import TRANSITIONS, RequestState
from inference_svc.core.scheduler import PlannedChunk, Scheduler
from inference_svc.runtime.engine_job import EngineJob
from inference_svc.runtime.model_runner import Chunk
from inference_svc.runtime.session_store import SessionStore
from inference_svc.runtime.stepping import StepInput, StepOutput, Stepper
from inference_svc.runtime.transfers import Transfers
from shared.grants import QueuedJob
from shared.session_key import SessionKey


class EngineLoop:
    """See the module docstring."""

    def __init__(
        self, scheduler: Scheduler, stepper: Stepper, transfers: Transfers, store: SessionStore
    ) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._transfers = transfers
        self._store = store
        self._jobs: dict[int, EngineJob] = {}  # by request number, until released
        self._loading: set[int] = set()
        self._dropped: list[EngineJob] = []
        self._pushed_queue: tuple[int, ...] = ()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = asyncio.TaskGroup()

    @property
    def num_running(self) -> int:
        """Turns that are being computed."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Turns not yet admitted."""
        return self._scheduler.num_waiting

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
        """Save the job's KV of these tokens in the background, then release it."""
        job.is_kept = True
        save = self._transfers.announce_save(job.key)
        self._tasks.create_task(self._save(job, token_ids, save))

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Have the KV of a deleted session dropped."""
        await self._transfers.forget(key, token_ids)

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
                self._admit()
                chunks = self._scheduler.schedule(time.monotonic_ns())
                if chunks:
                    await self._step(chunks)
                else:
                    await self._wake.wait()

    def _settle_dropped(self) -> None:
        """No step is under way: stop what was dropped, and release it unless a load uses it."""
        dropped, self._dropped = self._dropped, []
        for job in dropped:
            if TRANSITIONS[job.request.state]:
                self._scheduler.stop(job.request, RequestState.CANCELLED, time.monotonic_ns())
            if job.request.number not in self._loading:
                self._release(job)

    def _admit(self) -> None:
        for request in self._scheduler.admit(time.monotonic_ns()):
            self._loading.add(request.number)
            self._tasks.create_task(self._load(self._jobs[request.number]))
        waiting = tuple(request.number for request in self._scheduler.waiting())
        if waiting != self._pushed_queue:
            self._pushed_queue = waiting
            jobs = [self._jobs[number] for number in waiting]
            # No estimates of the start yet: the order is what kvd goes by.
            self._store.push_queue([QueuedJob(job.key, job.history_tokens, 0.0) for job in jobs])

    async def _load(self, job: EngineJob) -> None:
        """Load; the request may have been cancelled meanwhile."""
        try:
            await self._transfers.load(job)
        except Exception as error:  # noqa: BLE001  # the turn's, which logs it
            self._fail(job, error)
        else:
            self._loaded(job)
        finally:
            self._loading.discard(job.request.number)
            self._wake.set()

    def _loaded(self, job: EngineJob) -> None:
        if job.request.state is not RequestState.LOADING:
            self._release(job)
            return
        self._scheduler.loaded(job.request, job.outcome.tokens, time.monotonic_ns())
        job.sink.started(job.request, job.outcome)

    async def _step(self, chunks: Sequence[PlannedChunk]) -> None:
        inputs = [StepInput(self._jobs[c.request.number], self._chunk(c)) for c in chunks]
        outputs = await self._stepper.step(inputs)
        computed = [c for c, output in zip(chunks, outputs, strict=True) if output.error is None]
        sampled = {
            part.job.request.number: output.token.token_id
            for part, output in zip(inputs, outputs, strict=True)
            if output.token is not None
        }
        self._scheduler.apply(computed, sampled, time.monotonic_ns())
        for part, output in zip(inputs, outputs, strict=True):
            self._hand_out(part.job, output)

    def _chunk(self, chunk: PlannedChunk) -> Chunk:
        request = chunk.request
        slab = self._jobs[request.number].slab
        assert slab is not None, "a running request has a slab"  # noqa: S101
        start = request.computed_tokens
        token_ids = request.token_ids[start : start + chunk.num_tokens]
        return Chunk(slab, token_ids, want_logits=chunk.sample)

    def _hand_out(self, job: EngineJob, output: StepOutput) -> None:
        """Give the token to the turn; end the request if the answer does, or if it failed."""
        if output.error is not None:
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

    async def _save(self, job: EngineJob, token_ids: Sequence[int], save: asyncio.Event) -> None:
        try:
            await self._transfers.save(job, token_ids)
        finally:
            self._transfers.finish_save(job.key, save)
            self._release(job)

    def _fail(self, job: EngineJob, error: Exception) -> None:
        if TRANSITIONS[job.request.state]:
            self._scheduler.stop(job.request, RequestState.FAILED, time.monotonic_ns())
        self._release(job)
        job.end(error)

    def _release(self, job: EngineJob) -> None:
        self._scheduler.release(job.request)
        self._jobs.pop(job.request.number, None)
        job.slab = None
        self._wake.set()
        if not self._jobs:
            self._idle.set()
