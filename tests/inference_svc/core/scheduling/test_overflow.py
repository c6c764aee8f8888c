"""A request whose window is full: it waits in place until its context is cut, and continues."""

import pytest

from inference_svc.core.scheduling.request import RequestEvent, RequestState
from shared.types.queue_feed import QueueFeed
from tests.inference_svc.core.scheduling.test_scheduler import (
    admitted_numbers,
    announce,
    make,
    run,
    sizes,
    step,
    submit,
)

OLDEST_HALF = [(0, 6)]


def overflow_window(scheduler, number=1, **attributes):
    """Make a request that has just filled its window of 12, and return the plan that says so."""
    full = run(scheduler, number, max_tokens=100, window_tokens=12, **attributes)
    while not full.is_overflowing:
        step(scheduler)
    return full, scheduler.schedule(9)


def test_a_full_window_returns_a_request_with_its_rows_protected():
    """Its sequence KV is its session's resident, which no other request may evict."""
    scheduler = make(kv_slots=30)
    full, plan = overflow_window(scheduler)
    assert plan.overflowed == (full,)
    assert plan.preempted == plan.chunks == plan.admitted == ()
    assert full.state is RequestState.WAITING
    assert (full.num_overflows, full.num_preemptions) == (1, 0)
    assert scheduler.residents.is_busy(full.key)
    assert not scheduler.residents.drop(full.key)
    scheduler.check()


def test_it_continues_in_place_after_its_context_is_cut_and_compacted():
    """Not before, and no request behind it is admitted first."""
    scheduler = make(kv_slots=30)
    full, _ = overflow_window(scheduler)
    submit(scheduler, 2)
    scheduler.truncate(full, OLDEST_HALF)
    assert admitted_numbers(scheduler.schedule(10)) == []
    assert scheduler.residents.end_compaction(full.key, full.token_ids[: full.computed_tokens])
    plan = scheduler.schedule(11)
    (admission, _) = plan.admitted
    assert admission.request is full
    assert admission.in_place
    assert admission.resident_tokens == full.computed_tokens == 6
    announce(scheduler, plan)
    loaded_tokens = full.loaded_tokens
    _, plan = step(scheduler)
    assert (1, 1) in sizes(plan)
    assert full.loaded_tokens == loaded_tokens, "what it found at first counts"
    assert full.computed_tokens == 7


def test_without_its_rows_it_is_admitted_to_load_them():
    """With a new sequence KV, from wherever they are."""
    scheduler = make()
    full, _ = overflow_window(scheduler)
    scheduler.truncate(full, OLDEST_HALF)
    assert not scheduler.residents.end_compaction(full.key, [])
    plan = scheduler.schedule(10)
    assert [(a.request, a.resident_tokens) for a in plan.admitted] == [(full, 0)]


def test_others_are_stepped_meanwhile():
    """Their answers continue, step by step."""
    scheduler = make(kv_slots=300)
    other = run(scheduler, 2, max_tokens=100)
    full, plan = overflow_window(scheduler)
    for _ in range(5):
        assert sizes(plan) == [(2, 1)]
        _, plan = step(scheduler)
    assert other.state is RequestState.RUNNING
    assert full.state is RequestState.WAITING


def test_a_higher_priority_goes_first():
    """It keeps its place among its equals."""
    scheduler = make(kv_slots=300)
    full, _ = overflow_window(scheduler)
    high = submit(scheduler, 3, priority=1)
    assert scheduler.schedule(10).admitted[0].request is high
    assert full.state is RequestState.WAITING


def test_a_request_that_ends_with_its_window_does_not_overflow():
    """The last token of an answer needs no row."""
    scheduler = make()
    last = run(scheduler, 1, max_tokens=3, window_tokens=12)
    while last.num_sampled < 3:
        step(scheduler)
    assert last.computed_tokens == 12
    assert not last.is_overflowing
    scheduler.end(last, RequestEvent.FINISH, 8)
    assert scheduler.schedule(9).overflowed == ()


def test_a_context_longer_than_its_window_is_not_submitted():
    """The caller cuts it first."""
    scheduler = make()
    with pytest.raises(AssertionError, match="cuts the context"):
        submit(scheduler, 1, prompt_tokens=13, window_tokens=12)


def test_a_cut_that_drops_nothing_violates_an_invariant():
    """The request would overflow again at once, for ever."""
    scheduler = make()
    full, _ = overflow_window(scheduler)
    with pytest.raises(AssertionError, match="for ever"):
        scheduler.truncate(full, [])


def test_a_cancelled_request_leaves_the_queue_during_compaction():
    """The resident remains until the compaction has released it."""
    scheduler = make()
    full, _ = overflow_window(scheduler)
    scheduler.truncate(full, OLDEST_HALF)
    scheduler.end(full, RequestEvent.CANCEL, 10)
    scheduler.release_kv(full)
    again = submit(scheduler, 2, session=1)
    assert scheduler.schedule(11).admitted == ()
    assert not scheduler.residents.end_compaction(full.key, [])
    assert scheduler.schedule(12).admitted[0].request is again
    scheduler.check()


def test_the_store_gets_the_shorter_history():
    """It reads the remaining blocks ahead, not the old ones."""
    scheduler = make()
    full, _ = overflow_window(scheduler, history_tokens=8)
    scheduler.truncate(full, OLDEST_HALF)
    assert isinstance(scheduler.feed, QueueFeed)
    (job,) = scheduler.feed.next_update(10).change.waiting
    assert job.history_tokens == full.history_tokens == 2
