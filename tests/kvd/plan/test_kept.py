"""Which tokens a session with states or windows keeps, and how many can be loaded."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.plan.hardware import Costs, Hardware, ReplayOptions
from kvd.plan.kept import MOST_KEPT, NOTHING, Kept, most_states, most_windowed
from kvd.plan.trace import Session, Turn

FIRST = Turn(new_tokens=10, output_tokens=6, history_tokens=0, think_s=0.0)
SECOND = Turn(new_tokens=2, output_tokens=4, history_tokens=16, think_s=0.0)
THIRD = Turn(new_tokens=3, output_tokens=5, history_tokens=22, think_s=0.0)
COSTS = Costs([], Hardware(0, 0), ReplayOptions("lru", 10, state_bytes=1000))
WINDOW = 4
WINDOWED = Costs(
    [],
    Hardware(0, 0),
    ReplayOptions("lru", 10, windowed_bytes_per_token=100, attention_window=WINDOW),
)
PLAIN = Costs([], Hardware(0, 0), ReplayOptions("lru", 10))

turns = st.builds(
    Turn,
    new_tokens=st.integers(0, 9),
    output_tokens=st.integers(0, 9),
    history_tokens=st.integers(0, 40),
    think_s=st.just(0.0),
)


def test_the_first_state_and_the_newest_two_stay():
    """Each turn leaves one before its answer and one at its end."""
    kept = NOTHING.with_states(FIRST, 16)
    assert kept == Kept(16, (10, 16))
    kept = kept.with_states(SECOND, 22)
    assert kept == Kept(22, (10, 18, 22))
    kept = kept.with_states(THIRD, 30)
    assert kept == Kept(30, (10, 25, 30))
    assert COSTS.kept_bytes(kept) == 30 * 10 + 3 * 1000
    assert COSTS.new_bytes(kept, Kept(22, (10,))) == (8 * 10, 2 * 1000)


def test_a_turn_without_new_tokens_leaves_one_state():
    """There is one state per position, and none before the first token."""
    assert NOTHING.with_states(Turn(10, 0, 0, 0.0), 10) == Kept(10, (10,))
    assert NOTHING.with_states(Turn(0, 4, 0, 0.0), 4) == Kept(4, (4,))


def test_a_state_is_useful_at_its_position_only():
    """A history that ends between two is loaded up to the earlier one; before the first, none."""
    kept = Kept(22, (10, 18, 22))
    for history_tokens, loadable in ((25, 22), (22, 22), (21, 18), (18, 18), (17, 10), (9, 0)):
        assert COSTS.loadable(kept.within(history_tokens)) == loadable
        assert PLAIN.loadable(Kept(22).within(history_tokens)) == min(22, history_tokens)


def test_dropped_tokens_have_no_state():
    """Of 22 tokens 12 are stored: the states behind them are gone."""
    assert Kept(16, (10, 16)).with_states(SECOND, 12) == Kept(12, (10,))
    assert NOTHING.with_states(SECOND, 12) == Kept(12, ())


def test_sessions_of_several_turns_keep_three():
    """A first turn leaves two; a session that starts over loses the old ones."""
    assert most_states([Session(0.0, (FIRST,)), Session(0.0, (FIRST, SECOND, THIRD))]) == 2 + 3
    assert most_states([Session(0.0, (FIRST, Turn(3, 3, 0, 0.0)))]) == 2


@given(st.lists(turns, min_size=1))
def test_states_lie_within_the_kept_tokens(found: list[Turn]):
    """In order, at most three; and a longer history never loads less."""
    kept = NOTHING
    for turn in found:
        kept = kept.within(turn.history_tokens).with_states(turn, turn.kept_tokens)
        assert list(kept.ends) == sorted(set(kept.ends))
        assert len(kept.ends) <= MOST_KEPT
        assert all(0 < position <= kept.num_tokens for position in kept.ends)
        loads = [COSTS.loadable(kept.within(tokens)) for tokens in range(kept.num_tokens + 1)]
        assert loads == sorted(loads)
        assert all(load <= tokens for tokens, load in enumerate(loads))


def test_the_newest_two_windows_and_the_first_stay():
    """Overlapping windows take common tokens once."""
    kept = NOTHING.with_windows(FIRST, 16)
    assert kept == Kept(16, (10, 16))
    assert kept.num_windowed(WINDOW) == 3 * WINDOW  # [0, 4), [6, 10), [12, 16)
    assert kept.num_windowed(6) == 16  # [0, 6), [4, 10), [10, 16)
    kept = kept.with_windows(SECOND, 22)
    assert kept == Kept(22, (18, 22))
    assert kept.num_windowed(WINDOW) == 4 + 4 + 4
    assert WINDOWED.kept_bytes(kept) == 22 * 10 + 12 * 100
    assert WINDOWED.loaded_bytes(22) == 22 * 10 + WINDOW * 100
    assert WINDOWED.loaded_bytes(3) == 3 * 10 + 3 * 100
    assert WINDOWED.held_bytes(22) == 22 * (10 + 100)
    assert WINDOWED.new_bytes(kept, Kept(16, ())) == (6 * 10, 8 * 100)


def test_a_history_is_loaded_up_to_a_window():
    """One that ends before the newest windows has that of its first tokens."""
    kept = Kept(22, (18, 22))
    for history_tokens, loadable in ((30, 22), (22, 22), (21, 18), (17, WINDOW), (3, 3), (0, 0)):
        assert WINDOWED.loadable(kept.within(history_tokens)) == loadable


def test_a_truncated_session_keeps_its_windows():
    """At new positions: the session is as long as its rest."""
    assert Kept(16, (10, 16)).with_windows(SECOND, 12) == Kept(12, (8, 12))
    assert NOTHING.with_windows(SECOND, 3) == Kept(3, (3,))


def test_the_largest_size_with_windows():
    """Short sessions keep all tokens, long ones those of three windows."""
    assert most_windowed([Session(0.0, (FIRST, SECOND))], WINDOW) == 12
    assert most_windowed([Session(0.0, (FIRST,)), Session(0.0, (FIRST,))], 100) == 32


@given(st.lists(turns, min_size=1), st.integers(1, 50))
def test_windows_lie_within_the_kept_tokens(found: list[Turn], window: int):
    """Never more than all tokens, and always the last one's."""
    kept = NOTHING
    for turn in found:
        kept = kept.within(turn.history_tokens).with_windows(turn, turn.kept_tokens)
        assert min(kept.num_tokens, window) <= kept.num_windowed(window) <= kept.num_tokens
        assert kept.num_windowed(window) <= MOST_KEPT * window
        assert kept.last_window_end(window) == kept.num_tokens
