"""Sessions that turns wait for are fetched in order of request, once, and not too late."""

from kvd.following.wanted import MOST, STALE_S, Wanted
from tests.kvd.following.sessions import A, B
from tests.synthetic_engine import key_of


def test_a_session_is_fetched_once_at_a_time():
    """Further requests are served by the active fetch; afterwards it may be requested again."""
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


def test_an_old_request_is_dropped():
    """Its turn has computed the history."""
    wanted = Wanted()
    wanted.add(A, 0.0)
    wanted.add(B, 1.0)
    assert wanted.next(STALE_S) == B


def test_the_oldest_of_too_many_requests_are_dropped():
    """The newest turns wait longest."""
    wanted = Wanted()
    for number in range(MOST + 3):
        wanted.add(key_of(str(number)), 0.0)
    assert len(wanted) == MOST
    assert wanted.next(0.0) == key_of("3")


def test_each_request_gets_one_answer():
    """By its fetch, also if that is given up or active already."""
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
