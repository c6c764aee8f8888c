"""One turn of a session at a time, first come, first served."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.core.errors import QueueFullError, SessionBusyError
from inference_svc.core.session_turns import MAX_RETRY_S, MAX_RETURNS, MIN_PACE_S, SessionTurns
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S
from tests.sampled import examples

KEYS = [SessionKey("default", "m", name) for name in ("a", "b", "c")]


def session_turns(max_turns=9, max_turns_per_session=9, retry_after_s=0.5):
    return SessionTurns(max_turns, max_turns_per_session, lambda: retry_after_s)


def refusal(turns, key, now_ns=0):
    with pytest.raises(QueueFullError) as refused:
        turns.enter(key, "refused", now_ns, wait=True)
    return refused.value


def test_a_busy_session_refuses_unless_the_turn_waits():
    """A second turn is refused with session_busy, or queued."""
    turns = session_turns()
    assert turns.enter(KEYS[0], "first", 0, wait=False)
    with pytest.raises(SessionBusyError):
        turns.enter(KEYS[0], "second", 0, wait=False)
    assert not turns.enter(KEYS[0], "third", 0, wait=True)
    assert turns.leave(KEYS[0], "first") == "third"


def test_a_turn_that_leaves_does_not_block_the_next():
    """Its client need not wait for its end; the next one runs only then."""
    leaving = {"first"}
    turns = SessionTurns(9, 9, lambda: 0.5, leaving.__contains__)
    assert turns.enter(KEYS[0], "first", 0, wait=False)
    assert not turns.is_busy(KEYS[0])
    assert not turns.enter(KEYS[0], "second", 0, wait=False)
    assert turns.is_busy(KEYS[0])
    with pytest.raises(SessionBusyError):
        turns.enter(KEYS[0], "third", 0, wait=False)
    assert turns.leave(KEYS[0], "first") == "second"


def test_a_waiting_turn_that_gives_up_starts_no_other():
    """Only the end of the running turn lets another run."""
    turns = session_turns()
    for name in ("first", "second", "third"):
        turns.enter(KEYS[0], name, 0, wait=True)
    assert turns.leave(KEYS[0], "second") is None
    assert turns.leave(KEYS[0], "first") == "third"


def full(retry_after_s):
    turns = session_turns(max_turns=1, retry_after_s=retry_after_s)
    turns.enter(KEYS[0], "only", 0, wait=False)
    return turns


def test_refused_clients_learn_the_queue_and_a_time_to_retry_at():
    """Each later than the previous one, by the time in which a place becomes free."""
    turns = full(retry_after_s=0.5)
    first, second, third = (refusal(turns, KEYS[1]) for _ in range(3))
    assert first.details == {"queue_length": "1"}
    assert first.retryable
    assert "scheduler.max_turns" in first.remedy
    assert [error.retry_after_s for error in (first, second, third)] == [0.5, 1.0, 1.5]
    assert refusal(turns, KEYS[1], now_ns=NS_PER_S).retry_after_s == 1.0
    assert refusal(turns, KEYS[1], now_ns=9 * NS_PER_S).retry_after_s == 0.5


def test_refused_clients_are_spread_over_a_bounded_time():
    """However many and slow they are: those beyond the bound share its times with the others."""
    turns = full(retry_after_s=1.0)
    hints = [refusal(turns, KEYS[1]).retry_after_s for _ in range(25)]
    assert hints == [float(1 + number % MAX_RETRY_S) for number in range(25)]
    assert refusal(full(retry_after_s=1e6), KEYS[1]).retry_after_s == MAX_RETRY_S
    assert refusal(full(retry_after_s=0.0), KEYS[1]).retry_after_s == MIN_PACE_S


def test_the_number_of_remembered_tenants_is_bounded():
    """One more than the bound removes those whose clients may be back by now."""
    turns = full(retry_after_s=0.5)
    for number in range(MAX_RETURNS + 1):
        refusal(turns, SessionKey(f"tenant {number}", "m", "a"), now_ns=number * NS_PER_S)
        assert len(turns._returns) <= MAX_RETURNS
    again = refusal(turns, SessionKey(f"tenant {MAX_RETURNS}", "m", "a"), MAX_RETURNS * NS_PER_S)
    assert again.retry_after_s == 1.0, "it is remembered"


def test_a_full_session_has_its_own_bound():
    """More places in the service would not help."""
    turns = session_turns(max_turns_per_session=1)
    turns.enter(KEYS[0], "first", 0, wait=True)
    assert "max_turns_per_session" in refusal(turns, KEYS[0]).remedy
    assert turns.enter(KEYS[1], "third", 0, wait=True)


class SessionTurnsMachine(RuleBasedStateMachine):
    """Compares with a plain list per session."""

    def __init__(self):
        super().__init__()
        self.turns = session_turns(max_turns=6, max_turns_per_session=3)
        self.model = {key: [] for key in KEYS}
        self.next_turn = 0

    @rule(key=st.sampled_from(KEYS), wait=st.booleans())
    def enter(self, key, wait):
        queue, total = self.model[key], sum(map(len, self.model.values()))
        self.next_turn += 1
        try:
            runs = self.turns.enter(key, self.next_turn, 0, wait=wait)
        except SessionBusyError:
            assert queue
            assert not wait
        except QueueFullError:
            assert total == 6 or len(queue) == 3
        else:
            assert runs == (not queue)
            queue.append(self.next_turn)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def leave(self, data):
        key = data.draw(st.sampled_from([key for key in KEYS if self.model[key]]))
        queue = self.model[key]
        turn = data.draw(st.sampled_from(queue))
        was_first = queue[0] == turn
        queue.remove(turn)
        assert self.turns.leave(key, turn) == (queue[0] if was_first and queue else None)

    @invariant()
    def agrees(self):
        self.turns.check()
        assert {key: list(self.turns.of(key)) for key in KEYS} == self.model
        assert len(self.turns) == len(list(self.turns))


TestSessionTurnsMachine = SessionTurnsMachine.TestCase
TestSessionTurnsMachine.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None
)


def test_places_are_counted():
    """A session whose last turn has ended is forgotten, and its place is free."""
    turns = session_turns(max_turns=2)
    turns.enter(KEYS[0], "first", 0, wait=False)
    turns.enter(KEYS[1], "second", 0, wait=False)
    assert (len(turns), list(turns), turns.of(KEYS[1])) == (2, ["first", "second"], ("second",))
    assert turns.leave(KEYS[0], "first") is None
    turns.check()
    assert (len(turns), list(turns), turns.of(KEYS[0])) == (1, ["second"], ())
    assert turns.enter(KEYS[0], "third", 0, wait=False)
