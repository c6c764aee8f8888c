"""One turn of a session at a time, first come, first served."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.core.errors import QueueFullError, SessionBusyError
from inference_svc.core.session_turns import SessionTurns
from shared.session_key import SessionKey

KEYS = [SessionKey("default", "m", name) for name in ("a", "b", "c")]


def test_a_busy_session_refuses_unless_the_turn_waits():
    """A second turn is refused with session_busy, or queued."""
    turns = SessionTurns(max_turns=9, max_turns_per_session=9)
    assert turns.enter(KEYS[0], "first", wait=False)
    with pytest.raises(SessionBusyError):
        turns.enter(KEYS[0], "second", wait=False)
    assert not turns.enter(KEYS[0], "third", wait=True)
    assert turns.leave(KEYS[0], "first") == "third"


def test_a_waiting_turn_that_gives_up_starts_nobody():
    """Only the end of the running turn lets another run."""
    turns = SessionTurns(max_turns=9, max_turns_per_session=9)
    for name in ("first", "second", "third"):
        turns.enter(KEYS[0], name, wait=True)
    assert turns.leave(KEYS[0], "second") is None
    assert turns.leave(KEYS[0], "first") == "third"


class SessionTurnsMachine(RuleBasedStateMachine):
    """Against a plain list per session."""

    def __init__(self):
        super().__init__()
        self.turns = SessionTurns(max_turns=6, max_turns_per_session=3)
        self.model = {key: [] for key in KEYS}
        self.next_turn = 0

    @rule(key=st.sampled_from(KEYS), wait=st.booleans())
    def enter(self, key, wait):
        queue, total = self.model[key], sum(map(len, self.model.values()))
        self.next_turn += 1
        try:
            runs = self.turns.enter(key, self.next_turn, wait=wait)
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
TestSessionTurnsMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
