"""The account of rows."""

import pytest

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Residents
from inference_svc.core.scheduling.slot_budget import SlotBudget
from shared.types.session_key import SessionKey


def request(number):
    return Request(number, SessionKey("t", "0f", str(number)), [1, 2], 4, arrived_ns=0)


def test_rows_go_from_requests_to_residents_and_back():
    """In place, a resident's rows become the next request's; nothing is counted twice."""
    residents = Residents()
    rows, one = SlotBudget(100, residents), request(1)
    rows.reserve(one, 30, 30)
    rows.open_write(one, 30)
    assert rows.free_slots == 40
    rows.become_resident(one, [1, 2], 5)
    assert (rows.free_slots, rows.reserved_slots, residents.num_slots) == (40, 30, 30)
    rows.release_write(one)
    assert rows.take_resident(one).token_ids == (1, 2)
    assert (rows.free_slots, rows.reserved_slots, residents.num_slots) == (70, 30, 0)
    rows.check()


def test_write_buffers_are_released_oldest_first():
    """A preempted request's earlier ones are being saved while its own is being filled."""
    rows, one = SlotBudget(100, Residents()), request(1)
    rows.reserve(one, 10, 30)
    rows.open_write(one, 30)
    rows.reserve(one, 0, 20)
    rows.open_write(one, 5)
    assert rows.num_writes(one) == 2
    assert rows.reserved_slots == 45
    rows.release_write(one)
    assert rows.reserved_slots == 15
    rows.release_write(one)
    rows.release_write(one)
    assert rows.reserved_slots == 10
    rows.check()


def test_releasing_what_is_not_held_frees_nothing():
    """Whoever gives a request up need not know how far it came."""
    rows, one = SlotBudget(100, Residents()), request(1)
    rows.open_write(one, 5)
    rows.release_kv(one)
    rows.release_write(one)
    assert rows.free_slots == 100


def test_a_promise_is_void_when_the_sequence_kv_goes():
    """Who ended before it was announced has no write buffer; those being saved stay."""
    rows, one = SlotBudget(100, Residents()), request(1)
    rows.reserve(one, 10, 30)
    rows.open_write(one, 20)
    rows.reserve(one, 0, 40)
    assert rows.reserved_slots == 70
    rows.release_kv(one)
    assert rows.reserved_slots == 20
    rows.check()


@pytest.mark.parametrize("kv_slots", [0, 50])
def test_the_budget_cannot_be_overdrawn(kv_slots):
    """A bug in the planner ends here, not in memory."""
    rows = SlotBudget(100, Residents())
    rows.reserve(request(1), 50, 0)
    with pytest.raises(AssertionError):
        rows.reserve(request(1 if kv_slots else 2), kv_slots, 51 - kv_slots)
