"""The scheduler: order, rows, batches, preemption. Its invariants: tests/property."""

import sys
from dataclasses import replace

import pytest

from inference_svc.core.errors import QueueFullError
from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request, RequestEvent, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.start_gate import HOLD_LIMIT_NS
from inference_svc.core.scheduling.step_plan import SchedulerLimits, StepResult
from inference_svc.core.scheduling.waiting_queue import UNKNOWN_RETRY_S
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

LIMITS = SchedulerLimits(
    max_running=2,
    max_loading=2,
    max_waiting=4,
    kv_slots=100,
    write_slots=0,
    step_tokens=16,
    mixed_step_tokens=8,
    answer_tokens=100,
    keeps_residents=True,
    block_tokens=1000,  # prompts of different sessions are equal here; tests of sharing turn it on
)
NUM_LAYERS = 4


def make(**limits):
    return Scheduler(replace(LIMITS, **limits), Rates(), NUM_LAYERS)


def request(number, prompt_tokens=10, max_tokens=4, *, session=None, **attributes):
    key = SessionKey("tenant", "0f", str(number if session is None else session))
    return Request(number, key, list(range(prompt_tokens)), max_tokens, 0, **attributes)


def submit(scheduler, *args, **attributes):
    new = request(*args, **attributes)
    scheduler.submit(new)
    return new


def announce(scheduler, plan, found=0):
    """Announce that every admitted request finds this many tokens, or its resident's, at once."""
    for admission in plan.admitted:
        num_tokens = admission.resident_tokens or found
        scheduler.announce(admission.request, num_tokens, 2, layers_ready=NUM_LAYERS)
        if admission.resident_tokens and not admission.in_place:
            scheduler.residents.end_copy(admission.request)


def step(scheduler, now_ns=3, token_id=7):
    """Plan, load at once, plan again, and compute; return both plans."""
    loading = scheduler.schedule(now_ns)
    announce(scheduler, loading)
    plan = scheduler.schedule(now_ns)
    sampled = {chunk.request.number: [token_id] for chunk in plan.chunks if chunk.sample}
    scheduler.apply(StepResult(plan.chunks, sampled), now_ns)
    announce(scheduler, plan)
    scheduler.check()
    return loading, plan


def admitted_numbers(plan):
    return [admission.request.number for admission in plan.admitted]


def sizes(plan):
    return [(chunk.request.number, chunk.num_tokens) for chunk in plan.chunks]


def run(scheduler, number, **attributes):
    """Submit a request and compute until its first token."""
    new = submit(scheduler, number, **attributes)
    while not new.output_ids:
        step(scheduler)
    return new


def run_to_the_end(scheduler, number, **attributes):
    """Run a turn whose KV stays as a resident."""
    one = run(scheduler, number, **attributes)
    while len(one.output_ids) < one.max_tokens:
        step(scheduler)
    scheduler.end(one, RequestEvent.FINISH, 9)
    assert scheduler.keep_resident(one, one.token_ids[: one.computed_tokens], 9)
    scheduler.residents.note_boundary(one.key, 0)
    return one


# ------------------------------------------------------------------------------------- batches


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end():
    """A prompt longer than a step takes several, and only the last one samples."""
    scheduler = make()
    prompt = submit(scheduler, 1, prompt_tokens=40)
    assert [[c.num_tokens for c in step(scheduler)[1].chunks] for _ in range(4)] == [
        [16],
        [16],
        [8],
        [1],
    ]
    assert prompt.output_ids == [7, 7]


def test_loaded_history_is_not_computed():
    """Only missing tokens are fed."""
    scheduler = make()
    one = submit(scheduler, 1, prompt_tokens=10)
    announce(scheduler, scheduler.schedule(1), found=9)
    assert sizes(step(scheduler)[1]) == [(1, 1)]
    assert one.loaded_tokens == 9


def test_decodes_are_in_every_step_beside_smaller_prompt_chunks():
    """A long prompt that arrives does not delay a running answer."""
    scheduler = make()
    run(scheduler, 1)
    submit(scheduler, 2, prompt_tokens=50)
    assert sizes(step(scheduler)[1]) == [(1, 1), (2, 8)]


def test_a_step_without_answers_takes_larger_prompt_chunks():
    """It delays no answer."""
    scheduler = make()
    submit(scheduler, 1, prompt_tokens=10)
    submit(scheduler, 2, prompt_tokens=20)
    assert sizes(step(scheduler)[1]) == [(1, 10), (2, 6)]


def test_requests_cancelled_during_a_step_are_skipped():
    """Their tokens are dropped."""
    scheduler = make()
    one = submit(scheduler, 1)
    announce(scheduler, scheduler.schedule(1))
    plan = scheduler.schedule(2)
    scheduler.end(one, RequestEvent.CANCEL, 3)
    scheduler.apply(StepResult(plan.chunks, {1: [7]}), 4)
    assert one.output_ids == []


def test_an_answer_beyond_its_limit_violates_an_invariant():
    """The engine ends answers; there is no row for more."""
    scheduler = make()
    run(scheduler, 1, max_tokens=1)
    with pytest.raises(AssertionError, match="too long"):
        scheduler.schedule(5)


# ------------------------------------------------------------------------------ order and rows


def test_requests_are_served_in_order_even_if_a_later_one_would_fit():
    """A request that does not fit delays those behind it."""
    scheduler = make()
    for number, size in ((1, 60), (2, 60), (3, 5)):
        submit(scheduler, number, prompt_tokens=size)
    assert admitted_numbers(scheduler.schedule(1)) == [1]
    assert len(scheduler.queue) == 2
    assert [waiting.number for waiting in list(scheduler.queue)] == [2, 3]


def test_rows_are_freed_with_their_release_only():
    """A finished request keeps its rows until its KV is given up."""
    scheduler = make()
    first = run(scheduler, 1, prompt_tokens=60)
    submit(scheduler, 2, prompt_tokens=60)
    scheduler.end(first, RequestEvent.FINISH, 4)
    assert admitted_numbers(scheduler.schedule(5)) == []
    scheduler.release_kv(first)
    assert admitted_numbers(scheduler.schedule(6)) == [2]


def test_only_an_ended_request_gives_up_its_kv():
    """An earlier call is a bug."""
    scheduler = make()
    one = run(scheduler, 1)
    with pytest.raises(AssertionError, match="only an ended request"):
        scheduler.release_kv(one)


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.READY, RequestState.RUNNING])
def test_a_cancelled_request_keeps_its_rows_until_they_are_released(state):
    """A copy may still be active."""
    scheduler = make()
    one = submit(scheduler, 1)
    plan = scheduler.schedule(1)
    if state is not RequestState.LOADING:
        announce(scheduler, plan)
    if state is RequestState.RUNNING:
        scheduler.schedule(2)
    assert one.state is state
    scheduler.end(one, RequestEvent.CANCEL, 3)
    assert scheduler.slots.reserved_slots == 13
    scheduler.release_kv(one)
    assert scheduler.slots.reserved_slots == 0
    scheduler.check()


def test_a_full_queue_refuses_with_a_time_to_retry_at():
    """The waiting queue is bounded."""
    scheduler = make()
    for number in range(4):
        submit(scheduler, number)
    with pytest.raises(QueueFullError, match="4 turns wait") as refused:
        submit(scheduler, 5)
    assert refused.value.details == {"queue_length": "4"}
    assert refused.value.retry_after_s == 1.0


def test_a_request_that_can_never_fit_is_the_callers_error():
    """The sequence KV of one request must fit; write slots are counted separately."""
    submit(make(write_slots=16), 1, prompt_tokens=100, max_tokens=1)
    with pytest.raises(AssertionError, match="window"):
        submit(make(), 1, prompt_tokens=101, max_tokens=1)


def test_a_request_waits_for_the_session_s_earlier_one():
    """One request of a session at a time has a sequence's KV."""
    scheduler = make()
    first = run(scheduler, 1, session="s")
    submit(scheduler, 2, session="s")
    assert admitted_numbers(scheduler.schedule(4)) == []
    scheduler.end(first, RequestEvent.CANCEL, 5)
    assert admitted_numbers(scheduler.schedule(6)) == [2]


def test_estimates_follow_the_rate_of_free_places():
    """Two ends, two seconds apart, while others wait."""
    scheduler = make(max_running=1, max_loading=1)
    for number in range(4):
        submit(scheduler, number, max_tokens=20)
    for second in range(2, 6, 2):
        _, plan = step(scheduler)
        scheduler.end(plan.chunks[0].request, RequestEvent.FINISH, second * 10**9)
        scheduler.release_kv(plan.chunks[0].request)
    assert scheduler.estimates.retry_after_s() == pytest.approx(2.0, abs=0.1)
    scheduler.schedule(7 * 10**9)
    assert scheduler.feed.interval_s == pytest.approx(2.0, abs=0.1)


def test_a_request_readmitted_at_once_has_not_waited():
    """A failed load says nothing about the wait for a place."""
    scheduler = make()
    one = submit(scheduler, 1)
    scheduler.schedule(1)
    scheduler.restart(one)
    assert admitted_numbers(scheduler.schedule(2)) == [1]
    scheduler.end(one, RequestEvent.CANCEL, 50 * 10**9)
    assert scheduler.estimates.retry_after_s() == UNKNOWN_RETRY_S


def test_traffic_counts_waiting_and_loading_requests_and_prompts():
    """Of others than the request itself; running answers are no backlog."""
    rates = Rates()
    for num_tokens in (1, 2, 16):
        for start in (0, 100):
            num_pairs = pairs(start, start + num_tokens)
            rates.steps.note(num_tokens, num_pairs, 0.5 + 0.25 * num_tokens + 0.001 * num_pairs)
    limits = replace(LIMITS, max_running=2, max_loading=3, kv_slots=1000)
    scheduler = Scheduler(limits, rates, NUM_LAYERS)
    run(scheduler, 1, max_tokens=20)
    submit(scheduler, 2, prompt_tokens=50)
    step(scheduler, now_ns=NS_PER_S)
    requests = [submit(scheduler, number) for number in range(3, 7)]
    scheduler.schedule(2 * NS_PER_S)
    traffic = scheduler.traffic(requests[0], 3 * NS_PER_S)
    assert (traffic.num_waiting, traffic.num_loading, traffic.num_places) == (1, 2, 3)
    assert traffic.backlog_s == pytest.approx(0.25 * 42 + 0.001 * pairs(8, 50), rel=0.01)
    assert traffic.starts_per_s == pytest.approx(4 / 3, rel=0.01)


# ----------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("num_plans", [0, 1, 2, 3])
def test_a_deadline_ends_a_request_wherever_it_is(num_plans):
    """Waiting, loading, ready or running; its rows are released as after a failure."""
    scheduler = make()
    one = submit(scheduler, 1, deadline_ns=50)
    if num_plans:
        plan = scheduler.schedule(10)
        assert plan.wake_ns == 50
    if num_plans > 1:
        announce(scheduler, plan)
    if num_plans > 2:
        scheduler.schedule(20)
    plan = scheduler.schedule(50)
    assert plan.expired == (one,)
    assert one.state is RequestState.FAILED
    assert plan.wake_ns is None
    scheduler.release_kv(one)
    assert (len(scheduler.queue), scheduler.slots.reserved_slots) == (0, 0)


# ----------------------------------------------------------------------------------- residents


def next_turn(scheduler, number, before, new_tokens=5, max_tokens=4):
    """Make the turn after `before` in its session."""
    turn = request(number, session=before.key.session_id, max_tokens=max_tokens)
    turn.token_ids = [*before.token_ids, *range(900, 900 + new_tokens)]
    turn = Request(
        number, before.key, turn.token_ids, max_tokens, 0, history_tokens=len(before.token_ids)
    )
    scheduler.submit(turn)
    return turn


def test_a_sessions_next_turn_uses_its_resident_in_place():
    """It takes over a sequence KV with enough room; no row is reserved again."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=20, max_tokens=20)
    assert (len(scheduler.residents), scheduler.residents.num_slots) == (1, 39)
    assert scheduler.slots.reserved_slots == 0
    before.token_ids = before.token_ids[:25]  # its answer is shorter in the transcript
    turn = next_turn(scheduler, 2, before)
    (admission,) = scheduler.schedule(20).admitted
    assert (admission.resident_tokens, admission.in_place) == (25, True)
    assert (scheduler.slots.reserved_slots, scheduler.residents.num_slots) == (39, 0)
    assert turn.capacity_tokens == turn.full_capacity_tokens == 33
    scheduler.check()


def test_a_resident_that_is_too_small_is_moved():
    """Old and new sequence KV are counted until the rows are in the new one."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=20)
    turn = next_turn(scheduler, 2, before)
    (admission,) = scheduler.schedule(20).admitted
    assert (admission.resident_tokens, admission.in_place) == (23, False)
    assert (scheduler.slots.reserved_slots, scheduler.residents.num_slots) == (32, 23)
    assert scheduler.residents.end_copy(turn)
    assert (scheduler.slots.reserved_slots, scheduler.residents.num_slots) == (32, 0)
    scheduler.check()


def test_another_session_s_prefix_is_copied():
    """Its resident stays, and is no victim until the copy has ended."""
    scheduler = make(block_tokens=8)
    before = run_to_the_end(scheduler, 1, prompt_tokens=20)
    turns = [submit(scheduler, number, prompt_tokens=12 + number) for number in (2, 3)]
    plan = scheduler.schedule(20)
    assert [(a.source, a.resident_tokens, a.in_place) for a in plan.admitted] == [
        (before.key, 13, False),
        (before.key, 14, False),
    ]
    assert scheduler.held_slots.evictable_slots == 0
    for turn in turns:
        assert not scheduler.residents.end_copy(turn)
    assert scheduler.held_slots.evictable_slots == scheduler.residents.num_slots == 23
    scheduler.check()


@pytest.mark.parametrize(
    ("limits", "attributes"),
    [
        ({"block_tokens": 14}, {}),  # part of a block could not be saved
        ({"keeps_residents": False}, {}),
        ({}, {"may_share": False}),
        ({}, {"history_tokens": 14, "prompt_tokens": 20}),  # the store probably has more
    ],
)
def test_a_prefix_is_shared_only_where_useful(limits, attributes):
    """Otherwise the turn is loaded or computed."""
    scheduler = make(**{"block_tokens": 8, **limits})
    one = run(scheduler, 1, prompt_tokens=14)
    scheduler.slots.become_resident(one, one.token_ids[:13], 9)
    other = submit(scheduler, 2, **{"prompt_tokens": 14, **attributes})
    (admission,) = scheduler.schedule(20).admitted
    assert (admission.request, admission.source) == (other, None)


def test_a_prefix_is_not_shared_if_its_session_must_make_room():
    """It is evicted, and its tokens are loaded or computed."""
    scheduler = make(block_tokens=8)
    before = run_to_the_end(scheduler, 1, prompt_tokens=50)
    submit(scheduler, 2, prompt_tokens=60)
    plan = scheduler.schedule(20)
    assert plan.evicted == (before.key,)
    assert [admission.source for admission in plan.admitted] == [None]
    scheduler.check()


def test_a_resident_that_does_not_fit_beside_its_successor_is_evicted():
    """The turn is loaded from the store instead."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=50)
    next_turn(scheduler, 2, before)
    plan = scheduler.schedule(20)
    assert plan.evicted == (before.key,)
    assert [admission.resident_tokens for admission in plan.admitted] == [0]
    scheduler.check()


@pytest.mark.parametrize("changed_at", [0, 3])
def test_a_resident_with_little_of_the_history_is_not_used(changed_at):
    """After a truncation the store has more; the old sequence KV is freed."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=20)
    before.token_ids[changed_at] = 77
    next_turn(scheduler, 2, before)
    plan = scheduler.schedule(20)
    assert plan.evicted == (before.key,)
    assert [admission.resident_tokens for admission in plan.admitted] == [0]


def test_residents_make_room_only_as_needed_and_if_it_helps():
    """The least recently used goes; none goes for a request that cannot be admitted anyway."""
    scheduler = make()
    old = run_to_the_end(scheduler, 1, prompt_tokens=20)
    run_to_the_end(scheduler, 2, prompt_tokens=20)
    submit(scheduler, 3, prompt_tokens=60)
    assert scheduler.schedule(20).evicted == (old.key,)
    submit(scheduler, 4, prompt_tokens=60)
    plan = scheduler.schedule(21)
    assert (plan.evicted, plan.admitted) == ((), ())
    scheduler.check()


def test_an_active_move_protects_its_source():
    """Its rows stay until they are in the new sequence KV."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=20)
    turn = next_turn(scheduler, 2, before)
    scheduler.schedule(20)
    submit(scheduler, 3, prompt_tokens=50)
    assert scheduler.schedule(21).admitted == ()
    scheduler.residents.end_copy(turn)
    assert admitted_numbers(scheduler.schedule(22)) == [3]


def test_a_cancelled_move_leaves_the_resident_in_place():
    """The next turn waits until the copy has ended, and finds it."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1, prompt_tokens=20)
    turn = next_turn(scheduler, 2, before)
    scheduler.schedule(20)
    scheduler.end(turn, RequestEvent.CANCEL, 21)
    next_turn(scheduler, 3, before)
    assert scheduler.schedule(22).admitted == ()
    scheduler.release_kv(turn)
    (admission,) = scheduler.schedule(23).admitted
    assert admission.resident_tokens == 23
    scheduler.check()


def test_a_resident_is_dropped_with_its_session():
    """Once."""
    scheduler = make()
    before = run_to_the_end(scheduler, 1)
    assert scheduler.residents.drop(before.key)
    assert not scheduler.residents.drop(before.key)
    assert scheduler.residents.num_slots == 0


@pytest.mark.parametrize("why_not", ["config", "nothing to keep", "newer turn", "has one"])
def test_a_sequence_kv_may_be_released_without_becoming_a_resident(why_not):
    """Then its rows are freed as usual."""
    scheduler = make(keeps_residents=why_not != "config")
    one = run(scheduler, 1, session="s")
    scheduler.end(one, RequestEvent.FINISH, 5)
    token_ids = [] if why_not == "nothing to keep" else one.token_ids[:10]
    if why_not in {"newer turn", "has one"}:
        newer = run(scheduler, 2, session="s")
    if why_not == "has one":
        scheduler.end(newer, RequestEvent.FINISH, 6)
        assert scheduler.keep_resident(newer, newer.token_ids[:10], 7)
    rows = scheduler.slots.reserved_slots
    assert not scheduler.keep_resident(one, token_ids, 8)
    assert scheduler.slots.reserved_slots == rows
    scheduler.release_kv(one)
    scheduler.check()


def test_only_computed_rows_are_kept():
    """The last token's row was never computed."""
    scheduler = make()
    one = run(scheduler, 1)
    with pytest.raises(AssertionError, match="under way"):
        scheduler.keep_resident(one, one.token_ids[:1], 5)
    scheduler.end(one, RequestEvent.FINISH, 5)
    with pytest.raises(AssertionError, match="computed"):
        scheduler.keep_resident(one, one.token_ids, 5)


def test_a_cancelled_request_may_leave_a_resident():
    """Its KV's part of the session's history is valid."""
    scheduler = make()
    one = run(scheduler, 1, session="s")
    scheduler.end(one, RequestEvent.CANCEL, 5)
    assert scheduler.keep_resident(one, one.token_ids[:5], 6)
    scheduler.release_kv(one)
    assert len(scheduler.residents) == 1
    scheduler.check()


def test_surplus_residents_are_evicted_least_recently_used_first():
    """Each has a small cost beside its rows."""
    scheduler = make(most_residents=1)
    for number, now_ns in ((1, 30), (2, 10), (3, 20)):
        one = run(scheduler, number, session=str(number))
        scheduler.end(one, RequestEvent.FINISH, now_ns)
        assert scheduler.keep_resident(one, one.token_ids[:5], now_ns)
    taken = scheduler.residents.take_surplus(scheduler.queue.rank)
    assert [key.session_id for key in taken] == ["2", "3"]
    assert not scheduler.residents.take_surplus(scheduler.queue.rank)
    scheduler.check()


# ---------------------------------------------------------------------------------- preemption


def test_an_answer_that_outgrows_its_rows_moves_to_twice_as_many():
    """It is preempted and admitted again, with its rows, in one plan if there is room."""
    scheduler = make(answer_tokens=4)
    one = run(scheduler, 1, prompt_tokens=10, max_tokens=50)
    assert one.capacity_tokens == 13
    while one.num_preemptions == 0:
        plan, _ = step(scheduler)
    assert plan.preempted == (one,)
    (admission,) = plan.admitted
    assert (admission.resident_tokens, admission.in_place) == (13, False)
    assert one.capacity_tokens == 17
    assert (scheduler.slots.reserved_slots, scheduler.residents.num_slots) == (17, 0)
    assert (one.computed_tokens, len(one.token_ids)) == (14, 15)
    assert one.loaded_tokens == 0, "what was found is what was found first"


def test_an_answer_outgrows_its_rows_only_a_few_times():
    """Doubling makes it logarithmic in the length."""
    scheduler = make(kv_slots=4100, answer_tokens=1)
    one = run(scheduler, 1, prompt_tokens=10, max_tokens=2000)
    while len(one.output_ids) < 2000:
        step(scheduler)
    assert one.num_preemptions <= 11


def test_an_outgrown_answer_waits_while_its_rows_are_moved():
    """Its sequence KV is being copied to; no token is computed until that has ended."""
    scheduler = make(answer_tokens=1)
    before = run_to_the_end(scheduler, 1, prompt_tokens=10)
    turn = next_turn(scheduler, 2, before, new_tokens=1)
    (admission,) = scheduler.schedule(20).admitted
    scheduler.announce(turn, admission.resident_tokens, 21, layers_ready=0)
    scheduler.gate.on_progress(turn, NUM_LAYERS, 22)
    chunks = scheduler.schedule(23).chunks
    scheduler.apply(StepResult(chunks, {2: [7]}), 24)
    assert turn.has_outgrown_slots
    plan = scheduler.schedule(25)
    assert (plan.chunks, plan.preempted) == ((), ())
    scheduler.residents.end_copy(turn)
    assert scheduler.schedule(26).preempted == (turn,)
    scheduler.check()


def test_a_higher_priority_preempts_for_rows_the_lowest_and_newest_first():
    """As many as needed; their computed rows are evicted only as far as needed, too."""
    scheduler = make(max_running=4, max_loading=4)
    running = [
        run(scheduler, i, prompt_tokens=14, max_tokens=12, priority=i == 0) for i in range(4)
    ]
    submit(scheduler, 9, prompt_tokens=40, priority=2)
    plan = scheduler.schedule(10)
    assert plan.preempted == (running[3], running[2])
    assert set(plan.evicted) == {running[3].key, running[2].key}
    assert admitted_numbers(plan) == [9]
    assert [waiting.number for waiting in list(scheduler.queue)] == [2, 3]
    scheduler.check()


def test_a_place_freed_by_a_preemption_is_taken_at_once():
    """A ready request starts in the same plan; no other plan would be requested."""
    scheduler = make(max_running=1)
    low = run(scheduler, 1, prompt_tokens=40)
    ready = submit(scheduler, 2, prompt_tokens=10)
    scheduler.schedule(4)
    scheduler.announce(ready, 5, 5, layers_ready=0)
    scheduler.gate.on_progress(ready, NUM_LAYERS, 6)
    submit(scheduler, 3, prompt_tokens=80, priority=1)
    plan = scheduler.schedule(7)
    assert plan.preempted == (low,)
    assert [chunk.request for chunk in plan.chunks] == [ready]


def test_no_request_is_preempted_in_vain():
    """Lower priorities continue; the higher one waits for its equals."""
    scheduler = make(max_running=4)
    run(scheduler, 0, prompt_tokens=50, max_tokens=10, priority=2)
    run(scheduler, 1, prompt_tokens=20, max_tokens=10)
    submit(scheduler, 9, prompt_tokens=60, priority=2)
    plan = scheduler.schedule(10)
    assert (plan.preempted, plan.admitted) == ((), ())


def test_equal_priorities_are_not_preempted():
    """Only a higher priority is a reason."""
    scheduler = make()
    run(scheduler, 0, prompt_tokens=60)
    submit(scheduler, 9, prompt_tokens=60)
    assert scheduler.schedule(10).preempted == ()


def test_a_higher_priority_takes_a_place_in_a_full_batch_once_it_is_loaded():
    """The victim computes until then, keeps its rows, and is next in line."""
    scheduler = make(max_running=1)
    low = run(scheduler, 1)
    high = submit(scheduler, 2, priority=1)
    loading = scheduler.schedule(10)
    assert (admitted_numbers(loading), loading.preempted) == ([2], ())
    assert [chunk.request for chunk in loading.chunks] == [low]
    announce(scheduler, loading)
    plan = scheduler.schedule(11)
    assert plan.preempted == (low,)
    assert [chunk.request for chunk in plan.chunks] == [high]
    (again,) = plan.admitted
    assert (again.request, again.in_place, again.resident_tokens) == (low, True, 10)
    scheduler.check()


def test_a_higher_priority_takes_a_place_among_ready_requests():
    """All places for loading belong to lower ones that wait for the batch."""
    scheduler = make(max_running=1, max_loading=1, kv_slots=1000)
    run(scheduler, 1, max_tokens=50)
    ready = submit(scheduler, 2)
    step(scheduler)
    assert ready.state is RequestState.READY
    submit(scheduler, 3, priority=1)
    plan = scheduler.schedule(10)
    assert plan.preempted == (ready,)
    assert admitted_numbers(plan) == [3]
    submit(scheduler, 4, priority=2)
    assert scheduler.schedule(11).preempted == (), "what is loading is left alone"
    scheduler.check()


def test_ready_and_running_requests_make_room_together():
    """One for its place for loading, the other because the first one's rows do not suffice."""
    scheduler = make(max_running=1, max_loading=1)
    running = run(scheduler, 1, prompt_tokens=20, max_tokens=11)
    ready = submit(scheduler, 2, prompt_tokens=20, max_tokens=11)
    step(scheduler)
    assert ready.state is RequestState.READY
    submit(scheduler, 3, prompt_tokens=80, priority=1)
    plan = scheduler.schedule(10)
    assert plan.preempted == (ready, running)
    assert admitted_numbers(plan) == [3]
    scheduler.check()


def test_a_request_with_uncertain_rows_is_not_preempted():
    """They would become a resident; it has to pass a step first."""
    scheduler = make()
    low = submit(scheduler, 1, prompt_tokens=60)
    scheduler.schedule(1)
    scheduler.announce(low, 50, 2, layers_ready=0)
    scheduler.gate.on_progress(low, NUM_LAYERS, 3)
    submit(scheduler, 2, prompt_tokens=60, priority=1)
    plan = scheduler.schedule(4)
    assert plan.preempted == ()
    scheduler.apply(StepResult(plan.chunks, {1: [7]}), 5)
    assert scheduler.schedule(6).preempted == (low,)


def test_without_residents_a_preempted_request_keeps_its_rows_while_it_waits():
    """They are working memory, and are freed with the request."""
    scheduler = make(keeps_residents=False, max_running=1, max_loading=1)
    low = run(scheduler, 1)
    high = submit(scheduler, 2, priority=1)
    announce(scheduler, scheduler.schedule(10))
    submit(scheduler, 3, priority=1)
    plan = scheduler.schedule(11)
    assert plan.preempted == (low,)
    assert (plan.evicted, len(scheduler.residents)) == ((), 1)
    scheduler.end(low, RequestEvent.CANCEL, 12)
    assert scheduler.schedule(13).evicted == (low.key,)
    assert len(scheduler.residents) == 0
    assert high.state is RequestState.RUNNING


def test_a_preempted_request_recomputes_evicted_rows():
    """Its sampled tokens are fed like a prompt, and its answer continues."""
    scheduler = make()
    low = run(scheduler, 1, prompt_tokens=60)
    high = run(scheduler, 2, prompt_tokens=60, priority=1)
    assert low.state is RequestState.WAITING
    scheduler.end(high, RequestEvent.FINISH, 10)
    scheduler.release_kv(high)
    while len(low.output_ids) < 3:
        step(scheduler)
    assert low.num_preemptions == 1
    assert low.output_ids == [7, 7, 7]
    assert (low.started_ns, low.loaded_tokens) == (3, 0)


# ------------------------------------------------------------------------------ loads and gates


def test_a_delayed_request_delays_no_other():
    """Others that are ready start; the plan says when to check again."""
    scheduler = make()
    slow, quick = submit(scheduler, 1), submit(scheduler, 2)
    scheduler.schedule(1)
    scheduler.announce(slow, 5, 2, layers_ready=0)
    scheduler.announce(quick, 5, 2, layers_ready=NUM_LAYERS)
    plan = scheduler.schedule(3)
    assert [chunk.request for chunk in plan.chunks] == [quick]
    assert plan.wake_ns == 2 + HOLD_LIMIT_NS
    scheduler.gate.on_progress(slow, 1, 4)
    assert slow.state is RequestState.READY
    scheduler.schedule(5)
    assert slow.state is RequestState.RUNNING


def test_a_read_buffer_may_be_set():
    """The engine learns when a load waits for its request to be in the batch."""
    scheduler = make()
    one = submit(scheduler, 1)
    scheduler.schedule(1)
    scheduler.announce(one, 5, 2, layers_ready=0, tier="ssd", fixed_layers=0)
    assert sizes(scheduler.schedule(3)) == [(1, 5)]
    assert one.buffer_layers == 0


def test_the_first_read_buffer_is_recorded():
    """Even if a load fails, and all of the history is found the next time."""
    scheduler = make()
    one, two = submit(scheduler, 1), submit(scheduler, 2)
    scheduler.schedule(1)
    scheduler.announce(one, 5, 2, layers_ready=1)
    scheduler.announce(two, 5, 2, layers_ready=NUM_LAYERS)
    assert one.buffer_layers is None
    scheduler.schedule(3)
    assert (one.buffer_layers, two.buffer_layers) == (1, None)
    scheduler.restart(one)
    scheduler.schedule(5)
    scheduler.announce(one, 5, 6, layers_ready=NUM_LAYERS)
    scheduler.schedule(7)
    assert one.state is RequestState.RUNNING
    assert one.buffer_layers == 1


def test_a_failed_load_returns_its_request_to_its_place():
    """Its rows are dropped, no token counts as loaded, and it is admitted again at once."""
    scheduler = make()
    one = submit(scheduler, 1)
    later = submit(scheduler, 2)
    scheduler.schedule(1)
    scheduler.announce(one, 5, 2, layers_ready=1)
    scheduler.schedule(3)
    scheduler.restart(one)
    assert (one.loaded_tokens, one.computed_tokens, one.num_preemptions) == (0, 0, 0)
    assert scheduler.residents.num_slots == 0
    plan = scheduler.schedule(5)
    assert admitted_numbers(plan) == [1]
    assert scheduler.slots.reserved_slots == 13 + 13
    assert later.state is RequestState.LOADING
    scheduler.check()


def test_the_first_result_of_a_preempted_requests_load_is_recorded():
    """A load that fails after a preemption does not change it."""
    scheduler = make(max_running=1)
    low = submit(scheduler, 1)
    announce(scheduler, scheduler.schedule(1), found=5)
    step(scheduler)
    submit(scheduler, 2, priority=1)
    step(scheduler)
    assert low.num_preemptions == 1
    scheduler.restart(low)
    assert low.loaded_tokens == 5


# ----------------------------------------------------------------------------------------- cost


def calls_of(function):
    """Count the Python functions that a call enters."""
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num_calls


def cost_of_a_round(num_waiting):
    """Run one round of all events of a step, with so many waiting; return its cost."""
    scheduler = make(max_waiting=20_000, kv_slots=10_000)
    for number in range(num_waiting):
        submit(scheduler, number, max_tokens=90, priority=number % 3, deadline_ns=10**12)
    for _ in range(20):
        step(scheduler)

    def go_round():
        plan = scheduler.schedule(10)
        sampled = {chunk.request.number: [7] for chunk in plan.chunks}
        scheduler.apply(StepResult(plan.chunks, sampled), 10)
        over = plan.chunks[0].request
        scheduler.end(over, RequestEvent.FINISH, 10)
        scheduler.keep_resident(over, over.token_ids[:10], 10)
        submit(scheduler, 30_000)
        announce(scheduler, scheduler.schedule(10))
        scheduler.end(scheduler.queue.head, RequestEvent.CANCEL, 10)

    return calls_of(go_round)


def test_ten_thousand_waiting_requests_cost_no_more_than_a_hundred():
    """The work per step does not grow with the queue (but for bisecting it)."""
    few, many = cost_of_a_round(100), cost_of_a_round(10_000)
    assert many <= few + 20


def test_the_times_of_a_request_are_the_first_ones():
    """Admission and first token: a preemption or a later token changes neither."""
    scheduler = make(kv_slots=20)
    first = submit(scheduler, 1, prompt_tokens=10)
    step(scheduler, now_ns=3)
    assert (first.admitted_ns, first.first_token_ns) == (3, 3)
    second = submit(scheduler, 2, prompt_tokens=10, priority=1)
    step(scheduler, now_ns=7)
    assert first.num_preemptions == 1
    scheduler.end(second, RequestEvent.CANCEL, 8)
    scheduler.release_kv(second)
    step(scheduler, now_ns=9)
    assert len(first.output_ids) == 2
    assert (first.admitted_ns, first.first_token_ns) == (3, 3)


def test_kvds_queue_has_a_request_until_its_kv_is_released():
    """It may be loaded and saved until then."""
    scheduler = make()
    one = run(scheduler, 1)
    scheduler.end(one, RequestEvent.FINISH, 9)
    assert len(scheduler.feed) == 1
    scheduler.release_kv(one)
    assert len(scheduler.feed) == 0


def test_ended_requests_are_not_watched():
    """In whichever state they were; the time of the end is recorded."""
    scheduler = make()
    one, two = run(scheduler, 1), submit(scheduler, 2)
    announce(scheduler, scheduler.schedule(3))
    assert two.state is RequestState.READY
    for request_, now_ns in ((one, 11), (two, 12)):
        scheduler.end(request_, RequestEvent.CANCEL, now_ns)
        assert request_.finished_ns == now_ns
        scheduler.release_kv(request_)
    assert not scheduler.gate._loads
    assert scheduler.slots.kv_slots(one) == 0
