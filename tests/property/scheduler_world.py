"""The engine around a scheduler, in memory: KV whose rows are tokens, copies that end when told.

A sequence's KV's row is the token it was computed from, VOID if it came of a load that has failed.
Whoever computes on a sequence's KV must find the rows of exactly its own tokens, and memory in use
never exceeds what the scheduler was given.
"""

from dataclasses import dataclass, field

from inference_svc.core.discards import Range, merge_ranges, without
from inference_svc.core.errors import QueueFullError
from inference_svc.core.rates.rates import Rates
from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import Admission, SchedulerLimits, StepPlan, StepResult
from shared.types.queue_digest import Rank
from shared.types.session_key import SessionKey

ADMITTED = (RequestState.LOADING, RequestState.READY, RequestState.RUNNING)
NUM_LAYERS = 4
VOID = -1
MS = 1_000_000
KEYS = tuple(SessionKey(tenant, "0f", str(i)) for tenant in ("a", "b") for i in range(4))


@dataclass(eq=False)
class SequenceKv:
    """Rows, and whether the scheduler counts more of them than are here."""

    capacity: int
    rows: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A request with its memory.

    Attributes:
        admission: its newest; None once it was announced.
        layers: of its load that are there; None: no load is under way.
        fails: its load will turn out to have failed.
        source: it moves its rows from there.
        writes: rows of its write buffers, oldest first.
        is_writing: the last of them is its own.
        is_rigid: nothing of its context may be dropped.
    """

    request: Request
    admission: Admission | None = None
    kv: SequenceKv | None = None
    layers: int | None = None
    fails: bool = False
    source: SequenceKv | None = None
    writes: list[int] = field(default_factory=list)
    is_writing: bool = False
    is_rigid: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether its answer has ended, at the latest now."""
        is_long = self.request.num_sampled == self.request.max_tokens
        return is_long or (self.is_rigid and self.request.is_overflowing)

    @property
    def num_saving(self) -> int:
        """Write buffers that nobody writes to any more."""
        return len(self.writes) - self.is_writing


def some_ranges(num_tokens: int, how: int) -> tuple[Range, ...]:
    """Some of them: the first half, every third, all, or the last."""
    chosen = (
        [(0, max(1, num_tokens // 2))],
        [(first, first + 1) for first in range(0, num_tokens, 3)],
        [(0, num_tokens)],
        [(num_tokens - 1, num_tokens)],
    )[how % 4]
    return merge_ranges(chosen, num_tokens)


class SchedulerWorld:
    """See the module docstring."""

    def __init__(self, limits: SchedulerLimits, window_share: float = 1.0) -> None:
        self.limits = limits
        most = limits.kv_rows // (2 if limits.saves else 1)
        self.window_tokens = max(1, int(most * window_share))
        self.rates = Rates()
        self.scheduler = Scheduler(limits, self.rates, NUM_LAYERS, {"b": 2.0})
        self.now_ns = 1
        self.jobs: dict[int, Job] = {}  # every one ever submitted
        self.residents: dict[SessionKey, SequenceKv] = {}
        self.shifts: dict[SessionKey, tuple[Job | None, tuple[Range, ...]]] = {}  # under way
        self.conversations: dict[SessionKey, list[int]] = {key: [] for key in KEYS}
        self.num_sampled = 0

    # -------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """The scheduler's invariants, and that its account covers what is in use."""
        self.scheduler.check()
        kvs = [job.kv.capacity for job in self.jobs.values() if job.kv is not None]
        kvs += [kv.capacity for kv in self.residents.values()]
        in_use = sum(kvs) + sum(sum(job.writes) for job in self.jobs.values())
        assert in_use <= self.scheduler.reserved_rows + self.scheduler.resident_rows
        assert self.scheduler.num_resident == len(self.residents)
        resident_rows = sum(kv.capacity for kv in self.residents.values())
        assert self.scheduler.resident_rows == resident_rows
        self.scheduler.feed.check()
        assert sorted(self.scheduler.feed._jobs) == sorted(number for number, _ in self.queue())

    def queue(self) -> list[tuple[int, Rank | None]]:
        """What kvd should know: numbers of jobs that run, then of those that wait with ranks.

        A turn runs from its admission until its KV is given up, unless it waits again.
        """
        running = [
            job.request.number
            for job in self.jobs.values()
            if job.request.state in ADMITTED or (job.request.is_over and job.layers is not None)
        ]
        waiting = [
            (request.number, (-request.priority, request.start_tag, request.number))
            for request in self.scheduler.waiting()
        ]
        return [(number, None) for number in sorted(running)] + waiting

    def alive(self) -> list[Job]:
        """Jobs that are not over."""
        return [job for job in self.jobs.values() if not job.request.is_over]

    def in_state(self, *states: RequestState) -> list[Job]:
        """Jobs in one of these states."""
        return [job for job in self.jobs.values() if job.request.state in states]

    def tick(self, ns: int = MS) -> int:
        """Time passes."""
        self.now_ns += ns
        return self.now_ns

    # ---------------------------------------------------------------------------------- turns

    def submit(self, key, new_tokens, max_tokens, *, priority=0, deadline_ns=None) -> Job | None:
        """Submit a turn that goes on with its conversation, as far as that fits."""
        history, window = self.conversations[key], self.window_tokens
        new_tokens = min(new_tokens, window)
        if len(history) + new_tokens > window:
            del history[: max(len(history) // 2, len(history) + new_tokens - window)]
        number = len(self.jobs)
        token_ids = history + [number * 1000 + i for i in range(new_tokens)]
        request = Request(
            number,
            key,
            token_ids,
            max_tokens,
            self.now_ns,
            window_tokens=window,
            history_tokens=len(history),
            priority=priority,
            deadline_ns=deadline_ns,
        )
        try:
            self.scheduler.submit(request)
        except QueueFullError as error:
            assert self.scheduler.num_waiting >= self.limits.max_waiting
            assert error.retry_after_s > 0  # noqa: PT017
            return None
        job = self.jobs[number] = Job(request, is_rigid=number % 5 == 0)
        return job

    def schedule(self) -> StepPlan:
        """Ask for a plan, and carry out all but its chunks."""
        plan = self.scheduler.schedule(self.tick())
        self._check_plan(plan)
        for request in plan.preempted:
            self._preempt(self.jobs[request.number])
        for request in plan.overflowed:
            self._overflow(self.jobs[request.number])
        for key in plan.evicted:
            del self.residents[key]
        for admission in plan.admitted:
            job = self.jobs[admission.request.number]
            job.admission = admission
            if admission.in_place:
                job.kv = self.residents.pop(job.request.key)
        for request in plan.expired:
            assert request.deadline_ns <= self.now_ns
            self._give_up(self.jobs[request.number])
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        deadlines = [job.request.deadline_ns for job in self.alive()]
        for deadline_ns in filter(None, deadlines):
            assert deadline_ns > self.now_ns, "what is due has expired"
            assert plan.wake_ns <= deadline_ns
        assert plan.wake_ns is None or plan.wake_ns > self.now_ns
        planned = {chunk.request.number for chunk in plan.chunks}
        assert len(planned) == len(plan.chunks)
        running = [job.request for job in self.in_state(RequestState.RUNNING)]
        decoding = {r.number for r in running if r.is_decoding and r.unused_rows}
        assert decoding <= planned <= {r.number for r in running}
        prompt_tokens = [c.num_tokens for c in plan.chunks if c.request.number not in decoding]
        limits = self.limits
        assert sum(prompt_tokens) <= (limits.mixed_step_tokens if decoding else limits.step_tokens)
        assert all(1 <= c.num_tokens <= c.request.uncomputed_tokens for c in plan.chunks)
        assert all(c.sample == (c.num_tokens == c.request.uncomputed_tokens) for c in plan.chunks)
        assert bool(plan.chunks) == any(r.unused_rows for r in running), "the batch goes on"

    def _preempt(self, job: Job) -> None:
        request, kv = job.request, job.kv
        assert kv is not None
        assert kv.rows == request.token_ids[: len(kv.rows)], "a resident's rows are good"
        assert len(kv.rows) == request.computed_tokens
        assert request.key not in self.residents
        self.residents[request.key] = kv
        job.kv, job.layers, job.is_writing = None, None, False

    # ------------------------------------------------------------------------------- discards

    def _overflow(self, job: Job) -> None:
        """Drop some of what it has computed; its resident closes up later."""
        request = job.request
        assert request.computed_tokens == self.window_tokens
        assert not job.is_rigid
        ranges = some_ranges(request.computed_tokens, request.num_sampled)
        self._preempt(job)
        self.shifts[request.key] = (job, ranges)
        self.scheduler.truncated(request, ranges)
        assert len(request.token_ids) <= self.window_tokens
        assert request.token_ids

    def discard(self, key: SessionKey, how: int) -> None:
        """A client drops tokens between two turns."""
        history = self.conversations[key]
        if any(job.request.key == key for job in self.alive()) or not history:
            return
        ranges = some_ranges(len(history), how)
        ours = self.scheduler.residents.get(key)
        held = () if ours is None else ours.token_ids
        is_same = list(held) == history[: len(held)]
        if is_same and self.scheduler.residents.begin_shift(key):
            self.shifts[key] = (None, ranges)
        else:
            self.drop_resident(key)
        history[:] = without(history, ranges)

    def end_shift(self, key: SessionKey, *, works: bool) -> None:
        """The rows that are left have closed up, or are lost."""
        job, ranges = self.shifts.pop(key)
        rows = self.residents[key].rows
        assert list(self.scheduler.residents.get(key).token_ids) == rows
        rows[:] = without(rows, ranges)
        is_wanted = works and (job is None or not job.request.is_over)
        if self.scheduler.residents.end_shift(key, rows if is_wanted else ()):
            assert is_wanted
        else:
            del self.residents[key]

    # ---------------------------------------------------------------------------------- loads

    def announce(self, job: Job, found: int, layers: int, write_back: int, *, fails=False) -> None:
        """Begin the load of an admitted job: what is found, and how much is saved of that."""
        request, admission = job.request, job.admission
        assert admission is not None
        job.admission = None
        if admission.resident_tokens:
            found = admission.resident_tokens
            source = job.kv if admission.in_place else self.residents[request.key]
            assert source.rows[:found] == request.token_ids[:found]
        found = min(found, len(request.token_ids) - 1)
        if admission.in_place:
            layers = NUM_LAYERS
            assert job.kv.capacity >= request.capacity_tokens
        else:
            job.kv = SequenceKv(request.capacity_tokens)
            if admission.resident_tokens:
                job.source, layers = source, min(layers, NUM_LAYERS - 1)
        if not found:
            layers = NUM_LAYERS
        job.kv.rows = request.token_ids[:found]
        job.layers = None if layers == NUM_LAYERS else layers
        job.fails = fails and job.layers is not None and job.source is None
        first_token = max(0, found - write_back)
        if self.limits.saves:
            job.writes.append(request.capacity_tokens - first_token)
            job.is_writing = True
        if job.fails:
            job.kv.rows = [VOID] * found
        self.scheduler.announced(
            request, found, first_token, self.now_ns, layers_ready=layers, tier="dram"
        )

    def admit_in_vain(self, job: Job) -> None:
        """An admitted job's load cannot be had."""
        job.admission = job.kv = None
        self.scheduler.restart(job.request, self.tick())

    def progress(self, job: Job, layers: int) -> None:
        """Layers of a load arrive; the last may be later than the step that waits for it."""
        job.layers += layers
        if job.layers >= NUM_LAYERS:
            self.scheduler.progressed(job.request, NUM_LAYERS, self.tick())
            job.layers = None
            if job.source is not None:
                self._end_move(job)
        else:
            self.scheduler.progressed(job.request, job.layers, self.tick())

    def _end_move(self, job: Job) -> None:
        assert self.residents.pop(job.request.key) is job.source
        job.source = None
        self.scheduler.resident_moved(job.request)

    # ---------------------------------------------------------------------------------- steps

    def step(self, plan: StepPlan, failing=()) -> list[Job]:
        """Compute a plan's chunks, except those of `failing`; returns who has a new token."""
        computed, sampled, restarted = [], {}, []
        for chunk in plan.chunks:
            job = self.jobs[chunk.request.number]
            start = chunk.request.computed_tokens
            if job.layers is not None:  # the step has waited for it
                self.progress(job, NUM_LAYERS)
            if job.request.number in failing:
                continue
            if job.fails:
                restarted.append(job)
                continue
            assert job.kv.rows[:start] == chunk.request.token_ids[:start]
            del job.kv.rows[start:]
            job.kv.rows += chunk.request.token_ids[start : start + chunk.num_tokens]
            assert len(job.kv.rows) <= job.kv.capacity
            computed.append(chunk)
            if chunk.sample:
                self.num_sampled += 1
                sampled[chunk.request.number] = 1_000_000 + self.num_sampled
        self.scheduler.apply(StepResult(computed, sampled), self.tick())
        for job in restarted:
            job.kv, job.fails, job.is_writing = None, False, False
            self.scheduler.restart(job.request, self.now_ns)
        for number in failing:
            self.stop(self.jobs[number], RequestState.FAILED)
        return [self.jobs[number] for number in sampled]

    def finish(self, job: Job, *, keeps: bool) -> None:
        """A job's answer is complete."""
        request, kv = job.request, job.kv
        assert request.num_sampled <= request.max_tokens
        self.scheduler.finish(request, self.tick())
        token_ids = request.token_ids[: request.computed_tokens]
        if keeps and self.scheduler.keep_resident(request, token_ids, self.now_ns):
            assert request.key not in self.residents
            self.residents[request.key] = kv
            job.kv = None
        if keeps:
            self.conversations[request.key] = list(request.token_ids)
        self._give_up(job)

    def stop(self, job: Job, state: RequestState) -> None:
        """Cancel or fail a job; what is being copied for it goes on."""
        self.scheduler.stop(job.request, state, self.tick())
        self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Release the sequence's KV of a job that is over, unless it is being copied to."""
        job.is_writing = False
        if job.layers is not None:
            return  # `settle` follows
        job.admission = job.kv = None
        self.scheduler.release_kv(job.request)

    def settle(self, job: Job, *, moves: bool) -> None:
        """The copy of a job that is over has ended; a move with or without its old sequence KV."""
        job.layers = None
        if job.source is not None and moves:
            self._end_move(job)
        job.source = None
        self._give_up(job)

    def end_save(self, job: Job) -> None:
        """A write buffer is stored."""
        assert job.num_saving
        job.writes.pop(0)
        self.scheduler.release_write(job.request)

    def drop_resident(self, key: SessionKey) -> None:
        """A session is deleted."""
        if self.scheduler.drop_resident(key):
            del self.residents[key]

    # ---------------------------------------------------------------------------------- ends

    def drain(self) -> None:
        """Everything that can happen does: all requests end, in a bounded number of steps."""
        most_steps = 50 + 40 * sum(
            job.request.uncomputed_tokens + job.request.max_tokens - job.request.num_sampled
            for job in self.alive()
        )
        for _ in range(most_steps):
            if not self.alive():
                break
            self.let_everything_happen()
        assert not self.alive(), "a request starves"
        self.let_everything_happen()
        assert self.scheduler.reserved_rows == 0, "rows are lost"
        for key in list(self.residents):
            self.drop_resident(key)
        assert self.scheduler.resident_rows == 0
        self.check()

    def let_everything_happen(self) -> None:
        """All copies end, and a step is made."""
        for key in list(self.shifts):
            self.end_shift(key, works=True)
        for job in self.jobs.values():
            if job.request.is_over and job.layers is not None:
                self.settle(job, moves=True)
            while job.num_saving:
                self.end_save(job)
            if job.admission is not None:
                self.announce(job, 0, NUM_LAYERS if not job.admission.resident_tokens else 0, 0)
            if job.layers is not None:
                self.progress(job, NUM_LAYERS)
        for job in self.step(self.schedule()):
            if job.is_complete:
                self.finish(job, keeps=True)
        self.check()
