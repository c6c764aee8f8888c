"""The engine loop: the one task that runs the scheduler, steps the batch and dispatches tokens.

    submit ─► waiting ─► load (loads.py) ─► step, step, … (stepping.py) ─► done ─► keep: resident
                 ▲            │                    │                         └──► drop
                 └────────────┴── preempted ◄──────┘   saves (saves.py) run beside all this
                                  window full: cut (discards.py)

Threads: the event loop, one compute thread (steps), one load thread and one store thread (copies).
The scheduler and all requests belong to the event loop. Invariants:
    1. memory is released only when no step and no copy uses it: the pool's holds see to that;
    2. the receiver of an answer owes `keep` or `drop`; until then its token slots stay reserved;
    3. KV computed over a load is neither shown nor saved before that load is confirmed;
    4. an exception that does not belong to one turn ends the loop, and with it the process.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inference_svc.core.counters import Counters
from inference_svc.core.ranges import merge_ranges
from inference_svc.core.scheduling.request import RequestEvent, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import PlannedChunk, StepPlan, StepResult
from inference_svc.runtime.engine.discards import Discards
from inference_svc.runtime.engine.drafts import Drafter
from inference_svc.runtime.engine.engine_request import ContextCut, EngineRequest, as_token_bytes
from inference_svc.runtime.engine.loads import Loads, LoadTasks
from inference_svc.runtime.engine.requests import RequestMemory, Requests
from inference_svc.runtime.engine.stepping import (
    StepOutput,
    Stepper,
    follow_step,
    save_computed,
    settle_load,
    step_input,
)
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import SessionStore
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.types.errors import LoadFailedError
from shared.types.graft_source import GraftSource
from shared.types.lineage import WHOLE
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S


class EngineLoop:
    """Runs all requests of one model: admits, loads, computes and saves them. It is an `Engine`.

    Args:
        num_layers: number of the model's layers.
        saves_first: whether a step waits until all KV computed before it is stored (for measuring).

    Attributes:
        scheduler, memory: the scheduler of all requests, and their memory.
        queue: the scheduler's queue.
        idle: set while nothing is computed, loaded, saved or dropped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stepper: Stepper,
        loads: Loads,
        saves: Saves,
        residents: ResidentSequences,
        compactor: Compactor,
        pool: KVPool,
        ring: WriteRing,
        store: SessionStore,
        counters: Counters,
        drafter: Drafter,
        *,
        num_layers: int,
        saves_first: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.queue = scheduler.queue
        self._stepper = stepper
        self._saves = saves
        self._pool = pool
        self._store = store
        self._counters = counters
        self._drafter = drafter
        self._num_layers = num_layers
        self._saves_first = saves_first
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        store.follow_queue(scheduler.feed)
        self._tasks = asyncio.TaskGroup()
        self.memory = RequestMemory(
            scheduler=scheduler,
            pool=pool,
            ring=ring,
            residents=residents,
            saves=saves,
            store=store,
            counters=counters,
            tasks=self._tasks,
            on_change=self._on_change,
        )
        self._discards = Discards(
            scheduler=scheduler,
            memory=self.memory,
            residents=residents,
            compactor=compactor,
            counters=counters,
            tasks=self._tasks,
            on_change=self._on_change,
        )
        self._requests = Requests(scheduler, self.memory, counters, self._on_change)
        self._loading = LoadTasks(
            scheduler=scheduler,
            requests=self._requests,
            memory=self.memory,
            loads=loads,
            saves=saves,
            tasks=self._tasks,
            num_layers=num_layers,
            on_change=self._on_change,
        )

    # --------------------------------------------------------------------------- observation

    def gauges(self) -> dict[str, float]:
        """Return the engine's gauges by name; a token slot holds a token of all layers."""
        slots = self.scheduler.slots
        return {
            "reserved_token_slots": slots.per_token(slots.reserved_slots),
            "resident_token_slots": slots.per_token(self.scheduler.residents.num_slots),
            "resident_sessions": len(self.scheduler.residents),
            "shared_token_slots": slots.per_token(slots.shared_slots),
            "pool_token_slots": self._pool.num_token_slots,
            "pool_free_token_slots": self._pool.num_free,
            "pool_misses": self._pool.num_outside,  # KV allocated outside of the full pool: slower
            "write_ring_token_slots": self.scheduler.write_slots.num_slots,
            "write_ring_free_token_slots": self.scheduler.write_slots.num_free,
            "write_stall_s": self.scheduler.stalled_s,
            "saves_under_way": self.memory.num_saving,
            "compute_busy_s": self._stepper.busy_s,
            "turn_places": self.scheduler.limits.max_running,
        }

    # ------------------------------------------------------------------------- for the turns

    async def generate(self, request: EngineRequest, cut: ContextCut | None = None) -> None:
        """See Engine."""
        self.scheduler.submit(request)
        self._requests.add(request)
        self.idle.clear()
        self._wake.set()
        try:
            if cut is not None:
                await self.discard(request.key, cut)
            await request.done
        except BaseException:
            self.drop(request)
            raise

    def keep(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """See Engine."""
        self.memory.keep(request, token_ids)
        self._requests.forget(request)

    async def discard(self, key: SessionKey, cut: ContextCut) -> None:
        """See Engine."""
        merged = merge_ranges(cut.ranges, len(cut.token_ids))
        if merged:
            self.idle.clear()
            await self._discards.discard(key, replace(cut, ranges=merged))

    async def graft(self, request: EngineRequest, source: GraftSource) -> int:
        """Compute and store a request's tokens, then have the store graft another session's KV.

        The graft follows the request's tokens in the store. Nothing of it is in memory: the next
        request of the session loads all of it.

        Args:
            request: the request of the tokens before the seam, not queued yet; the token that it
                samples is not used.
            source: the KV to graft; its session may still be storing it.

        Returns:
            How many tokens were grafted.

        Raises:
            ReportedError: the tokens could not be computed.
        """
        seam = len(request.token_ids)
        await self.generate(request)
        self.keep(request, request.token_ids[:seam])
        self.memory.release_resident(request.key)
        await self._saves.wait_for_end(request.key)
        await self._saves.wait_for_end(source.key)
        lineage = WHOLE if request.lineage is None else request.lineage
        return await self._store.graft(request.key, request.token_bytes(seam), lineage, source)

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """See Engine."""
        self.memory.release_resident(key)
        await self._saves.wait_for_end(key)
        await self._store.forget(key, as_token_bytes(token_ids))

    async def end_session(self, key: SessionKey) -> None:
        """See Engine."""
        self.memory.release_resident(key)
        await self._saves.wait_for_end(key)
        await self._store.end_session(key)

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """See Engine."""
        is_newest = not self._requests.has(key) and await self._saves.wait_for_newest(key)
        is_back = self._requests.has(key) or self.queue.is_arriving(key)
        if is_newest and not is_back:
            await self._store.expect(key, tools, superseded=superseded)

    def drop(self, request: EngineRequest) -> None:
        """See Engine."""
        if self._requests.drop(request):
            self._wake.set()

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._tasks:
            while True:
                self._wake.clear()
                self._requests.settle_dropped()
                if self._saves_first:
                    await self._wait_for_saves()
                self._loading.report_progress()
                drafts = self._drafter.drafts(self._requests)
                plan = self.scheduler.schedule(time.monotonic_ns(), drafts)
                self._carry_out(plan)
                if plan.chunks:
                    await self._step(plan.chunks)
                else:
                    await self._sleep(plan.wake_ns)

    async def _wait_for_saves(self) -> None:
        """Wait until all computed KV is stored, that of answers just completed included."""
        while any(request.state is RequestState.FINISHED for request in self._requests):
            await self._wake.wait()  # until each has been given to `keep` or `drop`
            self._wake.clear()
            self._requests.settle_dropped()
        await self._saves.wait_until_idle()

    async def _sleep(self, wake_ns: int | None) -> None:
        """Wait until something happens, or it is time to schedule again."""
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
        """Do all that a plan says but the step itself."""
        # KV is released (preempted, overflowed, evicted) before room is taken (admitted, grown).
        for request in plan.unsaved:
            self.memory.abandon_save(self._requests.get(request))
        for chunk in plan.chunks:
            self.memory.extend(self._requests.get(chunk.request), chunk.num_fed)
        if plan.stalled:
            running = [r for r in self._requests if r.state is RequestState.RUNNING]
            self.memory.make_room(running)
        for request in plan.preempted:
            self._counters.add("preempted")
            self.memory.preempt(self._requests.get(request))
        for request in plan.overflowed:
            self._discards.truncate(self._requests.get(request))
        for key in plan.evicted:
            self.memory.evict(key)
        for request in plan.expired:
            self._requests.expire(self._requests.get(request))
        for admission in plan.admitted:
            self._loading.start(self._requests.get(admission.request), admission)
        for growth in plan.grown:
            self._requests.get(growth.request).paged_kv.grow(growth.pages)

    # --------------------------------------------------------------------------------- steps

    async def _step(self, chunks: Sequence[PlannedChunk]) -> None:
        """Compute a step, deliver its tokens, and apply its result to the scheduler."""
        inputs = [step_input(self._requests.get(chunk.request), chunk) for chunk in chunks]
        slots = self.scheduler.write_slots
        is_tight = 2 * slots.num_free < slots.num_slots
        clock = follow_step(inputs, self._num_layers, is_tight=is_tight)
        outputs = await self._stepper.step(inputs, clock)
        answers = [
            self._deliver(part.request, output)
            for part, output in zip(inputs, outputs, strict=True)
        ]
        computed = [c for c, output in zip(chunks, outputs, strict=True) if output.error is None]
        sampled = {a.request.number: a.token_ids for a in answers if a.token_ids}
        self.scheduler.apply(StepResult(computed, sampled), time.monotonic_ns())
        for part, answer in zip(inputs, answers, strict=True):
            request = part.request
            if request.is_over:  # its load may have failed it under the step
                continue
            if request.computed_tokens in request.marks:
                request.note_state()
            settle_load(request)
            if part.draft and answer.error is None:
                save_computed(request)
                request.num_drafted += len(part.draft)
                request.num_accepted += len(answer.token_ids) - 1
            self._conclude(answer)

    def _deliver(self, request: EngineRequest, output: StepOutput) -> "_Delivered":
        """Pass tokens to the turn, one by one, until its answer ends."""
        delivered = _Delivered(request, error=output.error)
        tokens = () if request.is_over else output.tokens
        for token in tokens:
            delivered.token_ids.append(token.token_id)
            try:
                delivered.is_end = request.sink.on_token(token)
            except Exception as error:  # noqa: BLE001  # fails this turn alone, which logs it
                delivered.error = error
            if delivered.is_end or delivered.error is not None:
                break
        return delivered

    def _conclude(self, answer: "_Delivered") -> None:
        """End the request if its answer ends, or if it failed."""
        request, error = answer.request, answer.error
        if error is None and answer.token_ids and not answer.is_end:
            try:
                answer.is_end = self._discards.is_end(request)
            except Exception as failure:  # noqa: BLE001  # fails this turn alone
                error = failure
        if isinstance(error, LoadFailedError):
            self._requests.restart(request)
        elif error is not None:
            self._requests.fail(request, error)
        elif answer.is_end:
            self.scheduler.end(request, RequestEvent.FINISH, time.monotonic_ns())
            request.end()

    def _on_change(self) -> None:
        """Wake the loop, and set `idle` if nothing is under way any more."""
        self._wake.set()
        if not (self._requests or self.memory.num_saving or self._discards.num_compacting):
            self.idle.set()


@dataclass
class _Delivered:
    """The part of a step's output that was delivered to its turn.

    Attributes:
        token_ids: the tokens, up to the answer's end.
        is_end: whether the answer ends with them.
        error: why the request fails, or is restarted (LoadFailedError); None: neither.
    """

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    is_end: bool = False
    error: Exception | None = None
