"""The planner of steps: which requests leave the batch, which join it, and which are admitted.

    1. A running request that has outgrown its slots gets another page, if there is one; else it
       returns to its place in the queue. So does a request whose window is full: its resident is
       protected until it is compacted.
    2. Requests that are ready start, higher priorities first, once the start gate lets them. If
       the batch is full, a request of lower priority is preempted.
    3. The head of the queue is admitted while there is room. Residents are evicted for it; if that
       is not enough, requests of lower priority are preempted, if that helps.
    4. Running requests are computed as far as there is room: see `chunk_planner.py`.

Preemption costs little: the computed KV stays as the session's resident while there is room, and
is saved besides. A request is never preempted while a copy to its KV is under way, or while its KV
may still turn out to be void. A plan is made between steps, and the scheduler's state is that after
it. A request gets its slots from its session's resident, or as a sequence KV of its own:

    resident large enough      in place: no slots are needed
    resident too small         copied to a new sequence KV, if old and new fit together …
                                 (pages: in place, with additional pages)
    no resident, but another   … the shared prefix is copied if that pays, also while the other
      session begins alike       session's turn runs: see `shared_prefixes.py` …
                                 (pages: both sessions hold the prefix's pages)
    … these do not fit, do     … a new sequence KV; a resident of the session is evicted
      not help, or are missing

Other residents are evicted for it: no more than needed, and none if it cannot be admitted anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inference_svc.core.attention_window import is_whole
from inference_svc.core.scheduling.chunk_planner import ChunkPlanner
from inference_svc.core.scheduling.held_slots import choose_victims
from inference_svc.core.scheduling.request import (
    ActiveRequests,
    Request,
    RequestEvent,
    RequestState,
)
from inference_svc.core.scheduling.residents import Resident, Residents
from inference_svc.core.scheduling.shared_prefixes import SharedPrefixes
from inference_svc.core.scheduling.slot_budget import SlotBudget
from inference_svc.core.scheduling.start_gate import StartGate
from inference_svc.core.scheduling.step_plan import (
    Admission,
    Drafts,
    Growth,
    SchedulerLimits,
    StepPlan,
    prompt_budget,
)
from inference_svc.core.scheduling.waiting_queue import WaitingQueue
from inference_svc.core.scheduling.write_slots import WriteSlots
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Terms:
    """One way to admit a request.

    Attributes:
        capacity_tokens: number of tokens it may fill with KV.
        kv_slots: slots that must be free: for a new sequence KV, or in addition to the resident's.
        num_tokens: tokens whose KV it takes from the source.
        source: the resident, or the request of a running turn, that has this KV; a resident has to
            stay until then. None: the request begins with nothing.
        in_place: whether the slots of the source become the request's own.
    """

    capacity_tokens: int
    kv_slots: int
    num_tokens: int = 0
    source: Resident | Request | None = None
    in_place: bool = False


@dataclass
class _Sketch:
    """The parts of a plan that is being made at time `now_ns`."""

    now_ns: int
    admitted: list[Admission] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    overflowed: list[Request] = field(default_factory=list)
    evicted: list[SessionKey] = field(default_factory=list)


class Planner:
    """Makes the plan of a step, and updates the scheduler's parts accordingly."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: WaitingQueue,
        active: ActiveRequests,
        slots: SlotBudget,
        residents: Residents,
        gate: StartGate,
        write_slots: WriteSlots,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._active = active
        self._slots = slots
        self._residents = residents
        self._gate = gate
        self._chunks = ChunkPlanner(limits, active, slots, residents, write_slots)
        self._prefixes = SharedPrefixes(limits, active, residents, slots, gate)

    def plan(
        self, now_ns: int, drafts: Drafts, expired: tuple[Request, ...], deadline_ns: int | None
    ) -> StepPlan:
        """Make a plan; see `Scheduler.schedule`, which knows who has expired, and who is next."""
        sketch = _Sketch(now_ns)
        self._grow_or_preempt(sketch)
        wake_ns = self._start_ready(sketch)
        self._admit(sketch)
        if sketch.preempted or sketch.overflowed:  # places in the batch are free again
            wake_ns = self._start_ready(sketch)
        if not self._limits.keeps_residents:
            self._evict_unqueued(sketch)
        computed = self._chunks.plan(now_ns, drafts)
        wakes_ns = [ns for ns in (wake_ns, computed.patience_ns, deadline_ns) if ns is not None]
        return StepPlan(
            computed.chunks,
            tuple(sketch.admitted),
            tuple(sketch.preempted),
            tuple(sketch.overflowed),
            tuple(sketch.evicted),
            grown=self._growths([*sketch.grown, *computed.moved]),
            expired=expired,
            stalled=computed.stalled,
            unsaved=computed.unsaved,
            wake_ns=min(wakes_ns, default=None),
        )

    # ----------------------------------------------------------------------------- the batch

    def _grow_or_preempt(self, sketch: _Sketch) -> None:
        """Give running requests without a slot for their next token more room, or preempt them."""
        for request in self._active.in_state(RequestState.RUNNING):
            if request.has_outgrown_slots and self._grow(request, sketch):
                sketch.grown.append(request)
            elif request.has_outgrown_slots and self._can_preempt(request):
                self._preempt(request, sketch)
            elif request.is_overflowing and self._can_preempt(request):
                self._overflow(request, sketch)

    def _growths(self, grown: Sequence[Request]) -> tuple[Growth, ...]:
        """List requests with changed pages that still run; some may have been preempted since."""
        return tuple(
            Growth(request, self._slots.pages(request))
            for request in dict.fromkeys(grown)
            if request.state is RequestState.RUNNING
        )

    def _grow(self, request: Request, sketch: _Sketch) -> bool:
        """Give a request another page if slots are paged; return False if there is no room."""
        slots = self._slots
        if not slots.is_paged:
            return False
        wanted = slots.account.needed_for(request.capacity_tokens + 1) - slots.kv_slots(request)
        if wanted > slots.tally_room().num_slots:
            return False
        self._make_room(wanted, request, sketch)
        slots.reserve(request, wanted)
        room = slots.account.tokens_in(slots.kv_slots(request))
        request.capacity_tokens = min(room, request.full_capacity_tokens)
        return True

    def _start_ready(self, sketch: _Sketch) -> int | None:
        """Start ready requests; return when (ns) the next one that is held back may start."""
        held_ns = []
        for request in self._active.in_state(RequestState.READY):
            running = self._active.in_state(RequestState.RUNNING)
            chunk_tokens = min(request.uncomputed_tokens, prompt_budget(running, self._limits))
            opens_ns = self._gate.opens_ns(
                request, chunk_tokens, sketch.now_ns, is_idle=not running
            )
            if opens_ns > sketch.now_ns:
                held_ns.append(opens_ns)
            elif self._has_place(request, sketch):
                request.move(RequestEvent.START)
                if not request.started_ns:
                    request.started_ns = sketch.now_ns
                    request.buffer_layers = self._gate.buffer_layers(request)
        return min(held_ns, default=None)

    def _has_place(self, request: Request, sketch: _Sketch) -> bool:
        """Return whether the batch has a place; if not, preempt a request of lower priority."""
        if len(self._active.in_state(RequestState.RUNNING)) < self._limits.max_running:
            return True
        victims = self._victims(request.priority, RequestState.RUNNING)
        if victims:
            self._preempt(victims[0], sketch)
        return bool(victims)

    # ----------------------------------------------------------------------------- admission

    def _admit(self, sketch: _Sketch) -> None:
        """Admit requests from the head of the queue while there is room, or room can be made."""
        while (head := self._queue.head) is not None:
            # A session's earlier request, move or compaction has to end first.
            if self._active.has_session(head.key) or self._residents.is_busy(head.key):
                return
            if not self._resident_tokens(head) and self._prefixes.should_wait(head):
                return
            terms = self._terms_with_room(head) or self._terms_by_preempting(head, sketch)
            if terms is None:
                return
            self._admit_with(head, terms, sketch)

    def _terms_with_room(self, head: Request) -> Terms | None:
        """Return the best terms that need no preemption; None: there are none."""
        if not self._may_load():
            return None
        room = self._slots.tally_room
        return next((t for t in self._terms(head) if t.kv_slots <= room(t.source).num_slots), None)

    def _terms_by_preempting(self, head: Request, sketch: _Sketch) -> Terms | None:
        """Preempt as few requests of lower priority as make room for the head, if any do."""
        found = [(t, victims) for t in self._terms(head) if (victims := self._victims_for(head, t))]
        if not found:
            return None
        terms, victims = min(found, key=lambda pair: len(pair[1]))
        for victim in victims:
            self._preempt(victim, sketch)
        return terms

    def _victims_for(self, head: Request, terms: Terms) -> list[Request]:
        """List the requests to preempt for these terms; empty if that makes not enough room."""
        may_load, room = self._may_load(), self._slots.tally_room(terms.source)
        chosen: list[Request] = []

        def add(request: Request) -> None:
            chosen.append(request)
            room.add(self._slots.holding(request))

        def remove(request: Request) -> None:
            chosen.remove(request)
            room.remove(self._slots.holding(request))

        def is_enough() -> bool:
            has_place = may_load or any(each.state is RequestState.READY for each in chosen)
            return has_place and terms.kv_slots <= room.num_slots

        found = self._victims(head.priority, RequestState.READY, RequestState.RUNNING)
        candidates = [request for request in found if request is not terms.source]
        victims = choose_victims(candidates, add, remove, is_enough)
        return victims if is_enough() else []

    def _may_load(self) -> bool:
        loading = self._active.in_state(RequestState.LOADING, RequestState.READY)
        return len(loading) < self._limits.max_loading

    def _terms(self, request: Request) -> list[Terms]:
        """List the ways to admit a request, best first."""
        slots = self._slots
        capacity = request.capacity_to_admit(self._limits.answer_tokens)
        fresh = Terms(capacity, slots.account.needed_for(capacity))
        resident = self._residents.get(request.key)
        num_tokens = self._resident_tokens(request)
        if resident is not None and num_tokens:
            if slots.is_paged:
                kv_slots = slots.growth_in_place(resident, num_tokens, capacity)
                return [Terms(capacity, kv_slots, num_tokens, resident, in_place=True), fresh]
            room = slots.account.tokens_in(resident.holding.num_slots)
            if room >= capacity:
                usable = min(room, request.full_capacity_tokens)
                return [Terms(usable, 0, num_tokens, resident, in_place=True)]
            return [replace(fresh, num_tokens=num_tokens, source=resident), fresh]
        shared = self._prefixes.best(request)
        if shared is None:
            return [fresh]
        kv_slots = fresh.kv_slots - slots.shared_by(shared.num_tokens)
        return [Terms(capacity, kv_slots, shared.num_tokens, shared.source), fresh]

    def _resident_tokens(self, request: Request) -> int:
        """Count the request's first tokens in its session's resident, if they are worth using.

        0 if these are less than half of the history: after a truncation the store likely has more.
        """
        num_tokens, resident = self._residents.match(request), self._residents.get(request.key)
        if resident is not None and num_tokens and self._slots.is_paged:
            num_tokens = self._slots.tokens_in_place(resident, num_tokens)
            if not is_whole(num_tokens, resident.window_from, self._limits.attention_window):
                return 0
        return num_tokens if 2 * num_tokens >= request.history_tokens else 0

    def _admit_with(self, request: Request, terms: Terms, sketch: _Sketch) -> None:
        """Admit the head of the queue on these terms, evicting residents if necessary."""
        self._queue.admit(request)
        source = terms.source
        is_own = source is not None and source.key == request.key
        if not is_own and request.key in self._residents:
            self._evict(request.key, sketch)
        request.window_from = 0
        if source is not None:
            request.window_from = self._window_from(source.window_from, terms)
        # Shared pages of groups with a window count for each holder, and so take free slots.
        free_slots = self._slots.account.free_slots
        self._claim_source(request, terms)
        claimed = free_slots - self._slots.account.free_slots
        self._make_room(terms.kv_slots - claimed, request, sketch)
        self._reserve_slots(request, terms)
        request.move(RequestEvent.ADMIT)
        request.capacity_tokens = terms.capacity_tokens
        request.admitted_ns = request.admitted_ns or sketch.now_ns
        self._active.add(request)
        sketch.admitted.append(
            Admission(
                request,
                terms.num_tokens,
                None if source is None else source.key,
                in_place=terms.in_place,
                is_running=isinstance(source, Request),
                pages=self._slots.pages(request),
            )
        )

    def _window_from(self, window_from: int, terms: Terms) -> int:
        """Return the first token that layers with a window hold after admission on these terms."""
        if terms.in_place:
            return window_from
        return self._chunks.window_from(window_from, terms.num_tokens)

    def _claim_source(self, request: Request, terms: Terms) -> None:
        """Protect the terms' resident from eviction, and share the pages to be shared."""
        source = terms.source
        if terms.in_place:
            self._slots.take_resident(request)
            return
        if source is not None and self._slots.is_paged:
            self._slots.share(request, source, terms.num_tokens)
        if isinstance(source, Resident) or (source is not None and not self._slots.is_paged):
            self._residents.begin_copy(source.key, request)

    def _reserve_slots(self, request: Request, terms: Terms) -> None:
        """Reserve the slots that the terms need in addition to the source's."""
        slots = self._slots
        if not slots.is_paged:
            if terms.kv_slots:
                slots.reserve(request, terms.kv_slots)
            return
        if terms.in_place:
            slots.write_from(request, terms.num_tokens, terms.capacity_tokens)
        needed = slots.account.needed_for(terms.capacity_tokens)
        slots.reserve(request, needed - slots.kv_slots(request))

    def _make_room(self, num_slots: int, request: Request, sketch: _Sketch) -> None:
        """Evict other sessions' residents until `num_slots` are free, as far as possible."""
        missing = num_slots - self._slots.account.free_slots
        for key in self._residents.victims(missing, self._queue.rank, request.key):
            self._evict(key, sketch)

    # ---------------------------------------------------------------------------- preemption

    def _victims(self, priority: int, *states: RequestState) -> list[Request]:
        """List the requests below a priority that can be preempted: lowest first, newest first."""
        found = [one for one in self._active.in_state(*states) if one.priority < priority]
        return [request for request in reversed(found) if self._can_preempt(request)]

    def _can_preempt(self, request: Request) -> bool:
        residents = self._residents
        is_copied = residents.is_copied_to(request) or residents.is_busy(request.key)
        return self._gate.is_certain(request) and not is_copied

    def _preempt(self, request: Request, sketch: _Sketch) -> None:
        """Return a request to its place in the queue; its KV becomes its session's resident."""
        request.num_preemptions += 1
        self._put_back(request, RequestEvent.PREEMPT, sketch)
        sketch.preempted.append(request)

    def _overflow(self, request: Request, sketch: _Sketch) -> None:
        """Return a request to its place in the queue until its context is cut."""
        request.num_overflows += 1
        self._put_back(request, RequestEvent.OVERFLOW, sketch)
        is_there = self._residents.begin_compaction(request.key)
        assert is_there, "what it has computed is resident now"
        sketch.overflowed.append(request)

    def _put_back(self, request: Request, event: RequestEvent, sketch: _Sketch) -> None:
        request.move(event)
        request.is_saved = False
        token_ids = request.token_ids[: request.computed_tokens]
        self._slots.become_resident(request, token_ids, sketch.now_ns)
        self._active.remove(request)
        self._gate.forget(request)
        self._queue.put_back(request)

    def _evict_unqueued(self, sketch: _Sketch) -> None:
        """For a service without residents: evict all but those of preempted, waiting requests."""
        for key in self._residents.unqueued(self._queue.rank):
            self._evict(key, sketch)

    def _evict(self, key: SessionKey, sketch: _Sketch) -> None:
        self._residents.evict(key)
        sketch.evicted.append(key)
