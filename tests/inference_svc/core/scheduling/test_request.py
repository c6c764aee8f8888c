"""A request's states, and the rows it asks for."""

import pytest

from inference_svc.core.scheduling.request import (
    REQUEST_MOVES,
    Request,
    RequestEvent,
    RequestState,
)
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "0f", "s")


def request(prompt_tokens=10, max_tokens=4) -> Request:
    return Request(1, KEY, list(range(prompt_tokens)), max_tokens, arrived_ns=0)


@pytest.mark.parametrize("state", list(RequestState))
def test_states_follow_the_table(state):
    """Any other event violates an invariant."""
    for event in RequestEvent:
        moved = request()
        moved.state = state
        if event in REQUEST_MOVES.events(state):
            moved.move(event)
            assert moved.state is REQUEST_MOVES.after(state, event)
        else:
            with pytest.raises(
                AssertionError, match=f"{event} cannot happen to what is {state.value}"
            ):
                moved.move(event)
            assert moved.state is state


def test_an_admitted_request_may_return_to_the_queue():
    """Loading, ready and running requests can wait again; ended ones cannot."""
    back = {
        state
        for state in RequestState
        for event in REQUEST_MOVES.events(state)
        if REQUEST_MOVES.after(state, event) is RequestState.WAITING
    }
    assert back == {RequestState.LOADING, RequestState.READY, RequestState.RUNNING}


def test_the_last_token_of_the_longest_answer_needs_no_row():
    """It is never fed."""
    assert request(prompt_tokens=10, max_tokens=4).full_capacity_tokens == 13


@pytest.mark.parametrize(
    ("answer_tokens", "num_outputs", "wanted"),
    [
        (16, 0, 25),  # room for an ordinary answer
        (1000, 0, 109),  # never more than the longest needs
        (0, 0, 10),  # never less than it has
        (16, 40, 89),  # an answer that has outgrown its room gets twice as much
    ],
)
def test_room_for_an_answer_grows_with_it(answer_tokens, num_outputs, wanted):
    """It asks for the known tokens and an ordinary answer, then for twice its answer."""
    grown = request(prompt_tokens=10, max_tokens=100)
    for token in range(num_outputs):
        grown.append(token)
    assert grown.capacity_to_admit(answer_tokens) == wanted


def test_only_a_request_that_needs_more_rows_has_outgrown_them():
    """A full sequence KV suffices if it is as large as the longest answer needs."""
    full = request(prompt_tokens=10, max_tokens=4)
    full.capacity_tokens = full.computed_tokens = 12
    assert full.has_outgrown_slots
    full.capacity_tokens = full.computed_tokens = 13
    assert not full.has_outgrown_slots


def test_the_last_token_of_a_prompt_is_not_decoding():
    """It is one token to compute as well, but of a prompt: none was sampled."""
    new = request(prompt_tokens=10)
    new.computed_tokens = 9
    assert not new.is_decoding


def test_a_recomputed_answer_is_not_decoding_until_its_last_token():
    """After a preemption, sampled tokens may have to be fed like a prompt."""
    again = request(prompt_tokens=10)
    for token in (1, 2, 3):
        again.append(token)
    again.computed_tokens = 10
    assert not again.is_decoding
    again.computed_tokens = 12
    assert again.is_decoding
    assert again.output_ids == [1, 2, 3]


def running(computed, window_tokens=12, max_tokens=100) -> Request:
    """Make a request of 10 prompt tokens, 6 of them history, and some sampled ones."""
    one = Request(1, KEY, list(range(10)), max_tokens, 0, window_tokens, history_tokens=6)
    for token in range(10, computed + 1):
        one.append(token)
    one.computed_tokens, one.state = computed, RequestState.RUNNING
    one.capacity_tokens = min(one.capacity_to_admit(2), computed)
    return one


def test_a_window_limits_the_rows():
    """However long the answer may become."""
    assert running(10, window_tokens=12, max_tokens=100).full_capacity_tokens == 12
    assert running(10, window_tokens=12, max_tokens=2).full_capacity_tokens == 11
    assert running(10, window_tokens=12).capacity_to_admit(50) == 12


def test_a_request_overflows_when_its_window_is_full_and_it_continues():
    """That differs from having outgrown its rows."""
    outgrown, full = running(11), running(12)
    assert (outgrown.has_outgrown_slots, outgrown.is_overflowing) == (True, False)
    assert (full.has_outgrown_slots, full.is_overflowing) == (False, True)
    assert not running(12, max_tokens=3).is_overflowing, "its answer is complete"
    full.state = RequestState.WAITING
    assert not full.is_overflowing


def test_a_discard_keeps_every_count_right():
    """Prompt, history and computed tokens are the remaining ones; sampled ones stay counted."""
    cut = running(12)
    cut.state = RequestState.WAITING
    cut.discard([(0, 2), (5, 7), (9, 11)])
    assert cut.token_ids == [2, 3, 4, 7, 8, 11, 12]
    assert cut.output_ids == [11, 12]
    assert (cut.prompt_tokens, cut.history_tokens, cut.computed_tokens) == (5, 3, 6)
    assert (cut.num_sampled, cut.uncomputed_tokens) == (3, 1)
    assert cut.is_decoding
    assert cut.full_capacity_tokens == 12
    cut.discard([(0, 6)])
    assert (cut.prompt_tokens, cut.token_ids, cut.num_sampled) == (0, [12], 3)


@pytest.mark.parametrize(
    ("state", "ranges"),
    [(RequestState.RUNNING, [(0, 1)]), (RequestState.WAITING, [(0, 13)])],
)
def test_a_running_request_and_the_last_token_cannot_be_cut(state, ranges):
    """A step must not use dropped rows, and a token has to be fed."""
    cut = running(12)
    cut.state = state
    with pytest.raises(AssertionError):
        cut.discard(ranges)


def test_a_chunk_ends_at_the_next_mark():
    """Passed marks are dropped; a discard moves later ones."""
    one = request(prompt_tokens=10)
    one.marks = (3, 7)
    assert one.chunk_tokens == 3
    one.computed_tokens = 3
    assert one.chunk_tokens == 4
    one.computed_tokens = 7
    assert one.chunk_tokens == one.uncomputed_tokens == 3
    one.computed_tokens = 5
    one.discard(((1, 3),))
    assert one.marks == (1, 5)
    assert one.computed_tokens == 3
    assert one.chunk_tokens == 2
