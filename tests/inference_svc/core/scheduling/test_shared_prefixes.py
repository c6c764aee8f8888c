"""Prefixes shared with running turns: which request waits for which, and what is shared."""

from dataclasses import replace

import pytest

from inference_svc.core.rates.rates import Rates
from inference_svc.core.scheduling.request import Request, RequestEvent
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import SchedulerLimits, StepResult
from shared.types.session_key import SessionKey

NUM_LAYERS = 4
LIMITS = SchedulerLimits(
    max_running=8,
    max_loading=8,
    max_waiting=8,
    kv_slots=200,
    write_slots=0,
    step_tokens=16,
    mixed_step_tokens=16,
    answer_tokens=8,
    keeps_residents=True,
    block_tokens=8,
    page_tokens=4,
)
PROMPT = list(range(100, 140))


def make(**limits):
    return Scheduler(replace(LIMITS, **limits), Rates(), NUM_LAYERS)


def submit(scheduler, number, token_ids, **attributes):
    key = SessionKey("tenant", "0f", str(number))
    new = Request(number, key, list(token_ids), 8, 0, **attributes)
    scheduler.submit(new)
    return new


def announce(scheduler, plan, **found):
    for admission in plan.admitted:
        found = {"layers_ready": NUM_LAYERS, **found}
        scheduler.announce(admission.request, admission.resident_tokens, 2, **found)
        if admission.is_copy:
            assert not scheduler.residents.end_copy(admission.request)


def compute(scheduler):
    """Compute a step; return its plan."""
    plan = scheduler.schedule(3)
    sampled = {chunk.request.number: [7] for chunk in plan.chunks if chunk.sample}
    scheduler.apply(StepResult(plan.chunks, sampled), 3)
    announce(scheduler, plan)
    scheduler.check()
    return plan


def admissions(plan):
    return [(a.request.number, a.resident_tokens, a.is_running) for a in plan.admitted]


def start_alike(scheduler, *prompts, **attributes):
    """Submit requests at the same time; the first of them is admitted, and has no history."""
    requests = [submit(scheduler, n, ids, **attributes) for n, ids in enumerate(prompts)]
    announce(scheduler, scheduler.schedule(1))
    return requests


@pytest.mark.parametrize("page_tokens", [4, None])
def test_the_first_of_requests_with_one_beginning_computes_it_for_all(page_tokens):
    """The others are admitted when it has computed it, and begin with its pages."""
    scheduler = make(page_tokens=page_tokens)
    one, two, three = start_alike(scheduler, [*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 3, 4])
    assert [admissions(compute(scheduler)) for _ in range(3)] == [[], [], []]
    assert one.computed_tokens == len(PROMPT) + 1
    assert admissions(compute(scheduler)) == [(1, 40, True), (2, 40, True)]
    assert scheduler.slots.shared_slots == (2 * 40 if page_tokens else 0)
    for request in (two, three):
        assert scheduler.slots.pages(request)[:10] == scheduler.slots.pages(one)[:10]
        assert request.loaded_tokens == 40
    compute(scheduler)
    assert two.output_ids
    assert three.output_ids


def test_its_pages_stay_when_it_has_ended():
    """They are freed with the last holding."""
    scheduler = make()
    requests = start_alike(scheduler, [*PROMPT, 1], [*PROMPT, 2])
    for _ in range(5):
        compute(scheduler)
    assert all(request.output_ids for request in requests)
    for request in requests:
        scheduler.end(request, RequestEvent.CANCEL, 4)
        scheduler.release_kv(request)
        scheduler.check()
    assert scheduler.held_slots.free_slots == 200


@pytest.mark.parametrize(
    ("limits", "first", "second"),
    [
        ({"keeps_residents": False}, {}, {}),
        ({"block_tokens": 64}, {}, {}),  # no whole block
        ({}, {}, {"may_share": False}),
        ({}, {}, {"history_tokens": 41, "token_ids": [*PROMPT, 2, 3, 4]}),  # the store has more
        ({}, {}, {"token_ids": [*PROMPT, *range(50)]}),  # less than half of its tokens
        ({}, {"history_tokens": 50, "token_ids": [*PROMPT, *range(20)]}, {}),  # to be loaded first
        ({}, {"token_ids": PROMPT[:7]}, {}),  # less than a block
    ],
)
def test_no_request_waits_where_it_does_not_pay(limits, first, second):
    """It is admitted at the same time, and computes everything itself."""
    scheduler = make(**limits)
    submit(scheduler, 0, **{"token_ids": [*PROMPT, 1], **first})
    submit(scheduler, 1, **{"token_ids": [*PROMPT, 2], **second})
    found = admissions(scheduler.schedule(1))
    assert sorted(found) == [(0, 0, False), (1, 0, False)]


def test_existing_pages_are_shared_even_if_waiting_does_not_pay():
    """Whole pages and blocks of them; the rest is computed."""
    scheduler = make(block_tokens=12)
    (one,) = start_alike(scheduler, [*PROMPT, 1])
    compute(scheduler)
    compute(scheduler)
    assert one.computed_tokens == 32
    submit(scheduler, 1, [*PROMPT, *range(50)])
    assert admissions(scheduler.schedule(3)) == [(1, 24, True)]


@pytest.mark.parametrize(("boundary", "num_shared"), [(0, 40), (4, 36), (12, 36), (3, 0)])
def test_blocks_are_counted_from_the_place_of_its_blocks(boundary, num_shared):
    """And pages from the first token; if both never end together, nothing is shared."""
    scheduler = make()
    submit(scheduler, 0, [*PROMPT, 1])
    announce(scheduler, scheduler.schedule(1), boundary=boundary)
    for _ in range(3):
        compute(scheduler)
    submit(scheduler, 1, [*PROMPT, 2])
    ((_, num_tokens, is_running),) = admissions(scheduler.schedule(3))
    assert (num_tokens, is_running) == (num_shared, num_shared > 0)


@pytest.mark.parametrize(("ends", "num_shared"), [((24,), 40), ((20, 28), 16), ((8, 13, 26), 8)])
def test_nothing_behind_a_partial_block_is_shared(ends, num_shared):
    """The store has the blocks behind it for that session only: others could not be saved."""
    scheduler = make()
    (one,) = start_alike(scheduler, [*PROMPT, 1])
    for _ in range(3):
        compute(scheduler)
    for end in ends:
        one.note_block_end(end, LIMITS.block_tokens)
    submit(scheduler, 1, [*PROMPT, 2])
    assert admissions(scheduler.schedule(3)) == [(1, num_shared, True)]


def test_nothing_is_shared_while_a_load_may_fail():
    """After a successful step over its rows it cannot fail any more."""
    scheduler = make()
    one = submit(scheduler, 0, [*PROMPT, 1], history_tokens=32)
    scheduler.schedule(1)
    scheduler.announce(one, 32, 2, layers_ready=1)
    plan = scheduler.schedule(3)
    assert plan.chunks
    submit(scheduler, 1, [*PROMPT[:32], 2])
    assert admissions(scheduler.schedule(3)) == [(1, 0, False)]
    submit(scheduler, 2, [*PROMPT[:32], 3])
    scheduler.restart(one)
    scheduler.check()


def finish_answer(**limits):
    """Make a turn whose answer is complete; its KV is neither kept nor released yet."""
    scheduler = make(**limits)
    (one,) = start_alike(scheduler, [*PROMPT, 1])
    while not one.output_ids:
        compute(scheduler)
    scheduler.end(one, RequestEvent.FINISH, 4)
    scheduler.check()
    return scheduler, one


@pytest.mark.parametrize("page_tokens", [4, None])
def test_computed_pages_are_shared_while_the_answer_is_recorded(page_tokens):
    """Its KV stays meanwhile; afterwards its resident's is shared."""
    scheduler, one = finish_answer(page_tokens=page_tokens)
    two = submit(scheduler, 1, [*PROMPT, 2])
    plan = scheduler.schedule(5)
    assert admissions(plan) == [(1, 40, True)]
    scheduler.check()
    assert scheduler.keep_resident(one, [*PROMPT, 1], 5)
    scheduler.residents.note_boundary(one.key, 40)
    announce(scheduler, plan)
    scheduler.check()
    while not two.output_ids:
        compute(scheduler)
    submit(scheduler, 2, [*PROMPT, 3])
    assert [(n, num_tokens) for n, num_tokens, _ in admissions(scheduler.schedule(6))] == [(2, 40)]


def test_released_pages_are_not_shared():
    """As if it had never been."""
    scheduler, one = finish_answer()
    scheduler.release_kv(one)
    scheduler.check()
    submit(scheduler, 1, [*PROMPT, 2])
    assert admissions(scheduler.schedule(5)) == [(1, 0, False)]


def test_a_request_during_a_copy_waits_for_it():
    """Though the computing turn is gone, and the copy is not certain yet."""
    scheduler, one, two = copying()
    scheduler.end(one, RequestEvent.CANCEL, 4)
    scheduler.release_kv(one)
    scheduler.announce(two, 40, 4, layers_ready=0, tier="hbm")
    submit(scheduler, 2, [*PROMPT, 3])
    assert admissions(scheduler.schedule(5)) == []
    scheduler.gate.on_progress(two, NUM_LAYERS, 6)
    assert not scheduler.residents.end_copy(two)
    plan = scheduler.schedule(7)
    assert (admissions(plan), len(plan.chunks)) == ([], 1)
    scheduler.apply(StepResult(plan.chunks, {two.number: [7]}), 8)
    assert admissions(scheduler.schedule(9)) == [(2, 40, True)]


def test_an_uncertain_match_does_not_hide_a_certain_one():
    """The first of those with equal tokens may be an active copy."""
    scheduler = make(page_tokens=None)
    one, two, three = start_alike(scheduler, [*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 3])
    for _ in range(3):
        compute(scheduler)
    plan = scheduler.schedule(3)
    assert admissions(plan) == [(1, 40, True), (2, 40, True)]
    scheduler.announce(two, 40, 4, layers_ready=1)
    scheduler.announce(three, 40, 4, layers_ready=NUM_LAYERS)
    scheduler.residents.end_copy(three)
    scheduler.end(one, RequestEvent.CANCEL, 4)
    scheduler.release_kv(one)
    submit(scheduler, 3, [*PROMPT, 4])
    found = scheduler.schedule(5).admitted
    assert [(a.request.number, a.resident_tokens, a.source) for a in found] == [(3, 40, three.key)]


def leave_resident(scheduler, number, token_ids):
    """A turn that ends with the first token of its answer; returns its request."""
    request = submit(scheduler, number, token_ids)
    while not request.output_ids:
        compute(scheduler)
    scheduler.end(request, RequestEvent.FINISH, 4)
    assert scheduler.keep_resident(request, token_ids, number)
    scheduler.residents.note_boundary(request.key, 0)
    scheduler.release_kv(request)
    return request


def test_a_session_builds_on_what_it_has_itself():
    """Even if somebody is about to compute more of its prompt."""
    scheduler = make()
    before = submit(scheduler, 0, PROMPT[:24])
    announce(scheduler, scheduler.schedule(1))
    while not before.output_ids:
        compute(scheduler)
    scheduler.end(before, RequestEvent.FINISH, 4)
    assert scheduler.keep_resident(before, PROMPT[:24], 4)
    scheduler.residents.note_boundary(before.key, 24)
    submit(scheduler, 1, [*PROMPT, 1], may_share=False)
    again = Request(2, before.key, [*PROMPT, 2], 8, 0, history_tokens=24)
    scheduler.submit(again)
    found = admissions(scheduler.schedule(5))
    assert found == [(1, 0, False), (2, 24, False)]


def test_no_request_waits_for_a_lower_priority():
    """Prompts of higher priority are computed first."""
    scheduler = make()
    start_alike(scheduler, [*PROMPT, 1])
    submit(scheduler, 1, [*PROMPT, 2], priority=1)
    assert admissions(scheduler.schedule(3)) == [(1, 0, False)]


def test_no_request_waits_for_an_ended_turn():
    """The next one computes the missing tokens."""
    scheduler = make()
    one, _, _ = start_alike(scheduler, [*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 3])
    compute(scheduler)
    assert one.computed_tokens == 16
    scheduler.end(one, RequestEvent.CANCEL, 4)
    scheduler.release_kv(one)
    assert admissions(scheduler.schedule(5)) == [(1, 0, False)]


def test_no_request_waits_for_tokens_of_a_resident():
    """Though a turn recomputes them."""
    scheduler = make()
    before = submit(scheduler, 0, [*PROMPT, 1])
    announce(scheduler, scheduler.schedule(1))
    while not before.output_ids:
        compute(scheduler)
    scheduler.end(before, RequestEvent.FINISH, 4)
    assert scheduler.keep_resident(before, [*PROMPT, 1], 4)
    scheduler.residents.note_boundary(before.key, 40)
    submit(scheduler, 1, [*PROMPT, 2], may_share=False)
    submit(scheduler, 2, [*PROMPT, 3])
    assert admissions(scheduler.schedule(5)) == [(1, 0, False), (2, 40, False)]


def copying():
    """Make a running turn, and another one to which it is being copied."""
    scheduler = make(page_tokens=None)
    one, two = start_alike(scheduler, [*PROMPT, 1], [*PROMPT, 2])
    for _ in range(3):
        compute(scheduler)
    plan = scheduler.schedule(3)
    assert admissions(plan) == [(1, 40, True)]
    assert plan.admitted[0].is_copy
    return scheduler, one, two


def test_without_pages_it_is_copied_and_becomes_a_busy_resident():
    """Until the copy has ended; it is no victim till then."""
    scheduler, one, two = copying()
    scheduler.end(one, RequestEvent.FINISH, 4)
    assert scheduler.keep_resident(one, [*PROMPT, 1], 4)
    scheduler.check()
    assert scheduler.residents.is_busy(one.key)
    assert scheduler.held_slots.evictable_slots == 0
    assert not scheduler.residents.begin_compaction(one.key)
    assert not scheduler.residents.end_copy(two)
    assert scheduler.held_slots.evictable_slots == 48
    scheduler.check()


def test_a_copy_of_a_turn_without_a_resident_ends_all_the_same():
    """The copying request holds its memory."""
    scheduler, one, two = copying()
    scheduler.end(one, RequestEvent.CANCEL, 4)
    scheduler.release_kv(one)
    scheduler.check()
    assert not scheduler.residents.end_copy(two)
    assert not scheduler.residents.is_busy(one.key)


def test_a_turn_is_not_preempted_during_its_copy():
    """A request that needs its place waits for the copy."""
    scheduler, _, two = copying()
    submit(scheduler, 2, [9] * 100, priority=1)
    assert not scheduler.schedule(4).preempted
    scheduler.announce(two, 40, 4, layers_ready=NUM_LAYERS)
    scheduler.residents.end_copy(two)
    assert scheduler.schedule(5).preempted


def test_a_request_admitted_by_preemption_shares_all_the_same():
    """Shared pages need no room: as few turns are preempted as necessary."""
    scheduler = make(kv_slots=140)
    leader, *low = start_alike(scheduler, [*PROMPT, 1], [1] * 36, [2] * 36, priority=1)
    for request in low:
        request.priority = 0
    while not all(request.output_ids for request in low):
        compute(scheduler)
    assert scheduler.held_slots.free_slots == 4  # and each of the low ones has 44
    submit(scheduler, 9, [*PROMPT, 9], priority=1)
    plan = scheduler.schedule(9)
    assert (plan.preempted, admissions(plan)) == ((low[1],), [(9, 40, True)])
    scheduler.check()
    assert (
        scheduler.slots.pages(leader)[:10] == scheduler.slots.pages(plan.admitted[0].request)[:10]
    )


def test_a_turn_begins_anew_where_pages_that_others_hold_leave_its_resident_no_room():
    """What it would write behind its prefix lies on pages of another resident, which would stay."""
    scheduler = make(kv_slots=40, block_tokens=4, answer_tokens=0)
    mine = leave_resident(scheduler, 0, PROMPT[:32])
    leave_resident(scheduler, 1, [*PROMPT[:32], 1])
    assert scheduler.slots.shared_slots == 32
    again = Request(2, mine.key, [*PROMPT[:20], *range(16)], 4, 0, history_tokens=20)
    scheduler.submit(again)
    plan = scheduler.schedule(5)
    assert admissions(plan) == [(2, 0, False)]
    assert set(plan.evicted) == {mine.key, SessionKey("tenant", "0f", "1")}
    scheduler.check()


def test_a_resident_that_shares_all_its_pages_with_a_turn_is_not_evicted_in_vain():
    """It is the oldest one, but only the other one's slots become free."""
    scheduler = make(kv_slots=140, block_tokens=4, answer_tokens=0)
    leave_resident(scheduler, 0, PROMPT)
    leave_resident(scheduler, 1, [1] * 40)
    sharing = submit(scheduler, 2, [*PROMPT, 2])
    announce(scheduler, scheduler.schedule(5))
    assert not scheduler.residents.end_copy(sharing)
    submit(scheduler, 3, [3] * 80)
    assert scheduler.schedule(6).evicted == (SessionKey("tenant", "0f", "1"),)
    scheduler.check()


def test_a_turn_is_not_preempted_in_vain():
    """The newest one goes first, but without the other one that would not be enough."""
    scheduler = make(kv_slots=60)
    large, small = start_alike(scheduler, [1] * 32, [2] * 4)
    while not (large.output_ids and small.output_ids):
        compute(scheduler)
    submit(scheduler, 2, [3] * 32, priority=1)
    plan = scheduler.schedule(9)
    assert (plan.preempted, admissions(plan)) == ((large,), [(2, 0, False)])
    scheduler.check()


@pytest.mark.parametrize("page_tokens", [4, None])
def test_with_states_no_request_waits_for_anothers_tokens(page_tokens):
    """The shared part could not be continued: the state behind it does not exist."""
    scheduler = make(page_tokens=page_tokens, has_states=True)
    for number in range(3):
        submit(scheduler, number, [*PROMPT, number])
    assert admissions(scheduler.schedule(1)) == [(n, 0, False) for n in range(3)]
    assert scheduler.slots.shared_slots == 0


@pytest.mark.parametrize(("window_from", "shared"), [(0, 40), (32, 40), (33, 0)])
@pytest.mark.parametrize("page_tokens", [4, None])
def test_a_prefix_is_shared_where_layers_with_a_window_are_complete(
    page_tokens, window_from, shared
):
    """A loaded turn may lack rows of such layers from before its window."""
    scheduler = make(page_tokens=page_tokens, attention_window=8)
    submit(scheduler, 0, [*PROMPT, 1], history_tokens=40)
    (admission,) = scheduler.schedule(1).admitted
    scheduler.announce(admission.request, 40, 2, layers_ready=NUM_LAYERS, window_from=window_from)
    compute(scheduler)
    submit(scheduler, 1, [*PROMPT, 2])
    assert [admissions(scheduler.schedule(4))[0][1:]] == [(shared, bool(shared))]


def test_a_page_that_others_fill_is_left_only_with_a_whole_window():
    """Later tokens are written elsewhere: nothing can continue where the page begins."""
    for window_from, found in ((0, 40), (33, 0)):
        scheduler = make(attention_window=8)
        first = submit(scheduler, 0, [*PROMPT, 1, 2], history_tokens=42)
        (admission,) = scheduler.schedule(1).admitted
        scheduler.announce(
            admission.request, 41, 2, layers_ready=NUM_LAYERS, window_from=window_from
        )
        compute(scheduler)
        scheduler.end(first, RequestEvent.FINISH, 4)
        assert scheduler.keep_resident(first, first.token_ids[:42], 4)
        scheduler.residents.note_boundary(first.key, 40)
        slots = scheduler.held_slots
        other = slots.share(scheduler.residents.get(first.key).holding, 44)
        again = Request(9, first.key, [*PROMPT, 1, 9], 8, 0, history_tokens=41)
        scheduler.submit(again)
        (admission,) = scheduler.schedule(5).admitted
        assert admission.resident_tokens == found
        slots.release(other)
