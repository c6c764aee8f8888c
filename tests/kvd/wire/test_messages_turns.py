"""Recent turns on the wire."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.core.records.records import TierStats
from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import MAX_TURNS, RecordedTurn
from kvd.wire.messages import TURNS_PER_MESSAGE, recent_turns_messages, recorded_turns
from shared.types.units import NS_PER_S
from tests.synthetic_engine import small_layout

TIERS = (TierStats(Tier.DRAM, 4096, 0, 0), TierStats(Tier.SSD, 8192, 0, 0))
NOW_NS = 1000 * NS_PER_S
_COUNT = st.integers(0, 1 << 30)


def _messages(turns, ttl_s=None):
    messages = recent_turns_messages(turns, small_layout(), TIERS, "lru", ttl_s, NOW_NS)
    return list(messages)


@st.composite
def _turns(draw):
    arrived, started, ended = sorted(draw(st.integers(0, NOW_NS)) for _ in range(3))
    counts = [draw(_COUNT) for _ in range(4)]
    asked, is_ended = draw(st.booleans()), draw(st.booleans())
    return RecordedTurn(1, 2, arrived, started, ended, *counts, is_asked=asked, is_ended=is_ended)


@given(st.lists(_turns(), max_size=5))
def test_a_turn_round_trips(turns) -> None:
    """Except for times, which are relative to the oldest turn."""
    (message,) = _messages(turns)
    oldest_ns = min((turn.arrived_ns for turn in turns), default=0)
    for turn, back in zip(turns, recorded_turns(message.turns), strict=True):
        assert abs(back.arrived_ns - (turn.arrived_ns - oldest_ns)) < 1000
        assert abs(back.started_ns - (turn.started_ns - oldest_ns)) < 1000
        assert abs(back.ended_ns - (turn.ended_ns - oldest_ns)) < 1000
        assert (back.wanted_tokens, back.dram_tokens, back.ssd_tokens, back.stored_tokens) == (
            turn.wanted_tokens,
            turn.dram_tokens,
            turn.ssd_tokens,
            turn.stored_tokens,
        )
        assert (back.session, back.turn, back.is_asked) == (turn.session, turn.turn, turn.is_asked)
        assert back.is_ended == turn.is_ended


def test_a_message_describes_the_daemon() -> None:
    """Even without a turn."""
    (message,) = _messages([])
    layout = small_layout()
    assert (message.layout, message.model) == (layout.fingerprint, layout.model)
    assert (message.block_tokens, message.block_bytes) == (16, layout.block_bytes)
    assert (message.dram_bytes, message.ssd_bytes) == (4096, 8192)
    assert (message.policy, message.ttl_s, message.max_turns) == ("lru", 0.0, MAX_TURNS)
    assert _messages([], 60.0)[0].ttl_s == 60


def test_the_size_of_messages_is_bounded() -> None:
    """A long log comes in parts, each with the description of the daemon."""
    turn = RecordedTurn(1, 1, 0, 0, 0, 0, 0, 0, 1, is_asked=True)
    messages = _messages([turn] * (2 * TURNS_PER_MESSAGE + 1))
    assert [len(message.turns) for message in messages] == [TURNS_PER_MESSAGE] * 2 + [1]
    assert {message.dram_bytes for message in messages} == {4096}
