"""The scheduler: order, budget, batches; and a state machine that checks its invariants."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.core.errors import QueueFullError
from inference_svc.core.request import TRANSITIONS, Request, RequestState
from inference_svc.core.scheduler import Scheduler, SchedulerLimits

LIMITS = SchedulerLimits(max_running=2, max_loading=2, max_waiting=4, kv_tokens=100, step_tokens=16)


def request(number, prompt_tokens=10, max_tokens=4):
    return Request(number, list(range(prompt_tokens)), max_tokens, arrived_ns=0)


def admit_and_load(scheduler, loaded_tokens=0):
    for admitted in scheduler.admit(1):
        scheduler.loaded(admitted, loaded_tokens, 2)


def step(scheduler, token_id=7):
    chunks = scheduler.schedule(3)
    scheduler.apply(chunks, {c.request.number: token_id for c in chunks if c.sample}, 4)
    return chunks


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end():
    """A prompt longer than a step takes several, and only the last one samples."""
    scheduler = Scheduler(LIMITS)
    prompt = request(1, prompt_tokens=40)
    scheduler.submit(prompt)
    admit_and_load(scheduler)
    assert [[c.num_tokens for c in step(scheduler)] for _ in range(4)] == [[16], [16], [8], [1]]
    assert prompt.token_ids[40:] == [7, 7]


def test_loaded_history_is_not_computed():
    """Only what was not loaded is fed."""
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1, prompt_tokens=10))
    admit_and_load(scheduler, loaded_tokens=9)
    assert [chunk.num_tokens for chunk in step(scheduler)] == [1]


def test_decodes_are_in_every_step_beside_prompt_chunks():
    """A long prompt that arrives does not hold up an answer that is under way."""
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request(1))
    admit_and_load(scheduler)
    step(scheduler)
    scheduler.submit(request(2, prompt_tokens=50))
    admit_and_load(scheduler)
    chunks = step(scheduler)
    assert [(chunk.request.number, chunk.num_tokens) for chunk in chunks] == [(1, 1), (2, 16)]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    """A request that does not fit the budget holds back those behind it."""
    scheduler = Scheduler(LIMITS)
    for number, size in ((1, 60), (2, 60), (3, 5)):
        scheduler.submit(request(number, prompt_tokens=size))
    assert [r.number for r in scheduler.admit(1)] == [1]
    assert [r.number for r in scheduler.waiting()] == [2, 3]


def test_budget_returns_only_with_release():
    """A finished request keeps its budget until its slab is given up."""
    scheduler = Scheduler(LIMITS)
    first = request(1, prompt_tokens=60)
    scheduler.submit(first)
    scheduler.submit(request(2, prompt_tokens=60))
    admit_and_load(scheduler)
    scheduler.schedule(3)
    scheduler.finish(first, 4)
    assert scheduler.admit(5) == []
    scheduler.release(first)
    assert [r.number for r in scheduler.admit(6)] == [2]


def test_a_full_queue_refuses():
    """The waiting queue is bounded."""
    scheduler = Scheduler(LIMITS)
    for number in range(4):
        scheduler.submit(request(number))
    with pytest.raises(QueueFullError, match="4 turns wait"):
        scheduler.submit(request(5))


@pytest.mark.parametrize("state", list(RequestState))
def test_states_move_along_the_table_only(state):
    """Every transition that is not in the table is a broken invariant."""
    for target in RequestState:
        moved = request(1)
        moved.state = state
        if target in TRANSITIONS[state]:
            moved.move(target)
            assert moved.state is target
        else:
            with pytest.raises(AssertionError):
                moved.move(target)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of events keeps the invariants, and what is served is served in order."""

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(LIMITS)
        self.requests = []
        self.loading = []
        self.admitted_numbers = []
        self.now_ns = 0

    def tick(self):
        self.now_ns += 1
        return self.now_ns

    def in_state(self, *states):
        return [r for r in self.requests if r.state in states]

    @rule(prompt_tokens=st.integers(1, 60), max_tokens=st.integers(1, 40))
    def submit(self, prompt_tokens, max_tokens):
        new = request(len(self.requests), prompt_tokens, max_tokens)
        try:
            self.scheduler.submit(new)
        except QueueFullError:
            assert self.scheduler.num_waiting == LIMITS.max_waiting
        else:
            self.requests.append(new)

    @rule()
    def admit(self):
        admitted = self.scheduler.admit(self.tick())
        self.loading += admitted
        self.admitted_numbers += [r.number for r in admitted]
        assert self.admitted_numbers == sorted(self.admitted_numbers)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data):
        loaded = data.draw(st.sampled_from(self.loading))
        self.loading.remove(loaded)
        if loaded.state is RequestState.LOADING:
            num_tokens = data.draw(st.integers(0, loaded.prompt_tokens - 1))
            self.scheduler.loaded(loaded, num_tokens, self.tick())
        else:
            self.scheduler.release(loaded)

    @rule(fails=st.booleans())
    def step(self, fails):
        chunks = self.scheduler.schedule(self.tick())
        decoding = [r for r in self.in_state(RequestState.RUNNING) if r.is_decoding]
        assert {r.number for r in decoding} <= {c.request.number for c in chunks}
        prompt_tokens = sum(c.num_tokens for c in chunks if not c.request.is_decoding)
        assert prompt_tokens <= LIMITS.step_tokens
        assert all(1 <= c.num_tokens <= c.request.uncomputed_tokens for c in chunks)
        if fails:
            for chunk in chunks:
                self.scheduler.stop(chunk.request, RequestState.FAILED, self.tick())
                self.scheduler.release(chunk.request)
            return
        sampling = [c.request for c in chunks if c.sample]
        self.scheduler.apply(chunks, {r.number: 1 for r in sampling}, self.tick())
        for sampled in sampling:
            assert sampled.computed_tokens <= sampled.capacity_tokens
            if len(sampled.output_ids) == sampled.max_tokens:
                self.scheduler.finish(sampled, self.tick())

    @precondition(lambda self: self.in_state(RequestState.FINISHED))
    @rule()
    def release(self):
        for finished in self.in_state(RequestState.FINISHED):
            self.scheduler.release(finished)

    @precondition(lambda self: any(TRANSITIONS[r.state] for r in self.requests))
    @rule(data=st.data())
    def cancel(self, data):
        alive = [r for r in self.requests if TRANSITIONS[r.state]]
        cancelled = data.draw(st.sampled_from(alive))
        is_loading = cancelled.state is RequestState.LOADING
        self.scheduler.stop(cancelled, RequestState.CANCELLED, self.tick())
        if not is_loading:
            self.scheduler.release(cancelled)

    @invariant()
    def holds(self):
        self.scheduler.check()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
