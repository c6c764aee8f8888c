"""The accounts of rows."""

import pytest

from inference_svc.core.scheduling.held_slots import ContiguousSlots
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Residents
from inference_svc.core.scheduling.slot_budget import SlotBudget
from shared.types.session_key import SessionKey


def request(number):
    return Request(number, SessionKey("t", "0f", str(number)), [1, 2], 4, arrived_ns=0)


def budget():
    slots = ContiguousSlots(100)
    return SlotBudget(slots, Residents(slots))


def test_rows_go_from_requests_to_residents_and_back():
    """In place, a resident's rows become the next request's; nothing is counted twice."""
    slots = ContiguousSlots(100)
    residents = Residents(slots)
    rows, one = SlotBudget(slots, residents), request(1)
    rows.reserve(one, 30)
    assert rows.account.free_slots == 70
    rows.become_resident(one, [1, 2], 5)
    assert (rows.account.free_slots, rows.reserved_slots, residents.num_slots) == (70, 0, 30)
    assert rows.take_resident(one).token_ids == (1, 2)
    assert (rows.account.free_slots, rows.reserved_slots, residents.num_slots) == (70, 30, 0)
    rows.check()


def test_tokens_stay_in_place_unless_another_request_fills_their_page():
    """The rows behind them will be written; whole pages are never copied."""
    slots = PagedSlots(20, 4)
    residents = Residents(slots)
    rows, one, other = SlotBudget(slots, residents), request(1), request(2)
    rows.reserve(one, 16)
    rows.become_resident(one, range(14), 5)
    resident = residents.get(one.key)
    assert [rows.tokens_in_place(resident, n) for n in (14, 9, 8, 6)] == [14, 9, 8, 6]
    rows.share(other, resident, 8)
    assert [rows.tokens_in_place(resident, n) for n in (14, 9, 8, 6, 4)] == [14, 9, 8, 4, 4]
    assert [rows.growth_in_place(resident, n, 16) for n in (14, 8, 4, 0)] == [0, 0, 4, 8]
    assert rows.growth_in_place(resident, 8, 21) == 8
    assert (rows.shared_slots, rows.account.free_slots, rows.pages(other)) == (8, 64, (0, 1))
    rows.release_kv(other)
    rows.check()


def test_a_load_keeps_the_pages_of_an_ended_request():
    """They are free once it ends, and not before."""
    slots = PagedSlots(20, 4)
    rows, one = SlotBudget(slots, Residents(slots)), request(1)
    rows.reserve(one, 16)
    with rows.hold_pages(one):
        rows.release_kv(one)
        assert rows.account.free_slots == 64
        rows.check()
    assert rows.account.free_slots == 80


def test_releasing_nothing_frees_nothing():
    """A caller that gives a request up need not know its state."""
    rows, one = budget(), request(1)
    rows.release_kv(one)
    assert rows.account.free_slots == 100


def test_the_budget_cannot_be_overdrawn():
    """A bug in the planner fails here, not in memory."""
    rows = budget()
    rows.reserve(request(1), 50)
    with pytest.raises(AssertionError, match="more is reserved"):
        rows.reserve(request(2), 51)


def test_a_request_has_one_sequence_kv():
    """A bug in the planner fails here, too."""
    rows = budget()
    rows.reserve(request(1), 50)
    with pytest.raises(AssertionError, match="has a sequence's KV"):
        rows.reserve(request(1), 5)
