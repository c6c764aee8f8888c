"""Counted slots, and slots on pages that several holdings share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.scheduling.held_slots import ContiguousSlots, PageCopy
from inference_svc.core.scheduling.paged_slots import PagedSlots
from tests.sampled import examples


def freed_by(slots, holdings):
    """How many slots would become free if all of these were released."""
    tally = slots.tally_released()
    for holding in holdings:
        tally.add(holding)
    return tally.num_slots


def evictable_after(slots, spared, kept):
    """How many slots would be evictable if `spared` were residents, and `kept` stayed."""
    tally = slots.tally_evictable(kept)
    for holding in spared:
        tally.add(holding)
    return tally.num_slots


@pytest.mark.parametrize("slots", [ContiguousSlots(40), PagedSlots(10, 4)])
def test_unneeded_slots_may_be_evicted(slots):
    """A resident's slots count as evictable, until a turn or a copy needs them again."""
    one, other = slots.take(12), slots.take(8)
    assert (slots.free_slots, slots.evictable_slots) == (20, 0)
    slots.remove_user(one)
    assert slots.evictable_slots == 12
    assert evictable_after(slots, [other], None) == 20
    assert evictable_after(slots, [other], one) == 8
    slots.add_user(one)
    slots.add_user(one)
    slots.remove_user(one)
    assert slots.evictable_slots == 0, "another needs it still"
    assert evictable_after(slots, [], one) == 0
    assert freed_by(slots, [one, other]) == 20
    slots.check([one, other])
    slots.release(one)
    slots.remove_user(other)
    slots.release(other)
    assert (slots.free_slots, slots.evictable_slots) == (40, 0)
    slots.check([])


@pytest.mark.parametrize("slots", [ContiguousSlots(40), PagedSlots(10, 4)])
def test_slots_cannot_be_overdrawn(slots):
    """A bug in the planner fails here, not in memory."""
    slots.take(36)
    with pytest.raises(AssertionError, match="more is reserved"):
        slots.take(8)
    holding = slots.take(4)
    slots.remove_user(holding)
    with pytest.raises(AssertionError, match="nobody needs"):
        slots.remove_user(holding)


def test_slots_side_by_side_are_one_piece():
    """They are neither shared nor cut."""
    slots = ContiguousSlots(40)
    one = slots.take(12)
    slots.trim(one, 3)
    assert (slots.needed_for(5), one.num_slots, slots.make_private(one, 0)) == (5, 12, [])
    assert slots.num_shared(one, 0) == 0


def test_holdings_have_whole_pages():
    """Room for one more token is one more page."""
    slots = PagedSlots(10, 4)
    assert [slots.needed_for(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    one = slots.take(20)
    slots.trim(one, 9)
    assert (one.num_slots, slots.free_slots) == (12, 28)
    slots.extend(one, 4)
    assert one.pages == [0, 1, 2, 3], "side by side, as long as they can be"
    slots.check([one])


def test_the_pages_of_a_sequence_are_adjacent_where_possible():
    """The page behind its last one is taken if it is free, whatever is free below."""
    slots = PagedSlots(10, 1)
    low, middle = slots.take(3), slots.take(2)
    slots.release(low)
    slots.extend(middle, 2)
    assert middle.pages == [3, 4, 5, 6]
    assert slots.take(4).pages == [0, 1, 2, 7]


def test_shared_pages_are_counted_once():
    """The first holding frees its own pages; the last one frees the shared ones."""
    slots = PagedSlots(10, 4)
    one = slots.take(20)
    other = slots.share(one, 12)
    slots.extend(other, 8)
    assert other.pages[:3] == one.pages[:3]
    assert (slots.free_slots, one.num_slots, other.num_slots) == (12, 20, 20)
    assert (freed_by(slots, [one]), freed_by(slots, [one, other])) == (8, 28)
    tally = slots.tally_released()
    for holding, expected in ((one, 8), (other, 28)):
        tally.add(holding)
        assert tally.num_slots == expected
    tally.remove(one)
    assert tally.num_slots == freed_by(slots, [other])
    slots.remove_user(one)
    assert slots.evictable_slots == 8, "the other needs three of its pages"
    assert evictable_after(slots, [other], None) == 28
    assert evictable_after(slots, [other], one) == 8
    slots.check([one, other])
    slots.release(one)
    assert slots.free_slots == 20
    slots.release(other)
    assert slots.free_slots == 40


def test_a_writer_to_a_shared_page_gets_another():
    """From the first written token on; the other holdings keep theirs."""
    slots = PagedSlots(10, 4)
    one = slots.take(16)
    other = slots.share(one, 12)
    assert slots.num_shared(one, 5) == 8
    assert slots.make_private(one, 5) == [PageCopy(1, 1, 4), PageCopy(2, 2, 5)]
    assert (one.pages, other.pages) == ([0, 4, 5, 3], [0, 1, 2])
    assert slots.num_shared(one, 4) == 0
    assert slots.make_private(one, 4) == []
    slots.check([one, other])
    slots.remove_user(one)
    assert slots.make_private(one, 0) == [PageCopy(0, 0, 6)]
    slots.check([one, other])


def test_pages_that_are_freed_often_are_found():
    """The list of possibly free pages does not grow for ever."""
    slots = PagedSlots(6, 1)
    for _ in range(100):
        one, other = slots.take(2), slots.take(3)
        slots.release(one)
        slots.release(other)
    slots.check([])
    assert sorted(slots.take(6).pages) == list(range(6))


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["take", "share", "extend", "own", "trim", "need", "spare", "release"]),
        st.integers(0, 99),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(acts=ACTS, page_tokens=st.integers(1, 5))
@settings(max_examples=examples(200), deadline=None)
def test_any_order_of_events_keeps_the_accounts(acts, page_tokens):
    """Free, needed and evictable slots follow from the holdings, also those that are foretold."""
    slots, holdings = PagedSlots(12, page_tokens), []
    for act, chosen, num_tokens in acts:
        if act == "take":
            wanted = min(slots.needed_for(num_tokens), slots.free_slots)
            holdings.append(slots.take(wanted))
        elif holdings:
            holding = holdings[chosen % len(holdings)]
            do(act, slots, holdings, holding, num_tokens)
        slots.check(holdings)
    spared = [holding for holding in holdings if holding.num_users == 1]
    kept = next((holding for holding in holdings if not holding.num_users), None)
    expected = evictable_after(slots, spared, kept)
    for holding in spared:
        slots.remove_user(holding)
    if kept is not None:
        slots.add_user(kept)
    assert slots.evictable_slots == expected


def do(act, slots, holdings, holding, num_tokens):
    """Return the operations that a holding allows."""
    if act == "share":
        holdings.append(slots.share(holding, num_tokens))
    elif act == "extend" and holding.num_users:
        slots.extend(holding, min(slots.needed_for(num_tokens), slots.free_slots))
    elif act == "own" and slots.num_shared(holding, num_tokens) <= slots.free_slots:
        slots.make_private(holding, num_tokens)
        assert slots.num_shared(holding, num_tokens) == 0
    elif act == "trim":
        slots.trim(holding, num_tokens)
    elif act == "need":
        slots.add_user(holding)
    elif act == "spare" and holding.num_users:
        slots.remove_user(holding)
    elif act == "release":
        expected = slots.free_slots + freed_by(slots, [holding])
        holdings.remove(holding)
        slots.release(holding)
        assert slots.free_slots == expected
