"""What turns wait for is fetched in the order of asking, once, and not too late."""

from kvd.following.wanted import MOST, STALE_S, Wanted
from tests.kvd.following.sessions import A, B
from tests.synthetic_engine import key_of


def test_each_is_fetched_once_at_a_time():
    """What is asked for meanwhile is on its way already; afterwards it may be asked for again."""
    wanted = Wanted()
    for key in (A, B, A):
        wanted.add(key, 0.0)
    assert len(wanted) == 2
    assert wanted.next(1.0) == A
    wanted.add(A, 1.0)
    assert [wanted.next(1.0), wanted.next(1.0)] == [B, None]
    wanted.done(A)
    wanted.add(A, 2.0)
    assert wanted.next(2.0) == A


def test_what_was_asked_for_long_ago_is_of_no_use():
    """Its turn has computed it."""
    wanted = Wanted()
    wanted.add(A, 0.0)
    wanted.add(B, 1.0)
    assert wanted.next(STALE_S) == B


def test_of_too_many_the_oldest_go():
    """Turns wait for the newest longest."""
    wanted = Wanted()
    for number in range(MOST + 3):
        wanted.add(key_of(str(number)), 0.0)
    assert len(wanted) == MOST
    assert wanted.next(0.0) == key_of("3")


def test_each_ask_is_owed_an_answer():
    """By whoever fetches it, or by nobody else: what is given up, and what comes already."""
    wanted = Wanted()
    wanted.add(A, 0.0)
    assert wanted.next(0.0) == A
    wanted.add(A, 1.0)
    assert wanted.take_answers() == {}, "who looks for it will say"
    wanted.on_found(A)
    wanted.add(A, 2.0)
    assert wanted.take_answers() == {A: True}
    assert wanted.take_answers() == {}
    wanted.done(A)
    wanted.add(A, 3.0)
    assert wanted.take_answers() == {}
    assert wanted.next(3.0 + STALE_S) is None
    assert wanted.take_answers() == {A: False}
    for number in range(MOST + 1):
        wanted.add(key_of(str(number)), 0.0)
    assert wanted.take_answers() == {key_of("0"): False}
