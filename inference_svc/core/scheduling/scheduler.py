"""The scheduler: which requests are loaded, computed, and preempted (iteration-level batching).

It owns the order of requests and the account of token slots. It knows nothing of tensors, text or
kvd. The engine calls it, and no method blocks:

    submit ─► schedule ─► plan: admitted ─► announce ─► on_progress … ─► schedule ─► plan: chunks
                                                                           ▲           │
                                                         finish ◄── apply ─┴───────────┘

The engine owes `release_kv` for a request that is over. For a request that overflowed it owes
`truncate` and the end of the compaction of its resident. For each chunk that is saved it takes
slots of the write ring, and returns them as they are stored. `slot_budget.py` and
`write_slots.py` have the life of slots.

Invariants (`check`):
    1. slots: see slot_budget.py and residents.py;
    2. at most max_running requests run, and at most max_loading load or wait loaded. A session
       has at most one request in these states. At most max_waiting requests wait, not counting
       those that were preempted or restarted;
    3. a step contains every answer under way that has room, and prompt tokens up to the bound.
       A request without room in the write ring is left out until there is room, or until the
       ring has stood still for too long;
    4. no request starves. The head of the queue holds back all behind it, and a request that was
       preempted or overflowed has its old place. Every holder of slots releases them in the end:
       residents are evicted, requests end or outgrow their slots. Only requests of a higher
       priority overtake.
"""

from collections.abc import Mapping, Sequence

from inference_svc.core.errors import QueueFullError
from inference_svc.core.ranges import Range
from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.held_slots import ContiguousSlots, HeldSlots
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.planner import Planner
from inference_svc.core.scheduling.request import (
    ActiveRequests,
    Request,
    RequestEvent,
    RequestState,
)
from inference_svc.core.scheduling.residents import Residents
from inference_svc.core.scheduling.slot_budget import SlotBudget
from inference_svc.core.scheduling.start_gate import StartGate
from inference_svc.core.scheduling.step_plan import (
    NO_DRAFTS,
    Drafts,
    SchedulerLimits,
    StepPlan,
    StepResult,
)
from inference_svc.core.scheduling.waiting_queue import Deadlines, StartEstimates, WaitingQueue
from inference_svc.core.scheduling.write_slots import WriteSlots
from shared.types.load_choice import RecentStarts, Traffic
from shared.types.queue_feed import QueueFeed
from shared.types.units import NS_PER_S


class Scheduler:
    """Decides, step by step, what the engine admits, loads, computes and evicts.

    Args:
        limits: the bounds of a step, of the queue, and of memory.
        rates: measured rates of steps and loads; the engine updates them.
        num_layers: number of the model's layers.
        tenant_weights: shares of tenants that wait at the same time; 1 for a tenant without one.

    Attributes:
        limits: the bounds of a step, of the queue, and of memory.
        feed: changes of the queue, for kvd: which requests wait, and which run. A request counts as
            running from its admission until it waits again or, after its end, until `release_kv`.
        queue: requests that wait, in the order in which they will be admitted.
        held_slots: the account of token slots, by holding.
        slots: the same account, by request and resident.
        write_slots: the account of the write ring's slots; the engine takes and releases them.
        residents: sessions' KV that stays after their turns; the engine reports there when it drops
            or moves a resident.
        gate: holds requests back until enough of their history is loaded; the engine reports the
            progress of loads there.
        estimates: estimates of when a place in the queue will be free.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        rates: Rates,
        num_layers: int,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.feed = QueueFeed()
        self.queue = WaitingQueue(tenant_weights or {}, self.feed)
        self.held_slots = _held_slots(limits)
        self.residents = Residents(
            self.held_slots,
            limits.block_tokens,
            have_states=limits.has_states,
            attention_window=limits.attention_window,
            most=limits.most_residents,
        )
        self.slots = SlotBudget(self.held_slots, self.residents)
        self.write_slots = WriteSlots(limits.write_slots)
        self.gate = StartGate(num_layers, rates)
        self.estimates = StartEstimates(rates)
        self.limits = limits
        self._active = ActiveRequests()
        self._planner = Planner(
            limits=limits,
            queue=self.queue,
            active=self._active,
            slots=self.slots,
            residents=self.residents,
            gate=self.gate,
            write_slots=self.write_slots,
        )
        self._deadlines = Deadlines()
        self._rates = rates
        self._starts = RecentStarts()

    @property
    def num_running(self) -> int:
        """Number of requests in the batch."""
        return len(self._active.in_state(RequestState.RUNNING))

    @property
    def stalled_s(self) -> float:
        """Seconds in which running requests have waited for room in the write ring so far."""
        return self.write_slots.stalled_ns / NS_PER_S

    # ------------------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: the waiting queue is at its bound.
        """
        assert len(request.token_ids) <= request.window_tokens, "the caller cuts the context"
        most_slots = self.held_slots.needed_for(request.full_capacity_tokens)
        assert most_slots <= self.limits.kv_slots, "the caller checks the window"
        if len(self.queue) >= self.limits.max_waiting:
            raise QueueFullError(
                f"the queue is full ({len(self.queue)} turns wait)",
                "submit again later or raise scheduler.max_turns",
                queue_length=len(self.queue),
                retry_after_s=self.estimates.retry_after_s(),
            )
        self.queue.add(request)
        self._deadlines.add(request)

    def announce(
        self,
        request: Request,
        num_tokens: int,
        now_ns: int,
        *,
        layers_ready: int,
        is_saved: bool = False,
        tier: str | None = None,
        fixed_layers: int | None = None,
        boundary: int = 0,
        window_from: int = 0,
    ) -> None:
        """Record how much KV an admitted request starts with; it may start as soon as that pays.

        Args:
            request: the request, LOADING until now.
            num_tokens: tokens that will have KV; at least one is left to compute.
            now_ns: the time.
            layers_ready: number of layers whose KV is there. If not all are, the load is under way,
                and the caller owes `gate.on_progress`.
            is_saved: whether its new KV takes slots of the write ring.
            tier: the tier it is loaded from, if earlier loads from there tell how long it takes.
            fixed_layers: its read buffer in layers; None: chosen from the measured rates.
            boundary: position of a token at which a stored block begins.
            window_from: first token that will have KV in layers with a window.
        """
        assert 0 <= num_tokens < len(request.token_ids), "the last token is always computed"
        request.move(RequestEvent.ANNOUNCE)
        request.computed_tokens = num_tokens
        request.is_saved = is_saved
        request.boundary, request.window_from = boundary, window_from
        if not request.has_returned:
            request.loaded_tokens = num_tokens
        request.ready_ns = request.ready_ns or now_ns
        self.gate.watch(request, now_ns, layers_ready, tier=tier, fixed_layers=fixed_layers)

    def restart(self, request: Request) -> None:
        """Return an admitted request to its place in the queue, because its load failed or is void.

        Nothing is kept: its KV is released.
        """
        request.move(RequestEvent.RESTART)
        request.computed_tokens = 0
        request.is_saved = False
        if not request.has_returned:
            request.loaded_tokens = 0
        self.slots.release_kv(request)
        self._remove_active(request)
        self.queue.put_back(request)

    def apply(self, result: StepResult, now_ns: int) -> None:
        """Record computed chunks and append sampled tokens; skip requests that have ended."""
        for chunk in result.computed:
            request = chunk.request
            if request.state is not RequestState.RUNNING:
                continue
            # The step has attended to all of the history, so that its load has succeeded.
            self.gate.confirm(request)
            request.computed_tokens += chunk.num_tokens
            if chunk.sample:
                token_ids = result.sampled[request.number]
                assert 0 < len(token_ids) <= 1 + len(chunk.draft), "nobody has drafted so many"
                for token_id in token_ids:
                    request.append(token_id)
                # The last sampled token has no KV yet; those before it were fed as the draft.
                request.computed_tokens += len(token_ids) - 1
                request.first_token_ns = request.first_token_ns or now_ns
            assert request.computed_tokens <= request.capacity_tokens, "KV has overflowed"

    def end(self, request: Request, event: RequestEvent, now_ns: int) -> None:
        """Finish a running request, or cancel or fail a request in any state.

        Its slots stay reserved until they are kept as a resident or released.
        """
        was_waiting = request.state is RequestState.WAITING
        request.move(event)
        assert request.is_over, f"{event.value} ends nothing"
        request.finished_ns = now_ns
        if was_waiting:
            self.queue.remove(request)
        else:
            self._remove_active(request)
            self.estimates.on_end(now_ns, is_queue_busy=len(self.queue) > 0)

    # ---------------------------------------------------------------------------------- slots

    def keep_resident(self, request: Request, token_ids: Sequence[int], now_ns: int) -> bool:
        """Keep the KV of a request that is over as its session's resident, if that is possible.

        Args:
            request: the request, which is over.
            token_ids: the tokens to keep the KV of: the first of its tokens, all computed.
            now_ns: the time.

        Returns:
            Whether it was kept; if not, `release_kv` is owed.
        """
        assert request.is_over, "the sequence's KV of a request under way is its own"
        assert len(token_ids) <= request.computed_tokens, "only what was computed is kept"
        key = request.key
        if not (self.limits.keeps_residents and token_ids and self.slots.kv_slots(request)):
            return False
        if key in self.residents or self._active.has_session(key):
            return False
        self.slots.become_resident(request, token_ids, now_ns)
        self._active.forget_kv(request)
        return True

    def release_kv(self, request: Request) -> None:
        """Free the KV of a request that is over; do nothing if it has none."""
        assert request.is_over, "only an ended request releases its KV"
        self.slots.release_kv(request)
        self._active.forget_kv(request)
        self.feed.on_leave(request.number)

    def truncate(self, request: Request, ranges: Sequence[Range]) -> None:
        """Cut the context of a request that overflowed.

        The request is admitted once its resident is compacted.

        Args:
            request: the request, which waits.
            ranges: the ranges of tokens to drop: merged, not empty, and without its last token.
        """
        assert ranges, "a context that stays as it is would overflow for ever"
        request.discard(ranges)
        self.queue.on_history_change(request)

    # ---------------------------------------------------------------------------------- plan

    def schedule(self, now_ns: int, drafts: Drafts = NO_DRAFTS) -> StepPlan:
        """Decide what to do next, and record it as done; call it while no step is under way.

        Args:
            now_ns: the time.
            drafts: by request number, tokens that may follow the one that is fed next. They are
                computed together with it as far as there is room.
        """
        expired = self._deadlines.pop_due(now_ns)
        for request in expired:
            self.end(request, RequestEvent.FAIL, now_ns)
        plan = self._planner.plan(now_ns, drafts, tuple(expired), self._deadlines.next_ns())
        for _ in plan.admitted:
            self._starts.record(now_ns)
        if len(self.queue):
            self.estimates.on_wait(now_ns)
        self.feed.interval_s = self.estimates.interval_s(self.queue)
        return plan

    def traffic(self, request: Request, now_ns: int) -> Traffic:
        """Return the engine's other work while a request's history is to be loaded or computed."""
        loading = self._active.in_state(RequestState.LOADING, RequestState.READY)
        return Traffic(
            num_waiting=len(self.queue),
            num_loading=sum(other is not request for other in loading),
            num_places=self.limits.max_loading,
            starts_per_s=self._starts.per_s(now_ns),
            backlog_s=sum(map(self._prompt_s, self._active.in_state(RequestState.RUNNING))),
        )

    def _prompt_s(self, request: Request) -> float:
        """Estimate the seconds that the uncomputed part of a prompt adds to steps; 0 if unknown."""
        if request.is_decoding:
            return 0.0
        start, end = request.computed_tokens, len(request.token_ids)
        return self._rates.steps.added_seconds(end - start, pairs(start, end)) or 0.0

    def _remove_active(self, request: Request) -> None:
        self._active.remove(request)
        self.gate.forget(request)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        limits, num_active = self.limits, len(self._active)
        self.slots.check()
        self.write_slots.check()
        self.queue.check()
        assert self.num_running <= limits.max_running
        assert num_active - self.num_running <= limits.max_loading
        most_admitted = limits.max_running + limits.max_loading
        assert len(self.queue) + num_active <= limits.max_waiting + most_admitted
        assert all(request.state is RequestState.WAITING for request in self.queue)
        self._active.check()
        rooms = {r.number: self.held_slots.tokens_in(self.slots.kv_slots(r)) for r in self._active}
        assert all(r.capacity_tokens <= rooms[r.number] for r in self._active)


def _held_slots(limits: SchedulerLimits) -> HeldSlots:
    if limits.page_tokens is None:
        return ContiguousSlots(limits.kv_slots, limits.held_rows)
    num_pages, rest = divmod(limits.kv_slots, limits.page_tokens)
    assert not rest, "there are whole pages"
    return PagedSlots(num_pages, limits.page_tokens, limits.page_groups)
