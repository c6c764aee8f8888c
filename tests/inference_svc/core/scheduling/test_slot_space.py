"""Contiguous slots: where pieces are placed, and that none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.scheduling.slot_space import SlotSpace


def largest_free(space):
    """Return the longest piece that could be allocated."""
    return max((length for _, length in space._holes), default=0)


def test_pieces_come_from_the_shortest_hole_that_is_long_enough():
    """Best fit keeps long holes for long sequences' KV."""
    space = SlotSpace(100)
    offsets = [space.allocate(length) for length in (10, 5, 20, 5, 60)]
    assert offsets == [0, 10, 15, 35, 40]
    space.free(0)
    space.free(15)
    assert space.allocate(8) == 0
    assert largest_free(space) == 20
    assert space.num_free == 22
    space.check()


def test_pieces_from_the_top_end_at_the_end_of_the_space():
    """Write buffers are kept apart from sequences' KV."""
    space = SlotSpace(100)
    assert space.allocate(10, from_top=True) == 90
    assert space.allocate(10, from_top=True) == 80
    assert space.allocate(10) == 0
    space.check()


def test_enough_scattered_rows_are_not_enough():
    """A piece is contiguous; the caller learns that there is no room."""
    space = SlotSpace(30)
    for _ in range(3):
        space.allocate(10)
    space.free(0)
    space.free(20)
    assert (space.num_free, largest_free(space)) == (20, 10)
    assert space.allocate(11) is None
    space.free(10)
    assert space.allocate(30) == 0


def test_a_space_of_no_rows_has_no_room():
    """Nothing fits, and nothing fails."""
    space = SlotSpace(0)
    assert (space.allocate(1), largest_free(space)) == (None, 0)
    space.check()


def test_freeing_twice_violates_an_invariant():
    """Slots that another piece has by now are not granted again."""
    space = SlotSpace(10)
    space.allocate(4)
    space.free(0)
    with pytest.raises(AssertionError, match="no piece begins at slot 0"):
        space.free(0)


calls = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@given(st.integers(0, 40), calls)
def test_it_agrees_with_a_row_by_row_model(num_slots, calls):
    """For any calls: pieces are free slots, None only without room, and holes are the rest."""
    space, owners, pieces = SlotSpace(num_slots), [None] * num_slots, []
    for name, number, from_top in calls:
        if name == "free" and pieces:
            offset = pieces.pop(number % len(pieces))
            space.free(offset)
            owners = [None if owner == offset else owner for owner in owners]
        elif name == "allocate":
            offset = space.allocate(number, from_top=from_top)
            starts = [
                start
                for start in range(num_slots - number + 1)
                if not any(owner is not None for owner in owners[start : start + number])
            ]
            assert (offset is None) == (not starts)
            if offset is not None:
                assert offset in starts
                assert not from_top or offset == max(starts)
                owners[offset : offset + number] = [offset] * number
                pieces.append(offset)
        space.check()
        assert space.num_free == owners.count(None)
        holes = "".join("#" if owner is not None else "." for owner in owners).split("#")
        assert largest_free(space) == max(map(len, holes))


@pytest.mark.parametrize(
    ("holes", "pieces", "message"),
    [
        ([(0, 4), (5, 5)], {}, "gap or overlap at slot 5"),
        ([(0, 6), (5, 5)], {}, "gap or overlap at slot 5"),
        ([(0, 0), (0, 10)], {}, "empty range at slot 0"),
        ([(0, 4), (4, 6)], {}, "holes touch at slot 4"),
        ([(0, 9)], {}, "are nobody's"),
        ([(0, 4)], {4: 5}, "are nobody's"),
        ([(0, 4)], {4: 6}, ""),
        ([], {0: 4, 4: 6}, ""),
    ],
)
def test_a_damaged_space_is_detected(holes, pieces, message):
    """Each slot is in one piece or one hole, and holes do not touch."""
    space = SlotSpace(10)
    space._holes, space._pieces = holes, pieces
    if not message:
        space.check()
        return
    with pytest.raises(AssertionError, match=message):
        space.check()
