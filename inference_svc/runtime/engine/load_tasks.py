"""Admitted requests whose history is on its way: one task each, from admission to the last token.

The task outlives the request's wish for it: a copy under way is never interrupted, and who is
cancelled meanwhile is released when it ends. A request may be admitted anew, after its load failed,
while the task of that load is still giving its lease back: the newest load counts.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.engine.engine_request import EngineRequest, Load
from inference_svc.runtime.engine.loads import Loads
from inference_svc.runtime.engine.requests import RequestMemory, Requests
from inference_svc.runtime.store.saves import Saves
from shared.serving.tracing import child_span
from shared.types.units import NS_PER_S


class LoadTasks:
    """See the module docstring.

    Args:
        changed: called when a request may start, or a load is over.
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
        changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._memory = memory
        self._loads = loads
        self._saves = saves
        self._tasks = tasks
        self._num_layers = num_layers
        self._changed = changed

    def start(self, request: EngineRequest, admission: Admission) -> None:
        """Load an admitted request. What it has of a resident is its own at once."""
        load = request.load = Load(admission)
        if admission.resident_tokens:
            self._loads.begin_resident(request, load)
        self._tasks.create_task(self._run(request, load), context=request.context.copy())

    def note_progress(self) -> None:
        """Tell the scheduler how many layers are there."""
        now_ns = time.monotonic_ns()
        for request in self._requests:
            gate = None if request.load is None else request.load.gate
            if gate is not None and not request.is_over:
                # A load that failed lets its request start, which then finds out and is restarted.
                layers = self._num_layers if gate.error else gate.num_open
                self._scheduler.gate.progressed(request, layers, now_ns)

    async def _run(self, request: EngineRequest, load: Load) -> None:
        try:
            with child_span("load") as span:
                await self._load(request, load)
                span.set_attributes(
                    {f"kv.{k}_tokens": n for k, n in request.outcome.tier_tokens.items()}
                )
        except Exception as error:  # noqa: BLE001  # the turn's, which logs it
            self._requests.fail(request, error)
        finally:
            if request.load is load:
                request.load = None
            if request.is_over and not request.is_kept:
                self._requests.release(request)
            self._changed()

    async def _load(self, request: EngineRequest, load: Load) -> None:
        if not load.admission.resident_tokens:
            await self._saves.settled(request.key)
            await self._loads.begin(request, load)
        if request.state is not RequestState.LOADING:
            await self._loads.cancel(load)
            return
        try:
            self._announce(request, load)
        except Exception:  # the turn's; kvd must not keep the lease for it
            await self._loads.cancel(load)
            raise
        await self._loads.finish(request, load)
        if request.load is load:
            self._finished(request, load)

    def _announce(self, request: EngineRequest, load: Load) -> None:
        """Let the scheduler know what will be there; from now on the request may start."""
        assert request.kv is not None, "a load gives a sequence's KV"  # noqa: S101
        now_ns = time.monotonic_ns()
        if load.gate is None:
            request.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        if request.write_buffer is not None:
            self._memory.open_save(request, request.write_buffer)
        self._scheduler.announced(
            request,
            request.kv.num_tokens,
            now_ns,
            layers_ready=self._num_layers if load.gate is None else 0,
            is_saved=request.write_buffer is not None,
            tier=self._loads.tier_of(load),
            enough_layers=self._loads.enough_layers(load),
        )
        if not request.is_started:
            request.is_started = True
            request.sink.started(request)
        if load.gate is not None:
            # Each layer may be the one that lets the request start.
            load.gate.on_change = partial(_call_soon, asyncio.get_running_loop(), self._changed)
        self._changed()

    def _finished(self, request: EngineRequest, load: Load) -> None:
        """All KV is where it belongs, or never will be; the gate knows which."""
        now_ns = time.monotonic_ns()
        request.outcome.load_s = (now_ns - request.admitted_ns) / NS_PER_S
        if request.is_over:  # a resident that was moved for nothing stays
            return
        self._scheduler.gate.progressed(request, self._num_layers, now_ns)
        if load.is_move:
            self._memory.end_move(request)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread."""
    loop.call_soon_threadsafe(call)
