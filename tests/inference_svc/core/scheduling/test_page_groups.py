"""Pages of groups of layers, some of which have only a window's pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.page_groups import PLAIN, PageGroups, page_groups
from inference_svc.core.scheduling.paged_slots import PagedSlots
from tests.inference_svc.core.scheduling.test_held_slots import evictable_after, freed_by

GROUPS = PageGroups(num_full=1, num_windowed=2, window_pages=3)


def test_groups_have_room_for_a_window_wherever_it_begins():
    """A page more than its tokens fill, except for groups with a single one."""
    assert [page_groups(1, 1, rows, 4).window_pages for rows in (1, 2, 4, 5, 6, 9)] == [
        *(1, 2, 2, 2, 3, 3),
    ]
    for rows in range(1, 20):
        for first in range(12):
            touched = {token // 4 for token in range(first, first + rows)}
            assert len(touched) <= page_groups(1, 1, rows, 4).window_pages


def test_the_first_pages_are_those_of_the_first_tokens():
    """For groups with a window the fourth is in the first one's place."""
    pages = list(range(100, 111))
    assert [GROUPS.num_pages(count) for count in range(6)] == [0, 3, 6, 9, 10, 11]
    assert GROUPS.tables(pages) == [
        [100, 103, 106, 109, 110],
        [101, 104, 107, 101, 104],
        [102, 105, 108, 102, 105],
    ]
    assert GROUPS.tables(pages[:6]) == [[100, 103], [101, 104], [102, 105]]
    assert PLAIN.tables(pages) == [pages]


ANY = st.builds(PageGroups, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@given(groups=st.one_of(ANY, st.just(PLAIN)), count=st.integers(0, 12), more=st.integers(0, 6))
def test_tables_and_counts_agree(groups, count, more):
    """The place of a page determines its group."""
    num_pages = groups.num_pages(count)
    assert groups.count_in(num_pages) == count
    if more < groups.num_pages(count + 1) - num_pages:
        assert groups.count_in(num_pages + more) == count
    tables = groups.tables(range(num_pages))
    for group, table in enumerate(tables):
        assert table == [groups.position(group, index) for index in range(count)]
        is_windowed = group >= groups.num_full
        assert {groups.is_windowed(at) for at in table} <= {is_windowed}
    assert {at for table in tables for at in table} == set(range(num_pages))


def test_long_sequences_take_fewer_slots():
    """A page of each group for the window's tokens, then only those without a window."""
    slots = PagedSlots(30, 4, GROUPS)
    assert [slots.needed_for(tokens) for tokens in (0, 1, 4, 5, 12, 13, 40)] == [
        *(0, 12, 12, 24, 36, 40, 64)
    ]
    for tokens in range(0, 44, 4):
        assert slots.tokens_in(slots.needed_for(tokens)) == tokens
    one = slots.take(slots.needed_for(40))
    assert (one.num_slots, len(one.pages), slots.free_slots) == (64, 16, 56)
    slots.trim(one, 5)
    assert (one.num_slots, slots.free_slots) == (24, 96)
    slots.check([one])


def share_pages():
    """Make two holdings of 40 tokens, and one that shares the first 24 of the first's."""
    slots = PagedSlots(60, 4, GROUPS)
    one = slots.take(slots.needed_for(24))
    other = slots.share(one, 24, window_from=18)
    return slots, one, other


def test_sharing_saves_pages_without_a_window_only():
    """A holding that shares a window's pages will need as many of its own."""
    slots, one, other = share_pages()
    # pages 4 and 5: the third belongs to another holding
    assert (one.num_slots, other.num_slots) == (48, 40)
    assert slots.needed_for(24) - slots.shared_slots(24) == 24
    assert slots.free_slots == 240 - 48 - 16
    slots.extend(other, slots.needed_for(24) - other.num_slots)
    assert slots.free_slots == 240 - 48 - 24
    tables, others = (GROUPS.tables(each.pages) for each in (one, other))
    assert tables[0] == others[0]
    for ours, theirs in zip(tables[1:], others[1:], strict=True):
        assert ours[4:] == theirs[4:]
        assert ours[3] != theirs[3]
    slots.check([one, other])
    assert freed_by(slots, [one]) == freed_by(slots, [other]) == 24
    assert freed_by(slots, [one, other]) == 72
    slots.remove_user(one)
    assert slots.evictable_slots == evictable_after(slots, [], None) == 24
    assert evictable_after(slots, [other], None) == 72
    assert evictable_after(slots, [other], one) == 24
    slots.check([one, other])


def test_a_writer_to_a_shared_page_of_a_window_gets_another():
    """There always is one, and its old contents are not needed."""
    slots, one, other = share_pages()
    slots.extend(other, slots.needed_for(24) - other.num_slots)
    slots.extend(one, slots.needed_for(40) - one.num_slots)
    slots.take(slots.free_slots // 4 * 4)
    assert slots.free_slots == 0
    before, others = GROUPS.tables(one.pages), GROUPS.tables(other.pages)
    assert not slots.make_window_private(one, 24, 28), (
        "page 6 lies where page 3 lay: nobody else has that"
    )
    assert slots.make_window_private(one, 28, 29)
    after = GROUPS.tables(one.pages)
    for ours, old, theirs in zip(after[1:], before[1:], others[1:], strict=True):
        assert ours[7] != old[7] == theirs[4]
        assert ours[5] == theirs[5]
    with pytest.raises(AssertionError, match="half full"):
        slots.make_window_private(one, 33, 34)
    assert slots.free_slots == 0


def test_a_windows_pages_stay_shared_until_they_are_written():
    """The holder is a resident that continues behind a token."""
    slots, one, other = share_pages()
    slots.extend(other, slots.needed_for(24) - other.num_slots)
    assert slots.num_shared(one, 20) == 4
    free = slots.free_slots
    copies = slots.make_private(one, 20, window_from=17)
    assert {slots.groups.is_windowed(copy.position) for copy in copies} == {True, False}
    assert len(copies) == 3  # page 5, of all groups; page 4 stays
    assert slots.free_slots == free - 4
    assert all(isinstance(copy, PageCopy) for copy in copies)
    slots.check([one, other])


def test_a_loads_pages_are_counted_once():
    """For the turn while it has them; then for the load until it ends."""
    slots = PagedSlots(30, 4, GROUPS)
    one = slots.take(36)
    held = slots.hold(one)
    assert slots.free_slots == 120 - 36
    assert not slots.make_window_private(one, 0, 12)
    slots.check([one, held])
    slots.release(one)
    assert slots.free_slots == 120 - 36
    slots.release(held)
    assert slots.free_slots == 120
    slots.check([])
