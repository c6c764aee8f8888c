"""The scheduler where layers with a window hold the last tokens only: room, moves, copies."""

from dataclasses import replace

import pytest

from inference_svc.core.attention_window import HeldRows
from inference_svc.core.rates.rates import Rates
from inference_svc.core.scheduling.held_slots import ContiguousSlots
from inference_svc.core.scheduling.page_groups import page_groups
from inference_svc.core.scheduling.request import Request, RequestEvent
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import SchedulerLimits, StepResult
from shared.types.session_key import SessionKey

NUM_LAYERS = 4
ROWS = HeldRows(window=8, spare_tokens=8, step_tokens=16, token_items=4, full_items=1)
LIMITS = SchedulerLimits(
    max_running=4,
    max_loading=4,
    max_waiting=8,
    kv_slots=150,
    write_slots=0,
    step_tokens=16,
    mixed_step_tokens=8,
    answer_tokens=8,
    keeps_residents=True,
    block_tokens=8,
    attention_window=8,
    held_rows=ROWS,
)


def make(**limits):
    return Scheduler(replace(LIMITS, **limits), Rates(), NUM_LAYERS)


def submit(scheduler, number, num_tokens=100, max_tokens=5, **attributes):
    key = SessionKey("tenant", "0f", str(number))
    first = attributes.pop("first", 1000 * number)
    request = Request(number, key, list(range(first, first + num_tokens)), max_tokens, 0)
    for name, value in attributes.items():
        setattr(request, name, value)
    scheduler.submit(request)
    return request


def step(scheduler, *, ends_copies=True):
    """Plan, announce admitted requests, and compute; return the plan."""
    plan = scheduler.schedule(3)
    for admission in plan.admitted:
        request = admission.request
        scheduler.announce(
            request,
            admission.resident_tokens,
            3,
            layers_ready=NUM_LAYERS,
            window_from=request.window_from,
        )
        if admission.is_copy and ends_copies:
            scheduler.residents.end_copy(request)
    sampled = {chunk.request.number: [7] for chunk in plan.chunks if chunk.sample}
    scheduler.apply(StepResult(plan.chunks, sampled), 3)
    scheduler.check()
    return plan


def finish(scheduler, request):
    """Compute all of a request, and keep it."""
    while request.num_sampled < request.max_tokens:
        step(scheduler)
    scheduler.end(request, RequestEvent.FINISH, 3)
    assert scheduler.keep_resident(request, request.token_ids[: request.computed_tokens], 3)
    scheduler.residents.note_boundary(request.key, 0)


def test_slots_of_long_sequences_have_more_than_a_token():
    """Behind the rows of layers with a window a slot holds more than a token."""
    slots = ContiguousSlots(100, ROWS)
    assert [slots.needed_for(n) for n in (10, 32, 33, 36, 100)] == [10, 32, 33, 33, 49]
    assert [slots.tokens_in(n) for n in (10, 32, 33, 49)] == [10, 32, 36, 100]
    plain = ContiguousSlots(100)
    assert (plain.needed_for(70), plain.tokens_in(70)) == (70, 70)


@pytest.mark.parametrize(("held_rows", "num_admitted"), [(ROWS, 3), (None, 1)])
def test_as_many_requests_run_as_fit_by_bytes(held_rows, num_admitted):
    """A hundred tokens take half a hundred slots."""
    scheduler = make(held_rows=held_rows)
    for number in range(4):
        submit(scheduler, number)
    assert len(step(scheduler).admitted) == num_admitted


def test_a_turn_may_have_more_tokens_than_there_are_slots():
    """Only its bytes limit it."""
    scheduler = make(kv_slots=49)
    request = submit(scheduler, 1, num_tokens=96)
    finish(scheduler, request)
    assert scheduler.residents.num_slots == 49
    with pytest.raises(AssertionError, match="the caller checks the window"):
        submit(scheduler, 2, num_tokens=97)


def test_windows_move_with_the_steps():
    """There are rows for a step's tokens, and for those that they attend to."""
    scheduler = make()
    request = submit(scheduler, 1, max_tokens=40)
    seen = set()
    while request.num_sampled < 40:
        before = request.computed_tokens
        step(scheduler)
        assert request.computed_tokens - request.window_from <= ROWS.num_rows
        assert request.window_from <= max(0, before - ROWS.kept_tokens)
        seen.add(request.window_from)
    assert len(seen) > 5
    scheduler.end(request, RequestEvent.FINISH, 3)
    scheduler.keep_resident(request, request.token_ids[:139], 3)
    assert scheduler.residents.get(request.key).window_from == request.window_from > 100


@pytest.mark.parametrize(("num_back", "is_used"), [(5, True), (60, False)])
def test_a_resident_that_has_left_a_place_is_useless_there(num_back, is_used):
    """Not if it is near: some tokens before the window stay."""
    scheduler = make()
    finish(scheduler, submit(scheduler, 1))
    again = submit(scheduler, 1, num_tokens=100 - num_back, first=1000)
    (admission,) = step(scheduler).admitted
    assert (admission.resident_tokens, admission.in_place) == (94 if is_used else 0, is_used)
    assert bool(again.window_from) == is_used


def test_a_copy_has_no_more_tokens_than_its_first_step_has_rows_for():
    """It may still be active; then no window can move."""
    scheduler = make()
    one = submit(scheduler, 1, num_tokens=64, max_tokens=1)
    finish(scheduler, one)
    # With as many rows as there are tokens before the window: more than a step needs.
    resident = scheduler.residents.get(one.key)
    assert 64 - resident.window_from > ROWS.kept_tokens
    two = submit(scheduler, 2, num_tokens=90, first=1000)
    (admission,) = scheduler.schedule(3).admitted
    assert (admission.is_copy, admission.resident_tokens) == (True, 64)
    assert two.window_from == 64 - ROWS.kept_tokens


def test_a_request_that_is_copied_waits_before_its_window_moves():
    """It continues after the copy; others do meanwhile, and it does as far as it has rows."""
    scheduler = make(kv_slots=400, answer_tokens=100)
    leader = submit(scheduler, 1, num_tokens=40, max_tokens=100)
    while leader.num_sampled < 2:
        step(scheduler)
    follower = submit(scheduler, 2, num_tokens=60, max_tokens=100, first=1000)
    (admission,) = step(scheduler, ends_copies=False).admitted
    assert (admission.is_copy, admission.is_running) == (True, True)
    held = leader.window_from
    steps = [step(scheduler, ends_copies=False) for _ in range(ROWS.num_rows)]
    assert leader.window_from == held <= follower.window_from
    assert leader.computed_tokens == held + ROWS.num_rows
    assert [chunk.request for chunk in steps[-1].chunks] == [follower]
    scheduler.residents.end_copy(follower)
    assert any(chunk.request is leader for chunk in step(scheduler).chunks)
    assert leader.window_from > held


def test_a_step_computes_no_more_of_a_prompt_than_there_are_rows_for():
    """Others get the rest of the step's tokens."""
    scheduler = make(step_tokens=40, kv_slots=400)
    one, two = (submit(scheduler, number, num_tokens=64) for number in (1, 2))
    step(scheduler)
    plan = step(scheduler)
    assert [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] == [(one, 16), (two, 16)]


PAGES = {"page_tokens": 4, "page_groups": page_groups(1, 2, ROWS.num_rows, 4), "answer_tokens": 100}


def test_as_many_requests_run_as_have_pages():
    """Of groups with a window a sequence of any length has the same number."""
    groups = PAGES["page_groups"]
    assert groups.window_pages == 9
    for num_slots, num_admitted in ((3 * 43 * 4, 3), (3 * 43 * 4 - 4, 2)):
        scheduler = make(**{**PAGES, "kv_slots": num_slots, "answer_tokens": 0})
        requests = [submit(scheduler, number) for number in range(3)]
        assert len(step(scheduler).admitted) == num_admitted
        pages = [scheduler.slots.pages(request) for request in requests[:num_admitted]]
        assert {len(some) for some in pages} == {25 + 2 * 9}


def test_a_sharing_request_gets_other_pages_before_it_writes_there():
    """The plan has them; no request waits, and nothing is copied."""
    scheduler = make(**PAGES, kv_slots=800)
    leader = submit(scheduler, 1, num_tokens=40, max_tokens=100)
    while leader.num_sampled < 2:
        step(scheduler)
    follower = submit(scheduler, 2, num_tokens=60, max_tokens=100, first=1000)
    (admission,) = step(scheduler).admitted
    assert (admission.is_copy, admission.is_running, admission.resident_tokens) == (False, True, 40)
    tables = PAGES["page_groups"].tables
    ours, theirs = (tables(scheduler.slots.pages(one)) for one in (leader, follower))
    live = slice(-(-follower.window_from // 4), 10)
    assert [table[live] for table in ours] == [table[live] for table in theirs]
    moved = []
    for _ in range(40):
        plan = step(scheduler)
        moved += [(growth.request, growth.pages) for growth in plan.grown]
    assert moved, "whoever comes there first"
    assert moved[-1][1] == scheduler.slots.pages(moved[-1][0])
    ours, theirs = (tables(scheduler.slots.pages(one)) for one in (leader, follower))
    assert ours[0][:10] == theirs[0][:10]
    assert not {*ours[1], *ours[2]} & {*theirs[1], *theirs[2]}
