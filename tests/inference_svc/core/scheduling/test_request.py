"""A request's states, and the rows it asks for."""

import pytest

from inference_svc.core.scheduling.request import TRANSITIONS, Request, RequestState
from shared.session_key import SessionKey

KEY = SessionKey("default", "0f", "s")


def request(prompt_tokens=10, max_tokens=4) -> Request:
    return Request(1, KEY, list(range(prompt_tokens)), max_tokens, arrived_ns=0)


@pytest.mark.parametrize("state", list(RequestState))
def test_states_move_along_the_table_only(state):
    """Every transition that is not in the table is a broken invariant."""
    for target in RequestState:
        moved = request()
        moved.state = state
        if target in TRANSITIONS[state]:
            moved.move(target)
            assert moved.state is target
        else:
            with pytest.raises(AssertionError):
                moved.move(target)


def test_a_request_goes_back_to_the_queue_from_wherever_it_is_admitted():
    """Loading, ready and running requests can wait again; ended ones cannot."""
    back = {state for state in RequestState if RequestState.WAITING in TRANSITIONS[state]}
    assert back == {RequestState.LOADING, RequestState.READY, RequestState.RUNNING}


def test_the_last_token_of_the_longest_answer_needs_no_row():
    """It is never fed."""
    assert request(prompt_tokens=10, max_tokens=4).full_capacity_tokens == 13


@pytest.mark.parametrize(
    ("answer_tokens", "num_outputs", "wanted"),
    [
        (16, 0, 25),  # room for an ordinary answer
        (1000, 0, 109),  # never more than the longest needs
        (0, 0, 10),  # never less than what is there
        (16, 40, 89),  # an answer that has outgrown its room gets as much again
    ],
)
def test_room_for_an_answer_grows_with_it(answer_tokens, num_outputs, wanted):
    """A request asks for what is known and an ordinary answer, then for twice its answer."""
    grown = request(prompt_tokens=10, max_tokens=100)
    grown.token_ids += range(num_outputs)
    assert grown.wanted_capacity(answer_tokens) == wanted


def test_only_a_request_that_wants_more_rows_has_outgrown_them():
    """A full slab is enough if it is as large as the longest answer needs."""
    full = request(prompt_tokens=10, max_tokens=4)
    full.capacity_tokens = full.computed_tokens = 12
    assert full.is_outgrown
    full.capacity_tokens = full.computed_tokens = 13
    assert not full.is_outgrown


def test_an_answer_that_is_computed_anew_is_not_decoding_until_its_last_token():
    """After a preemption, sampled tokens may have to be fed like a prompt."""
    again = request(prompt_tokens=10)
    again.token_ids += [1, 2, 3]
    again.computed_tokens = 10
    assert not again.is_decoding
    again.computed_tokens = 12
    assert again.is_decoding
    assert again.output_ids == [1, 2, 3]
