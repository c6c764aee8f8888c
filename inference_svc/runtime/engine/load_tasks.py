"""Admitted jobs whose history is on its way: one task each, from admission to the last row.

The task outlives the job's wish for it: a copy under way is never interrupted, and who is cancelled
meanwhile is released when it ends. A job may be admitted anew, after its load failed, while the
task of that load is still giving its lease back: the newest task counts.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.engine.job_memory import JobMemory
from inference_svc.runtime.engine.loads import Load, Loads
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.saves import Saves
from shared.serving.tracing import child_span
from shared.types.units import NS_PER_S


@dataclass(eq=False)
class _Loading:
    """A load under way; its gate once its extent is known and something is to be copied."""

    request: Request
    gate: LayerGate | None = None


class LoadTasks:
    """See the module docstring.

    Args:
        failed: called with a job that cannot be loaded at all, and why.
        ended: called with a job that was over before its load was.
        changed: called when a job may start, or a load is over.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loads: Loads,
        saves: Saves,
        memory: JobMemory,
        tasks: asyncio.TaskGroup,
        *,
        num_layers: int,
        failed: Callable[[EngineJob, Exception], None],
        ended: Callable[[EngineJob], None],
        changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._loads = loads
        self._saves = saves
        self._memory = memory
        self._tasks = tasks
        self._num_layers = num_layers
        self._failed = failed
        self._ended = ended
        self._changed = changed
        self._newest: dict[int, _Loading] = {}  # by request number

    def start(self, job: EngineJob, admission: Admission) -> None:
        """Load an admitted job. What it has of a resident is its own at once."""
        loading = self._newest[job.request.number] = _Loading(job.request)
        load = self._loads.begin_resident(job, admission) if admission.resident_tokens else None
        running = self._run(job, admission, load, loading)
        self._tasks.create_task(running, context=job.context.copy())

    def is_loading(self, job: EngineJob) -> bool:
        """Whether a load still uses the job's memory, or is about to give it some."""
        return job.request.number in self._newest

    def note_progress(self) -> None:
        """Tell the scheduler how many layers are there."""
        now_ns = time.monotonic_ns()
        for loading in self._newest.values():
            gate = loading.gate
            if gate is not None and not loading.request.is_over:
                # A load that failed lets its request start, which then finds out and is restarted.
                layers = self._num_layers if gate.error else gate.num_open
                self._scheduler.progressed(loading.request, layers, now_ns)

    async def _run(
        self, job: EngineJob, admission: Admission, load: Load | None, loading: _Loading
    ) -> None:
        request = job.request
        try:
            with child_span("load") as span:
                await self._load(job, admission, load, loading)
                span.set_attributes(
                    {f"kv.{k}_tokens": n for k, n in job.outcome.tier_tokens.items()}
                )
        except Exception as error:  # noqa: BLE001  # the turn's, which logs it
            self._failed(job, error)
        finally:
            if self._newest.get(request.number) is loading:
                del self._newest[request.number]
            if request.is_over and not job.is_kept:
                self._ended(job)
            self._changed()

    async def _load(
        self, job: EngineJob, admission: Admission, load: Load | None, loading: _Loading
    ) -> None:
        if load is None:
            await self._saves.settled(job.key)
            load = await self._loads.begin(job)
        if job.request.state is not RequestState.LOADING:
            await self._loads.give_up(load)
            return
        loading.gate = load.gate
        await self._announce(job, load)
        await self._loads.finish(job, load)
        if self._newest.get(job.request.number) is loading:
            self._finished(job, admission)

    async def _announce(self, job: EngineJob, load: Load) -> None:
        """Let the scheduler know what will be there; from now on the job may start."""
        try:
            self._tell(job, load)
        except Exception:  # the turn's; kvd must not keep the lease for it
            await self._loads.give_up(load)
            raise

    def _tell(self, job: EngineJob, load: Load) -> None:
        request, now_ns = job.request, time.monotonic_ns()
        if load.gate is None:
            job.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        first_token = 0
        if job.write_buffer is not None:
            first_token = job.write_buffer.first_token
            self._memory.open_save(job, job.write_buffer)
        self._scheduler.announced(
            request,
            load.num_tokens,
            first_token,
            now_ns,
            layers_ready=self._num_layers if load.gate is None else 0,
            tier=load.tier,
            enough_layers=load.enough_layers,
        )
        if not job.is_started:
            job.is_started = True
            job.sink.started(request, job.outcome)
        if load.gate is not None:
            # Each layer may be the one that lets the job start.
            load.gate.on_change = partial(_call_soon, asyncio.get_running_loop(), self._changed)
        self._changed()

    def _finished(self, job: EngineJob, admission: Admission) -> None:
        """Every row is where it belongs, or never will be; the gate knows which."""
        request, now_ns = job.request, time.monotonic_ns()
        job.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        if request.is_over:  # a resident whose rows were moved for nothing stays
            return
        self._scheduler.progressed(request, self._num_layers, now_ns)
        if admission.resident_tokens and not admission.in_place:
            self._memory.end_move(job)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread."""
    loop.call_soon_threadsafe(call)
