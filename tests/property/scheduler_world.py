"""The engine around a scheduler, in memory: KV rows are tokens, and tests end the copies.

The KV of a token is represented by the token itself, or by VOID if it came from a failed
load. Each computation must find the rows of exactly its sequence's tokens, and memory in use never
exceeds the scheduler's limit. For layers with a window this holds for the tokens that they attend
to: rows before these may be EMPTY, if they come from a store, or given back. Where slots are pages,
    all sequences share one memory of them, and each sequence must find its rows there whatever
        others write: loads write until they end.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from inference_svc.core.errors import QueueFullError
from inference_svc.core.ranges import Range, merge_ranges, without
from inference_svc.core.rates.rates import Rates
from inference_svc.core.scheduling.request import Request, RequestEvent, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import (
    Admission,
    Growth,
    SchedulerLimits,
    StepPlan,
    StepResult,
)
from inference_svc.core.scheduling.write_slots import STALL_LIMIT_NS
from shared.types.queue_delta import Rank
from shared.types.session_key import SessionKey

ADMITTED = (RequestState.LOADING, RequestState.READY, RequestState.RUNNING)
NUM_LAYERS = 4
VOID = -1
EMPTY = -2
MS = 1_000_000
FIRST_ARRIVING = 10_000  # numbers of turns that arrived and are not submitted yet
KEYS = tuple(SessionKey(tenant, "0f", str(i)) for tenant in ("a", "b") for i in range(4))


@dataclass(eq=False)
class SequenceKv:
    """The rows of a sequence, and whether the scheduler counts more of them than there are.

    Attributes: windowed: the same for layers with a window. pages: their places, if slots are
    pages. base: the number of tokens at which a stored block begins.
    """

    capacity: int
    rows: list[int] = field(default_factory=list)
    windowed: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    base: int = 0


@dataclass(eq=False)
class Turn:
    """A request with its memory.

    Attributes:
        admission: its newest one; None once its load is announced.
        layers: how many its load has brought; None: no load is active.
        fails: whether its load will fail.
        source: the sequence from which its first rows are copied …
        num_copied: … so many …
        copied_from: … of layers with a window from this one on.
        writes: slots of the write ring in its write buffers, oldest first.
        is_writing: whether it still writes to the last of them.
        is_rigid: whether no token of its context may be dropped.
        held: its pages, while it loads.
    """

    request: Request
    admission: Admission | None = None
    kv: SequenceKv | None = None
    layers: int | None = None
    fails: bool = False
    source: SequenceKv | None = None
    num_copied: int = 0
    copied_from: int = 0
    writes: list[list[int]] = field(default_factory=list)
    is_writing: bool = False
    is_rigid: bool = False
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def is_complete(self) -> bool:
        """Return whether its answer has ended, or ends with the next token."""
        is_long = self.request.num_sampled == self.request.max_tokens
        return is_long or (self.is_rigid and self.request.is_overflowing)

    @property
    def num_saving(self) -> int:
        """Return the number of write buffers that are complete."""
        return len(self.writes) - self.is_writing


def some_ranges(num_tokens: int, how: int) -> tuple[Range, ...]:
    """Return some ranges: the first half, every third token, all, or the last."""
    chosen = (
        [(0, max(1, num_tokens // 2))],
        [(first, first + 1) for first in range(0, num_tokens, 3)],
        [(0, num_tokens)],
        [(num_tokens - 1, num_tokens)],
    )[how % 4]
    return merge_ranges(chosen, num_tokens)


DRAFTED = 2_000_000  # the id of a draft's first token


class SchedulerWorld:
    """See the module docstring."""

    def __init__(self, limits: SchedulerLimits, window_share: float = 1.0) -> None:
        self.limits = limits
        self.rates = Rates()
        self.scheduler = Scheduler(limits, self.rates, NUM_LAYERS, {"b": 2.0})
        most_tokens = self.scheduler.held_slots.tokens_in(limits.kv_slots)
        self.window_tokens = max(1, int(most_tokens * window_share))
        self.now_ns = 1
        self.turns: dict[int, Turn] = {}  # every turn that was ever submitted
        self.arriving: dict[int, tuple[SessionKey, Rank]] = {}  # by number
        self.num_arrived = 0
        self.residents: dict[SessionKey, SequenceKv] = {}
        self.leaving: dict[SessionKey, SequenceKv] = {}  # evicted by the plan being carried out
        # Active compactions, and whether there was room for each.
        self.shifts: dict[SessionKey, tuple[Turn | None, tuple[Range, ...], bool]] = {}
        self.conversations: dict[SessionKey, list[int]] = {key: [] for key in KEYS}
        self.late: list[tuple[SequenceKv, ExitStack]] = []  # what failed loads write to
        self.forked: set[SessionKey] = set()  # nothing of them is stored yet
        self.num_sampled = 0
        self.num_copied_pages = 0  # because others share them, before a discard …
        self.num_replaced_pages = 0  # … and before something else is computed behind them
        self.num_shared_running = 0  # prefixes of turns that had not ended
        self.num_moved_windows = 0
        self.num_moved_pages = 0  # because others share them, before a window's next tokens
        self.num_held_up = 0  # turns that waited for a copy before their window moved
        self.memory: dict[tuple[int, int], int] = {}  # by page and slot

    # -------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Check the scheduler's invariants, and that it accounts for all memory in use."""
        self.scheduler.check()
        kvs = [turn.kv.capacity for turn in self.turns.values() if turn.kv is not None]
        kvs += [kv.capacity for kv in self.residents.values()]
        in_use = sum(map(self.scheduler.held_slots.needed_for, kvs))
        taken = [slot for turn in self.turns.values() for slots in turn.writes for slot in slots]
        assert len(taken) == len(set(taken)), "a slot of the ring is in two buffers"
        assert len(taken) + self.scheduler.write_slots.num_free == self.limits.write_slots
        assert in_use <= self.scheduler.slots.reserved_slots + self.scheduler.residents.num_slots
        assert len(self.scheduler.residents) == len(self.residents)
        resident_token_slots = sum(
            self.scheduler.held_slots.needed_for(kv.capacity) for kv in self.residents.values()
        )
        assert self.scheduler.residents.num_slots == resident_token_slots
        for kv in [*self.residents.values(), *(turn.kv for turn in self.turns.values() if turn.kv)]:
            if kv.pages:
                self._check_pages(kv)
        self.scheduler.feed.check()
        assert sorted(self.scheduler.feed._requests) == sorted(number for number, _ in self.queue())

    # --------------------------------------------------------------------------------- memory

    def _places(self, kv: SequenceKv) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, by group of layers, the contents and places by token."""
        groups, size = self.limits.page_groups, self.limits.page_tokens
        return [
            (
                kv.rows if group < groups.num_full else kv.windowed,
                [(page, slot) for page in table for slot in range(size)],
            )
            for group, table in enumerate(groups.tables(kv.pages))
        ]

    def _check_pages(self, kv: SequenceKv) -> None:
        for rows, places in self._places(kv):
            found = [self.memory.get(place) for place, _ in zip(places, rows, strict=False)]
            pairs = zip(found, rows, strict=True)
            assert all(row in (one, EMPTY) for one, row in pairs), "somebody has written there"
        assert EMPTY not in kv.rows

    def _write(self, kv: SequenceKv | None, first: int = 0) -> None:
        """Write the rows from the first on to memory."""
        if kv is None or not kv.pages:
            return
        for rows, places in self._places(kv):
            for index in range(first, len(rows)):
                if rows[index] != EMPTY:
                    self.memory[places[index]] = rows[index]

    def _become_resident(self, key: SessionKey, kv: SequenceKv) -> None:
        """Follow the scheduler, which has made a turn's sequence a resident."""
        assert key not in self.residents
        self.residents[key] = kv
        self._follow(key)
        blocks = (len(kv.rows) - kv.base) // self.limits.block_tokens
        self.scheduler.residents.note_boundary(key, kv.base + blocks * self.limits.block_tokens)

    def _follow(self, key: SessionKey) -> None:
        """Follow a resident, which may have other pages, or be evicted by the same plan."""
        kv, resident = self.residents[key], self.scheduler.residents.get(key)
        if resident is not None:
            kv.capacity = self.scheduler.held_slots.tokens_in(resident.holding.num_slots)
            kv.pages = list(resident.holding.pages)

    def _own(self, key: SessionKey, ranges: tuple[Range, ...]) -> bool:
        """Make the pages that a resident will overwrite its own; return whether there was room."""
        copies = self.scheduler.residents.make_private(key, ranges[0][0])
        self.num_copied_pages += len(copies or ())
        for copy in copies or ():
            for slot in range(self.limits.page_tokens):
                if (copy.source, slot) in self.memory:
                    self.memory[copy.target, slot] = self.memory[copy.source, slot]
        self._follow(key)
        return copies is not None

    def queue(self) -> list[tuple[int, Rank | None]]:
        """Return the queue that kvd should have: running turns, then waiting ones with ranks.

        A turn runs from its admission until its KV is given up, unless it waits again.
        """
        running = [
            turn.request.number
            for turn in self.turns.values()
            if turn.request.state in ADMITTED or (turn.request.is_over and turn.layers is not None)
        ]
        waiting = [
            (request.number, (-request.priority, request.start_tag, request.number))
            for request in list(self.scheduler.queue)
        ]
        assert [rank for _, rank in waiting] == sorted(rank for _, rank in waiting)
        waiting += [(number, rank) for number, (_, rank) in self.arriving.items()]
        waiting.sort(key=lambda one: one[1])
        return [(number, None) for number in sorted(running)] + waiting

    def alive(self) -> list[Turn]:
        """Return the turns that have not ended."""
        return [turn for turn in self.turns.values() if not turn.request.is_over]

    def in_state(self, *states: RequestState) -> list[Turn]:
        """Return the turns in one of these states."""
        return [turn for turn in self.turns.values() if turn.request.state in states]

    def tick(self, ns: int = MS) -> int:
        """Advance the time."""
        self.now_ns += ns
        return self.now_ns

    # ---------------------------------------------------------------------------------- turns

    def fork(self, key: SessionKey, other: SessionKey, num_tokens: int) -> None:
        """Begin a new session as a copy of another session of its tenant, or of its turn."""
        if key.tenant == other.tenant and not self.conversations[key]:
            prompts = [t.request.token_ids for t in self.alive() if t.request.key == other]
            self.conversations[key] = (prompts or [self.conversations[other]])[-1][:num_tokens]
            self.forked.add(key)

    def arrive(self, key, priority=0) -> int:
        """Announce a turn before its prompt is encoded; return its number for the next calls."""
        number = FIRST_ARRIVING + self.num_arrived
        self.num_arrived += 1
        queue = self.scheduler.queue
        self.arriving[number] = key, (-priority, queue._next_tag(key.tenant), number)
        queue.report_arrival(number, key, priority, len(self.conversations[key]))
        assert queue.is_arriving(key)
        return number

    def withdraw(self, number) -> None:
        """Withdraw a turn that arrived and is over; do nothing if it was submitted."""
        self.arriving.pop(number, None)
        self.scheduler.queue.withdraw(number)

    def submit(
        self, key, new_tokens, max_tokens, *, priority=0, deadline_ns=None, number=None
    ) -> Turn | None:
        """Submit a turn that continues its conversation, as far as that fits. ¶

        `number`: that of a turn that has arrived.
        """
        history, window = self.conversations[key], self.window_tokens
        new_tokens = min(new_tokens, window)
        if len(history) + new_tokens > window:
            del history[: max(len(history) // 2, len(history) + new_tokens - window)]
        number = len(self.turns) if number is None else number
        token_ids = history + [number * 1000 + i for i in range(new_tokens)]
        request = Request(
            number,
            key,
            token_ids,
            max_tokens,
            self.now_ns,
            window_tokens=window,
            history_tokens=0 if key in self.forked else len(history),
            priority=priority,
            deadline_ns=deadline_ns,
        )
        try:
            self.scheduler.submit(request)
        except QueueFullError as error:
            assert len(self.scheduler.queue) >= self.limits.max_waiting
            assert error.retry_after_s > 0  # noqa: PT017
            self.withdraw(number)
            return None
        self.arriving.pop(number, None)
        turn = self.turns[number] = Turn(request, is_rigid=number % 5 == 0)
        return turn

    def schedule(self, draft_tokens: int = 0) -> StepPlan:
        """Ask for a plan, with drafts of this length, and carry out all of it but its chunks."""
        running = [turn.request for turn in self.in_state(RequestState.RUNNING)]
        draft = [DRAFTED + place for place in range(draft_tokens)]
        drafts = {request.number: draft for request in running if request.is_decoding}
        plan = self.scheduler.schedule(self.tick(), drafts)
        self._check_plan(plan)
        for request in plan.unsaved:
            self.turns[request.number].is_writing = False
        for chunk in plan.chunks:
            if chunk.request.is_saved:
                slots = self.scheduler.write_slots.take(chunk.num_fed)
                self.turns[chunk.request.number].writes[-1] += slots
        for request in plan.preempted:
            self._preempt(self.turns[request.number])
        for request in plan.overflowed:
            self._overflow(self.turns[request.number])
        self.leaving = {key: self.residents.pop(key) for key in plan.evicted}
        for admission in plan.admitted:
            self._admit(self.turns[admission.request.number], admission)
        for growth in plan.grown:
            self._grow(self.turns[growth.request.number].kv, growth)
        for request in plan.expired:
            assert request.deadline_ns <= self.now_ns
            self._give_up(self.turns[request.number])
        return plan

    def _admit(self, turn: Turn, admission: Admission) -> None:
        turn.admission = admission
        turn.held.enter_context(self.scheduler.slots.hold_pages(turn.request))
        if admission.in_place:
            turn.kv = self.residents.pop(turn.request.key)
            del turn.kv.rows[admission.resident_tokens :]
            del turn.kv.windowed[admission.resident_tokens :]
            pairs = zip(turn.kv.pages, admission.pages, strict=False)
            self.num_replaced_pages += sum(old != new for old, new in pairs)
            self._lie_on(turn.kv, admission.pages)
        elif admission.pages and admission.source is not None:
            is_running = admission.is_running
            kv = self._kv_of(admission)
            turn.kv = SequenceKv(0, base=kv.base)
            turn.kv.rows = turn.request.token_ids[: admission.resident_tokens]
            assert kv.rows[: admission.resident_tokens] == turn.kv.rows
            turn.kv.windowed = kv.windowed[: admission.resident_tokens]
            first = turn.request.window_from
            turn.kv.windowed[:first] = [EMPTY] * first
            self._lie_on(turn.kv, admission.pages)
            if not is_running:
                self.scheduler.residents.end_copy(turn.request)
        elif admission.is_copy:
            turn.source = self._kv_of(admission)
        self.num_shared_running += admission.is_running

    def _kv_of(self, admission: Admission) -> SequenceKv:
        """Return the KV of an admission's source; the same plan may have evicted its pages."""
        running = [t.kv for t in self.in_state(*ADMITTED) if t.request.key == admission.source]
        if admission.is_running and running:
            return running[0]
        residents = self.leaving | self.residents if admission.pages else self.residents
        return residents[admission.source]

    def _grow(self, kv: SequenceKv, growth: Growth) -> None:
        groups = self.limits.page_groups
        pairs = list(enumerate(zip(growth.pages, kv.pages, strict=False)))
        assert len(pairs) == len(kv.pages), "it keeps what it has"
        moved = [at for at, (new, old) in pairs if new != old]
        assert all(map(groups.is_windowed, moved))
        self.num_moved_pages += len(moved)
        self._lie_on(kv, growth.pages)

    def _lie_on(self, kv: SequenceKv, pages: Sequence[int]) -> None:
        if pages:
            kv.pages = list(pages)
            kv.capacity = self.scheduler.held_slots.tokens_in(len(pages) * self.limits.page_tokens)

    def _check_plan(self, plan: StepPlan) -> None:
        deadlines = [turn.request.deadline_ns for turn in self.alive()]
        for deadline_ns in filter(None, deadlines):
            assert deadline_ns > self.now_ns, "what is due has expired"
            assert plan.wake_ns <= deadline_ns
        assert plan.wake_ns is None or plan.wake_ns > self.now_ns
        planned = {chunk.request.number for chunk in plan.chunks}
        assert len(planned) == len(plan.chunks)
        stalled = {request.number for request in plan.stalled}
        running = [turn.request for turn in self.in_state(RequestState.RUNNING)]
        running = [r for r in running if not self._is_held_up(r, planned | stalled)]
        decoding = {r.number for r in running if r.is_decoding and r.unused_slots}
        assert decoding <= planned | stalled
        assert planned | stalled <= {r.number for r in running}
        assert not planned & stalled
        assert all(request.is_saved for request in plan.stalled)
        assert not plan.stalled or plan.wake_ns <= self.now_ns + STALL_LIMIT_NS
        written = sum(c.num_fed for c in plan.chunks if c.request.is_saved)
        assert written <= self.scheduler.write_slots.num_free
        prompt_tokens = [c.num_tokens for c in plan.chunks if c.request.number not in decoding]
        limits = self.limits
        assert sum(prompt_tokens) <= (limits.mixed_step_tokens if decoding else limits.step_tokens)
        assert all(c.request.number in decoding for c in plan.chunks if c.draft)
        assert all(1 <= c.num_tokens <= c.request.uncomputed_tokens for c in plan.chunks)
        assert all(c.sample == (c.num_tokens == c.request.uncomputed_tokens) for c in plan.chunks)
        is_going_on = bool(plan.chunks or plan.stalled)
        assert is_going_on == any(r.unused_slots for r in running), "the batch goes on"

    def _is_held_up(self, request: Request, going_on: set[int]) -> bool:
        """Return whether another turn copies rows that this turn would have to give back."""
        if request.number in going_on or not self.scheduler.residents.is_busy(request.key):
            return False
        is_held_up = self.limits.held_rows is not None and request.unused_slots > 0
        self.num_held_up += is_held_up
        return is_held_up

    def _preempt(self, turn: Turn) -> None:
        request, kv = turn.request, turn.kv
        assert kv is not None
        assert kv.rows == request.token_ids[: len(kv.rows)], "a resident's rows are good"
        assert len(kv.rows) == request.computed_tokens
        self._become_resident(request.key, kv)
        turn.kv, turn.layers, turn.is_writing = None, None, False
        turn.held.close()

    # ------------------------------------------------------------------------------- discards

    def _overflow(self, turn: Turn) -> None:
        """Drop some of a turn's computed tokens; its resident is compacted later."""
        request = turn.request
        assert request.computed_tokens == self.window_tokens
        assert not turn.is_rigid
        ranges = some_ranges(request.computed_tokens, request.num_sampled)
        self._preempt(turn)
        has_room = self._own(request.key, ranges)
        self.shifts[request.key] = (turn, ranges, has_room)
        self.scheduler.truncate(request, ranges)
        assert len(request.token_ids) <= self.window_tokens
        assert request.token_ids

    def discard(self, key: SessionKey, how: int) -> None:
        """Drop tokens between two turns, as a client does."""
        history = self.conversations[key]
        if any(turn.request.key == key for turn in self.alive()) or not history:
            return
        ranges = some_ranges(len(history), how)
        ours = self.scheduler.residents.get(key)
        held = () if ours is None else ours.token_ids
        is_same = list(held) == history[: len(held)]
        if is_same and self.scheduler.residents.begin_compaction(key):
            self.shifts[key] = (None, ranges, self._own(key, ranges))
        else:
            self.drop_resident(key)
        history[:] = without(history, ranges)

    def end_compaction(self, key: SessionKey, *, works: bool) -> None:
        """End a compaction: the remaining rows have moved together, or are lost."""
        turn, ranges, has_room = self.shifts.pop(key)
        kv = self.residents[key]
        assert list(self.scheduler.residents.get(key).token_ids) == kv.rows
        kv.rows[:] = without(kv.rows, ranges)
        kv.windowed[:] = without(kv.windowed, ranges)
        if has_room:
            self._write(kv, ranges[0][0])
        is_wanted = works and has_room and (turn is None or not turn.request.is_over)
        left = kv.rows if is_wanted else ()
        if self.scheduler.residents.end_compaction(key, left, ranges=ranges):
            assert is_wanted
            kv.base = len(kv.rows)
            self._follow(key)
        else:
            del self.residents[key]

    # ---------------------------------------------------------------------------------- loads

    def announce(
        self, turn: Turn, found: int, layers: int, write_back: int, *, fails=False
    ) -> None:
        """Begin the load of an admitted turn; the arguments say how much is found and saved."""
        request, admission = turn.request, turn.admission
        assert admission is not None
        turn.admission = None
        if admission.source is not None:
            found = admission.resident_tokens
            source = turn.source if admission.is_copy else turn.kv
            assert source.rows[:found] == request.token_ids[:found]
            windowed, window_from = source.windowed[:found], request.window_from
            assert admission.source.tenant == request.key.tenant
        found = min(found, len(request.token_ids) - 1)
        if admission.source is not None and not admission.is_copy:
            layers = NUM_LAYERS
            assert turn.kv.capacity >= request.capacity_tokens
        else:
            slots = self.scheduler.held_slots
            turn.kv = SequenceKv(slots.tokens_in(slots.needed_for(request.capacity_tokens)))
            self._lie_on(turn.kv, admission.pages)
            if admission.is_copy:
                turn.num_copied, layers = found, min(layers, NUM_LAYERS - 1)
        if not found:
            layers = NUM_LAYERS
        turn.kv.rows = request.token_ids[:found]
        if admission.source is None:
            write_back = min(write_back, self.limits.block_tokens)
            stored = self.limits.attention_window + write_back  # of whole blocks
            window_from = max(0, found - stored) if self.limits.attention_window else 0
            windowed = [EMPTY] * window_from + turn.kv.rows[window_from:]
        turn.kv.windowed = [EMPTY] * min(window_from, found) + windowed[window_from:]
        turn.copied_from = window_from
        turn.layers = None if layers == NUM_LAYERS else layers
        turn.fails = fails and turn.layers is not None and turn.source is None
        if self.limits.write_slots:
            slots = self.scheduler.write_slots
            turn.writes.append(slots.take(min(found, write_back, slots.num_free)))
            turn.is_writing = True
        if turn.fails:
            turn.kv.rows, turn.kv.windowed = [VOID] * found, [VOID] * found
        if admission.source is None:
            self._write(turn.kv)
        if turn.layers is None:
            turn.held.close()
        self.scheduler.announce(
            request,
            found,
            self.now_ns,
            layers_ready=layers,
            is_saved=turn.is_writing,
            tier="dram",
            boundary=turn.kv.base,
            window_from=window_from,
        )

    def admit_in_vain(self, turn: Turn) -> None:
        """Report that an admitted turn's load is not available."""
        turn.admission = turn.kv = turn.source = None
        self.scheduler.restart(turn.request)
        turn.held.close()

    def progress(self, turn: Turn, layers: int) -> None:
        """Let layers of a load arrive; the last may come after the step that waits for it."""
        turn.layers += layers
        self._write(turn.kv)
        if turn.layers >= NUM_LAYERS:
            if not turn.fails:
                turn.held.close()
            self.scheduler.gate.on_progress(turn.request, NUM_LAYERS, self.tick())
            turn.layers = None
            if turn.source is not None:
                self._end_copy(turn)
        else:
            self.scheduler.gate.on_progress(turn.request, turn.layers, self.tick())

    def _end_copy(self, turn: Turn) -> None:
        rows = turn.request.token_ids[: turn.num_copied]
        assert turn.source.rows[: turn.num_copied] == rows, "nobody wrote to what was copied"
        windowed = turn.source.windowed[turn.copied_from : turn.num_copied]
        first = max(turn.copied_from, turn.num_copied - self.limits.attention_window)
        assert EMPTY not in windowed[first - turn.copied_from :], "it was given back under the copy"
        if self.scheduler.residents.end_copy(turn.request):
            assert self.residents.pop(turn.request.key) is turn.source
        turn.source = None

    # ---------------------------------------------------------------------------------- steps

    def step(self, plan: StepPlan, failing=(), most_right: int = 0) -> list[Turn]:
        """Compute a plan's chunks, except those of `failing`; return the turns with a new

        token. ¶ The first `most_right` tokens of each draft are accepted.
        """
        computed, sampled, restarted = [], {}, []
        for chunk in plan.chunks:
            turn = self.turns[chunk.request.number]
            start = chunk.request.computed_tokens
            if turn.request.number not in failing and not turn.fails:
                self._move_window(turn, start + chunk.num_fed)
            if turn.layers is not None:  # the step has waited for the load
                self.progress(turn, NUM_LAYERS)
            if turn.request.number in failing:
                continue
            if turn.fails:
                restarted.append(turn)
                continue
            assert turn.kv.rows[:start] == chunk.request.token_ids[:start]
            first = max(0, start - self.limits.attention_window)
            assert turn.kv.windowed[first:start] == chunk.request.token_ids[first:start]
            new = [*chunk.request.token_ids[start : start + chunk.num_tokens], *chunk.draft]
            for rows in (turn.kv.rows, turn.kv.windowed):
                del rows[start:]
                rows.extend(new)
            self._write(turn.kv, start)
            assert len(turn.kv.rows) <= turn.kv.capacity
            computed.append(chunk)
            if chunk.sample:
                self.num_sampled += 1
                right = chunk.draft[:most_right]
                sampled[chunk.request.number] = [*right, 1_000_000 + self.num_sampled]
                self._retract(turn, len(chunk.draft) - len(right))
        self.scheduler.apply(StepResult(computed, sampled), self.tick())
        for turn in restarted:
            self.late.append((turn.kv, turn.held))
            turn.held = ExitStack()
            turn.kv, turn.fails, turn.is_writing = None, False, False
            self.scheduler.restart(turn.request)
        for number in failing:
            self.stop(self.turns[number], RequestEvent.FAIL)
        return [self.turns[number] for number in sampled]

    def _move_window(self, turn: Turn, end: int) -> None:
        """Free the rows behind the window in layers with one; then the new tokens have rows."""
        first, rows = turn.request.window_from, self.limits.held_rows
        before = turn.kv.windowed[:first]
        if set(before) - {EMPTY}:
            assert rows is not None, "nothing is given back"
            assert all(other.source is not turn.kv for other in self.turns.values())
            assert turn.layers is None, "what is being loaded does not move"
            self.num_moved_windows += 1
        turn.kv.windowed[:first] = [EMPTY] * first
        assert rows is None or end - first <= rows.num_rows

    def _retract(self, turn: Turn, num_tokens: int) -> None:
        """Remove the last computed tokens, whose draft was rejected."""
        if num_tokens:
            del turn.kv.rows[-num_tokens:], turn.kv.windowed[-num_tokens:]
            if turn.request.is_saved:
                self.scheduler.write_slots.release(turn.writes[-1][-num_tokens:])
                del turn.writes[-1][-num_tokens:]

    def end_late(self) -> None:
        """Let a failed load write for the last time: to slots that no other sequence may have."""
        kv, held = self.late.pop(0)
        self._write(kv)
        held.close()

    def finish(self, turn: Turn, *, keeps: bool) -> None:
        """Complete a turn's answer."""
        request, kv = turn.request, turn.kv
        assert request.num_sampled <= request.max_tokens
        self.scheduler.end(request, RequestEvent.FINISH, self.tick())
        token_ids = request.token_ids[: request.computed_tokens]
        if keeps and self.scheduler.keep_resident(request, token_ids, self.now_ns):
            self._become_resident(request.key, kv)
            turn.kv = None
        if keeps:
            self.conversations[request.key] = list(request.token_ids)
            self.forked.discard(request.key)
        self._give_up(turn)

    def stop(self, turn: Turn, event: RequestEvent) -> None:
        """Cancel or fail a turn; its active copies continue."""
        self.scheduler.end(turn.request, event, self.tick())
        self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        """Release the KV of a turn that has ended, unless a copy to it is active."""
        turn.is_writing = False
        if turn.layers is not None:
            return  # `settle` releases it later
        turn.admission = turn.kv = turn.source = None
        self.scheduler.release_kv(turn.request)
        turn.held.close()

    def settle(self, turn: Turn, *, copies: bool) -> None:
        """End the copy of a turn that has ended; the scheduler is notified or not."""
        turn.layers = None
        self._write(turn.kv)
        if turn.source is not None and copies:
            self._end_copy(turn)
        turn.source = None
        self._give_up(turn)

    def end_save(self, turn: Turn) -> None:
        """End the store of a write buffer."""
        assert turn.num_saving
        self.scheduler.write_slots.release(turn.writes.pop(0))

    def store(self, turn: Turn, num_tokens: int) -> None:
        """Store the oldest tokens of a turn's write buffer."""
        assert turn.is_writing
        written = turn.writes[-1]
        self.scheduler.write_slots.release(written[:num_tokens])
        del written[:num_tokens]

    def drop_resident(self, key: SessionKey) -> None:
        """Delete a session with its resident."""
        if self.scheduler.residents.drop(key):
            del self.residents[key]

    # ---------------------------------------------------------------------------------- ends

    def drain(self) -> None:
        """Let everything that can happen happen: all requests end, in a bounded number of steps."""
        most_steps = 50 + 40 * sum(
            turn.request.uncomputed_tokens + turn.request.max_tokens - turn.request.num_sampled
            for turn in self.alive()
        )
        for _ in range(most_steps):
            if not self.alive():
                break
            self.let_everything_happen()
        assert not self.alive(), "a request starves"
        self.let_everything_happen()
        assert self.scheduler.slots.reserved_slots == 0, "rows are lost"
        assert self.scheduler.write_slots.num_free == self.limits.write_slots
        for key in list(self.residents):
            self.drop_resident(key)
        assert self.scheduler.residents.num_slots == 0
        assert self.scheduler.held_slots.free_slots == self.limits.kv_slots
        self.check()

    def let_everything_happen(self) -> None:
        """End all copies, and make a step."""
        for key in list(self.shifts):
            self.end_compaction(key, works=True)
        while self.late:
            self.end_late()
        for turn in self.turns.values():
            self._let_arrive(turn)
        for turn in self.step(self.schedule()):
            if turn.is_complete:
                self.finish(turn, keeps=True)
        self.check()

    def _let_arrive(self, turn: Turn) -> None:
        """Let every block that is stored or loaded for a turn arrive."""
        if turn.request.is_over and turn.layers is not None:
            self.settle(turn, copies=True)
        while turn.num_saving:
            self.end_save(turn)
        if turn.is_writing:
            self.store(turn, self.limits.write_slots)
        if turn.admission is not None:
            self.announce(turn, 0, 0 if turn.admission.is_copy else NUM_LAYERS, 0)
        if turn.layers is not None:
            self.progress(turn, NUM_LAYERS)
