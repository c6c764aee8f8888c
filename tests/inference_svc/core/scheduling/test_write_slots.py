"""The write ring's slots: how many there are, which requests get them, and how long others wait."""

from dataclasses import replace

import pytest

from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.step_plan import SchedulerLimits, StepResult, plan_chunks
from inference_svc.core.scheduling.write_slots import (
    LEAST_WRITE_SLOTS,
    STALL_LIMIT_NS,
    WriteSlots,
    write_slots_for,
)
from shared.types.session_key import SessionKey
from tests.inference_svc.core.scheduling.test_scheduler import make, submit

LIMITS = SchedulerLimits(
    max_running=4,
    max_loading=4,
    max_waiting=4,
    kv_slots=100,
    write_slots=16,
    step_tokens=12,
    mixed_step_tokens=12,
    answer_tokens=100,
    keeps_residents=True,
)


def running(number, num_tokens, computed=0, *, is_saved=True):
    """Make a request in the batch; with all but one token computed it decodes."""
    one = Request(number, SessionKey("t", "0f", str(number)), list(range(num_tokens)), 9, 0)
    one.state, one.capacity_tokens, one.is_saved = RequestState.RUNNING, 50, is_saved
    one.computed_tokens = computed
    one.num_sampled = int(computed == num_tokens - 1)
    return one


def sizes(planned):
    chunks, stalled = planned
    return [(c.request.number, c.num_tokens) for c in chunks], [r.number for r in stalled]


def test_the_lowest_slots_are_granted_first_and_come_back():
    """So the tokens of one step are mostly adjacent."""
    slots = WriteSlots(6)
    first, second = slots.take(2), slots.take(3)
    assert (first, second, slots.num_free) == ([0, 1], [2, 3, 4], 1)
    slots.release(first)
    assert slots.take(3) == [0, 1, 5]
    slots.check()
    with pytest.raises(AssertionError, match="0 free"):
        slots.take(1)


def test_a_slot_returned_twice_is_detected():
    """Two turns would overwrite each other's tokens."""
    slots = WriteSlots(4)
    slots.release([2])
    with pytest.raises(AssertionError):
        slots.check()


def test_the_ring_has_the_size_that_saving_needs():
    """Two steps and their waiting groups, whatever the memory; little memory has a share."""
    assert write_slots_for(10**6, 512, 8, group_tokens=512, block_tokens=64) == 1024 + 8 * 512
    assert write_slots_for(10**6, 512, 8, group_tokens=1, block_tokens=64) == 1024 + 8 * 64
    assert write_slots_for(3072, 512, 8, group_tokens=512, block_tokens=64) == 614
    assert write_slots_for(32, 512, 8, group_tokens=512, block_tokens=64) == LEAST_WRITE_SLOTS


def test_eight_turns_of_304_tokens_run_together_in_3072():
    """A token of a turn takes one slot, saved or not."""
    ring = write_slots_for(3072, 512, 8, group_tokens=512, block_tokens=64)
    scheduler = make(
        kv_slots=3072 - ring, write_slots=ring, max_running=8, max_loading=8, max_waiting=8
    )
    for number in range(8):
        submit(scheduler, number, prompt_tokens=240, max_tokens=65)
    assert len(scheduler.schedule(1).admitted) == 8


def test_prompts_get_half_of_the_ring_and_answers_the_rest():
    """One step's tokens are stored while the next one computes."""
    prompts = [running(1, 30), running(2, 30)]
    assert sizes(plan_chunks(prompts, LIMITS, 16)) == ([(1, 8)], [2])
    answers = [running(3, 10, computed=9), running(4, 10, computed=9)]
    assert sizes(plan_chunks([*prompts, *answers], LIMITS, 16)) == ([(3, 1), (4, 1), (1, 8)], [2])
    assert sizes(plan_chunks([*prompts, *answers], LIMITS, 5)) == ([(3, 1), (4, 1), (1, 3)], [2])
    assert sizes(plan_chunks([*prompts, *answers], LIMITS, 1)) == ([(3, 1)], [4, 1, 2])


def test_a_prompt_is_cut_at_its_marks():
    """The state behind a chunk can be stored; others get the chunk's unused tokens."""
    marked = running(1, 30)
    marked.marks = (3, 25)
    assert sizes(plan_chunks([marked, running(2, 30)], LIMITS, 16)) == ([(1, 3), (2, 5)], [])
    marked.computed_tokens = 3
    assert sizes(plan_chunks([marked], LIMITS, 16)) == ([(1, 8)], [])
    marked.computed_tokens = 25
    assert sizes(plan_chunks([marked], LIMITS, 16)) == ([(1, 5)], [])


def test_unsaved_requests_need_no_room():
    """Without a ring no request is left out."""
    batch = [running(1, 30, is_saved=False), running(2, 10, computed=9, is_saved=False)]
    assert sizes(plan_chunks(batch, replace(LIMITS, write_slots=0), 0)) == ([(2, 1), (1, 12)], [])


def test_a_prompt_without_tokens_in_the_step_is_not_stalled():
    """It waits for its turn, not for room."""
    assert sizes(
        plan_chunks([running(1, 12), running(2, 30)], replace(LIMITS, write_slots=99), 99)
    ) == (
        [(1, 12)],
        [],
    )


def announce_all(scheduler, plan):
    for admission in plan.admitted:
        scheduler.announce(admission.request, 0, 2, layers_ready=4, is_saved=True)


def test_a_request_that_stalls_for_too_long_continues_unsaved():
    """A stalled kvd costs a later turn a recomputation, but no answer."""
    scheduler = make(write_slots=4)
    one = submit(scheduler, 1, prompt_tokens=6)
    announce_all(scheduler, scheduler.schedule(1))
    plan = scheduler.schedule(3)
    held = scheduler.write_slots.take(4)
    assert [c.num_tokens for c in plan.chunks] == [2]
    scheduler.apply(StepResult(plan.chunks, {}), 4)
    plan = scheduler.schedule(5)
    assert (plan.chunks, plan.stalled, plan.unsaved) == ((), (one,), ())
    assert plan.wake_ns == 5 + STALL_LIMIT_NS
    assert scheduler.schedule(plan.wake_ns - 1).wake_ns == plan.wake_ns
    plan = scheduler.schedule(plan.wake_ns)
    assert (plan.stalled, plan.unsaved) == ((), (one,))
    assert [c.num_tokens for c in plan.chunks] == [4]
    assert scheduler.stalled_s == 1.0
    scheduler.write_slots.release(held)


def test_a_wait_lasts_while_tokens_are_stored():
    """Only a ring that makes no progress is given up."""
    scheduler = make(write_slots=4)
    one = submit(scheduler, 1, prompt_tokens=6)
    announce_all(scheduler, scheduler.schedule(1))
    held = scheduler.write_slots.take(4)
    plan = scheduler.schedule(5)
    assert (plan.stalled, plan.wake_ns) == ((one,), 5 + STALL_LIMIT_NS)
    scheduler.write_slots.release(held)
    held = scheduler.write_slots.take(4)
    plan = scheduler.schedule(9)
    assert (plan.stalled, plan.wake_ns) == ((one,), 9 + STALL_LIMIT_NS)
    scheduler.write_slots.release(held)
    plan = scheduler.schedule(19)
    assert [c.num_tokens for c in plan.chunks] == [2]
    assert (plan.wake_ns, scheduler.stalled_s) == (None, 14e-9)
    assert scheduler.schedule(30).stalled == ()
    assert scheduler.stalled_s == 14e-9


def test_a_release_of_no_slots_is_no_progress():
    """A turn that ends without tokens in the ring leaves the others' patience as it is."""
    slots = WriteSlots(4)
    assert slots.note_stall(5, is_stalled=True) == 5 + STALL_LIMIT_NS
    slots.release([])
    assert slots.note_stall(9, is_stalled=True) == 5 + STALL_LIMIT_NS
    slots.release(slots.take(1))
    assert slots.note_stall(12, is_stalled=True) == 12 + STALL_LIMIT_NS


def drafts_of(planned):
    return [(chunk.request.number, len(chunk.draft)) for chunk in planned[0]]


@pytest.mark.parametrize(
    ("free", "is_saved", "expected"),
    [
        (16, True, [(1, 5), (2, 5)]),
        (9, True, [(1, 5), (2, 2)]),
        (2, True, [(1, 0), (2, 0)]),  # every answer's next token comes first
        (1, True, [(1, 0)]),
        (0, False, [(1, 5), (2, 5)]),
    ],
)
def test_drafts_take_the_room_that_next_tokens_leave(free, is_saved, expected):
    """No answer waits for another's draft."""
    batch = [running(number, 10, 9, is_saved=is_saved) for number in (1, 2)]
    drafts = {number: list(range(5)) for number in (1, 2, 77)}
    planned = plan_chunks(batch, LIMITS, free, drafts)
    assert drafts_of(planned) == expected
    assert all(c.num_tokens == 1 and c.num_fed == 1 + len(c.draft) for c in planned[0])


def test_a_draft_ends_where_the_slots_end():
    """The longest answer's last token needs none, nor does its draft."""
    one = running(1, 10, 9)
    one.capacity_tokens = 12
    (chunk,), _ = plan_chunks([one], LIMITS, 16, {1: [5, 6, 7, 8]})
    assert chunk.draft == (5, 6)
    one.capacity_tokens = 10
    (chunk,), _ = plan_chunks([one], LIMITS, 16, {1: [5, 6, 7, 8]})
    assert chunk.draft == ()


def test_prompts_have_no_drafts():
    (chunk,), _ = plan_chunks([running(1, 7)], LIMITS, 16, {1: [5, 6]})
    assert (chunk.num_tokens, chunk.draft) == (7, ())
