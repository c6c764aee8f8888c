"""SessionOrder: places are up to date however many changes come between two looks."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction import session_order
from kvd.core.eviction.session_order import SessionOrder
from shared.types.session_key import SessionKey

KEYS = [SessionKey("t", "m", str(number)) for number in range(40)]
EVERYTHING = ((-1.0,), (1000.0,))
changes = st.lists(
    st.tuples(
        st.sampled_from(["enter", "change", "leave", "look"]),
        st.integers(0, len(KEYS) - 1),
        st.integers(0, 9),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(changes, st.sampled_from([10, inf]))
def test_the_order_is_that_of_the_newest_ranks(changes, most_at_once):
    """Few or many changes between two looks: sessions come sorted, each once."""
    ranks = {key: (5, index) for index, key in enumerate(KEYS)}
    order = SessionOrder(lambda key: ranks[key], most_at_once)
    members = set()
    for what, index, rank in changes:
        key = KEYS[index]
        if what == "enter":
            order.enter(key)
            members.add(key)
        elif what == "change":
            ranks[key] = (rank, index)
            order.change({key: None})
        elif what == "leave":
            order.leave(key)
            members.discard(key)
        else:
            expected = sorted(members, key=ranks.__getitem__)
            assert list(order.between(*EVERYTHING)) == expected
            above = [key for key in expected if (3,) <= ranks[key] < (7,)]
            assert list(order.between((3,), (7,))) == above
        assert (key in order) == (key in members)
        assert len(order) == len(members)


def test_many_changes_without_a_look_are_placed_in_steps(monkeypatch):
    """So the next look has little to do, however many changes came before it."""
    monkeypatch.setattr(session_order, "MOST_CHANGED", 10)
    num_placed = 0

    def rank_of(key):
        nonlocal num_placed
        num_placed += 1
        return (0.0, int(key.session_id))

    order = SessionOrder(rank_of)
    most = 0
    for number in range(1000):
        before = num_placed
        order.enter(SessionKey("t", "m", str(number)))
        order.settle_many()
        most = max(most, num_placed - before)
    assert most <= 10 * session_order.BULK_SHARE
    before = num_placed
    assert next(order.between(*EVERYTHING)).session_id == "0"
    assert num_placed - before < 10


def test_a_look_at_a_large_order_places_some_and_the_others_come_last(monkeypatch):
    """A whole queue is reported at once; later looks place the other sessions."""
    monkeypatch.setattr(session_order, "MOST_CHANGED", 10)
    ranks = {key: (0, index) for index, key in enumerate(KEYS)}
    order = SessionOrder(lambda key: ranks[key], most_at_once=len(KEYS) - 1)
    order.put(dict.fromkeys(KEYS))
    assert list(order.between(*EVERYTHING)) == KEYS
    queued, others = KEYS[:25], KEYS[25:]
    ranks.update({key: (1, -index) for index, key in enumerate(queued)})
    order.change(dict.fromkeys([*queued, SessionKey("t", "m", "a stranger")]))
    assert [key for key, _ in zip(order.between(*EVERYTHING), others, strict=False)] == others
    assert order.rank(queued[-1]) == (1, -24)
    assert sorted(order.downwards(*EVERYTHING)) == sorted(KEYS)
    assert list(order.between(*EVERYTHING)) == [*others, *reversed(queued)]
