"""SessionOrder: places are kept up to date whatever changes between two looks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction.session_order import SessionOrder
from shared.session_key import SessionKey

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
@given(changes)
def test_the_order_is_that_of_the_newest_warmths(changes):
    """Few changes between two looks or many: what is in the order comes sorted, each once."""
    warmths = {key: (5, index) for index, key in enumerate(KEYS)}
    order = SessionOrder(lambda key: warmths[key])
    members = set()
    for what, index, warmth in changes:
        key = KEYS[index]
        if what == "enter":
            order.enter(key)
            members.add(key)
        elif what == "change":
            warmths[key] = (warmth, index)
            order.change(key)
        elif what == "leave":
            order.leave(key)
            members.discard(key)
        else:
            expected = sorted(members, key=warmths.__getitem__)
            assert list(order.between(*EVERYTHING)) == expected
            above = [key for key in expected if (3,) <= warmths[key] < (7,)]
            assert list(order.between((3,), (7,))) == above
        assert (key in order) == (key in members)
        assert len(order) == len(members)
