"""Overflow policies: enough is dropped, from allowed places, and protected tokens stay."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.context import Context
from inference_svc.core.errors import InputTooLongError, InvalidTurnError
from inference_svc.core.ranges import num_in
from inference_svc.core.truncation import (
    MAX_SINK_TOKENS,
    FrameTokens,
    OverflowPolicy,
    TurnWindow,
    plan_truncation,
)

NO_SINKS = OverflowPolicy(sink_tokens=0)
OPEN, CLOSE = 1, 2  # special tokens; others are text
TEXT = 9


def plan(policy, droppable_tokens, excess_tokens, system_tokens=0, frame_starts=()):
    return plan_truncation(
        policy,
        droppable_tokens=droppable_tokens,
        system_tokens=system_tokens,
        frame_starts=frame_starts,
        excess_tokens=excess_tokens,
    )


@pytest.mark.parametrize(
    ("policy", "excess", "expected"),
    [
        (NO_SINKS, 10, ((0, 50),)),
        (replace(NO_SINKS, ratio=0.25), 10, ((0, 25),)),
        (NO_SINKS, 70, ((0, 70),)),  # more than half, if half is not enough
        (NO_SINKS, 101, ()),
        (OverflowPolicy(), 10, ((4, 52),)),
        (OverflowPolicy(), 96, ((4, 100),)),
        (OverflowPolicy(), 97, ()),
        (OverflowPolicy("sinks"), 10, ((4, 52),)),
        (OverflowPolicy("sinks", sink_tokens=30, ratio=1.0), 10, ((30, 100),)),
        (OverflowPolicy("sinks", sink_tokens=200), 10, ()),
        (OverflowPolicy("reject"), 1, ()),
    ],
)
def test_plain_text_may_be_cut_anywhere(policy, excess, expected):
    """The oldest part is dropped, after the protected beginning."""
    assert plan(policy, 100, excess) == expected


@pytest.mark.parametrize(
    ("policy", "excess", "expected"),
    [
        (OverflowPolicy(), 1, ((10, 60),)),  # 55 is the middle of the droppable part
        (OverflowPolicy(), 51, ((10, 90),)),
        (OverflowPolicy(), 85, ()),
        (OverflowPolicy(sink_tokens=12), 1, ((12, 60),)),  # in the middle of a message
        (OverflowPolicy(drop_system=True), 1, ((4, 60),)),
        (replace(NO_SINKS, drop_system=True), 1, ((0, 60),)),
        (OverflowPolicy(split_frames=True), 1, ((10, 55),)),
    ],
)
def test_a_chat_is_cut_where_messages_begin(policy, excess, expected):
    """System message of 10 tokens, then messages; the last one is incomplete."""
    assert plan(policy, 100, excess, 10, [0, 10, 30, 60, 90]) == expected


policies = st.builds(
    OverflowPolicy,
    st.sampled_from(["half", "sinks"]),
    st.floats(0.01, 1.0),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
)


@given(policies, st.integers(0, 200), st.integers(1, 200), st.integers(0, 30), st.data())
def test_protected_tokens_stay(policy, num_tokens, excess, system_tokens, data):
    """Enough is dropped, in one range; no system message, sink or frame is cut."""
    system_tokens = min(system_tokens, num_tokens)
    starts = sorted(data.draw(st.sets(st.integers(0, max(0, num_tokens - 1)), max_size=10)))
    ranges = plan(policy, num_tokens, excess, system_tokens, starts)
    if not ranges:
        return
    ((start, end),) = ranges
    assert excess <= end - start
    assert end <= num_tokens
    assert policy.drop_system or start >= system_tokens
    assert start >= policy.sink_tokens
    if starts and not policy.split_frames:
        assert {start, end} <= {0, system_tokens, policy.sink_tokens, *starts}
        assert end != policy.sink_tokens or end in {system_tokens, *starts}


def test_all_invalid_values_are_listed():
    """One message lists them."""
    with pytest.raises(InvalidTurnError, match=r"most.*ratio 0.*sink_tokens -1"):
        OverflowPolicy("most", 0.0, -1).check()


# ------------------------------------------------------------------------------------------ frames


def test_frames_begin_at_special_tokens():
    """At those that open a message; without any, after those that close an answer."""
    tokens, sent = [OPEN, TEXT, CLOSE, OPEN, TEXT], b"\1" * 5
    assert FrameTokens(frozenset({OPEN}), frozenset({CLOSE})).starts(tokens, sent) == [0, 3]
    assert FrameTokens(frozenset(), frozenset({CLOSE})).starts(tokens, sent) == [3]
    assert FrameTokens().starts(tokens, sent) == []
    assert FrameTokens(frozenset({OPEN})).last_start(tokens) == 3
    assert FrameTokens(frozenset({OPEN})).last_start([TEXT]) == 0
    answered = b"\1\1\1\0\0"  # generated tokens begin no message
    assert FrameTokens(frozenset({OPEN})).starts(tokens, answered) == [0]
    assert FrameTokens(frozenset(), frozenset({CLOSE})).starts(tokens, bytes(5)) == []


# -------------------------------------------------------------------------------------- one turn


def window(policy=None, max_tokens=20, has_max_tokens=True, opening=()):
    frames = FrameTokens(frozenset(opening))
    return TurnWindow(policy or OverflowPolicy(), 100, 25, max_tokens, has_max_tokens, frames)


def text(num_tokens):
    return context_of((TEXT,) * num_tokens)


def context_of(token_ids, system_tokens=0):
    sent = b"\1" * len(token_ids)
    return Context(tuple(token_ids), len(token_ids), system_tokens, framed=sent)


def test_nothing_is_dropped_while_the_reserve_has_room():
    """The reserve is at most the answer's length."""
    assert window().at_start(text(50), 30) == ()
    assert window().at_start(text(51), 30) == ((4, 28),)
    assert window(max_tokens=1000).at_start(text(45), 30) == ()
    assert window(max_tokens=1000).at_start(text(46), 30) == ((4, 25),)


def test_a_turn_without_room_for_the_reserve_is_accepted():
    """One token must have room: the rest of the answer drops more later."""
    assert window().at_start(text(0), 99) == ()
    assert window(NO_SINKS).at_start(text(40), 95) == ((0, 36),)
    with pytest.raises(InputTooLongError, match=r"0 tokens of history, 100 new .* window of 100"):
        window().at_start(text(40), 100)


def test_reject_refuses_turns_that_do_not_fit():
    """As if nothing could be dropped; an answer of unspecified length is cut short."""
    reject = OverflowPolicy("reject")
    assert window(reject).at_start(text(50), 30) == ()
    with pytest.raises(
        InputTooLongError, match=r"50 tokens of history, 31 new ones and max_tokens 20"
    ):
        window(reject).at_start(text(50), 31)
    assert window(reject, has_max_tokens=False).at_start(text(50), 49) == ()
    assert window(reject, has_max_tokens=False).answer_tokens(99) == 1
    assert window(max_tokens=1000).answer_tokens(99) == 1000


def test_a_whole_history_may_be_dropped_between_turns_but_not_its_system_message():
    """The last message is complete then."""
    context = context_of((OPEN, TEXT, OPEN, *[TEXT] * 57), system_tokens=2)
    assert window(opening=[OPEN]).at_start(context, 90) == ((2, 60),)
    with pytest.raises(InputTooLongError, match="2 tokens of history"):
        window(opening=[OPEN]).at_start(context, 98)


def test_during_an_answer_the_tail_stays():
    """Half of a text is dropped; an answer that fills its window alone must stay."""
    assert window().mid_turn(text(101), 3) == ((4, 51),)
    assert window(OverflowPolicy(ratio=1.0)).mid_turn(text(101), 3) == ((4, 98),)
    chat = context_of((OPEN, *[TEXT] * 40, OPEN, *[TEXT] * 59))
    assert window(opening=[OPEN]).mid_turn(chat, 1) == ((4, 41),)
    assert window(NO_SINKS, opening=[OPEN]).mid_turn(chat, 1) == ((0, 41),)
    alone = context_of((OPEN, *[TEXT] * 100))
    assert window(opening=[OPEN]).mid_turn(alone, 1) == ()
    split = OverflowPolicy(split_frames=True)
    assert window(split, opening=[OPEN]).mid_turn(alone, 1) == ((4, 52),)


def test_an_answer_is_not_cut_token_by_token():
    """The cut is as long as the reserve, or an eighth of the window; else the answer ends."""
    few = OverflowPolicy(ratio=0.001)
    for system_tokens, expected in [
        (20, ((20, 45),)),  # the reserve
        (75, ((75, 100),)),
        (80, ((80, 92),)),  # an eighth
        (88, ((88, 100),)),
        (89, ()),
        (99, ()),
    ]:
        context = context_of((TEXT,) * 101, system_tokens)
        assert window(few, max_tokens=1000).mid_turn(context, 1) == expected
    last = context_of((TEXT,) * 101, 20)
    assert window(few, max_tokens=1).mid_turn(last, 1) == ((20, 21),)  # one more token is needed


def test_sinks_are_at_most_half_of_the_window():
    """However many are configured, a session continues."""
    many = OverflowPolicy(sink_tokens=65536)
    assert window(many).at_start(text(80), 20) == ((50, 70),)
    assert window(many).mid_turn(text(101), 1) == ((50, 75),)
    assert window(many).sink_tokens == 50


def test_sinks_are_dropped_with_the_last_token_that_attended_to_them():
    """They are kept for tokens computed with them: without these, they go, too."""
    assert window().at_start(text(80), 75) == ((4, 79),)
    assert window().at_start(text(80), 77) == ((4, 62),)  # less than the reserve has room
    for new_tokens in (76, 95, 96, 99):
        assert window().at_start(text(80), new_tokens) == ((0, 80),)
    framed = context_of((OPEN, *[TEXT] * 39, OPEN, *[TEXT] * 39))
    assert window(opening=[OPEN]).at_start(framed, 30) == ((4, 40),)
    assert window(opening=[OPEN]).at_start(framed, 75) == ((0, 80),)
    assert window(opening=[OPEN]).at_start(replace(framed, system_tokens=2), 75) == ((2, 80),)


@given(
    policies,
    st.lists(st.sampled_from([OPEN, TEXT, TEXT, TEXT]), max_size=150),
    st.integers(1, 120),
    st.integers(0, 10),
)
def test_an_accepted_turn_fits(policy, token_ids, new_tokens, system_tokens):
    """With any cut, prompt and one more token fit; otherwise the turn is refused."""
    context = context_of(token_ids, min(system_tokens, len(token_ids)))
    one = window(policy, opening=[OPEN])
    try:
        ranges = one.at_start(context, new_tokens)
    except InputTooLongError:
        return
    assert len(token_ids) - num_in(ranges) + new_tokens + 1 <= 100


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (OverflowPolicy(ratio=1e-9), ""),
        (OverflowPolicy(ratio=1.0), ""),
        (OverflowPolicy(ratio=0.0), "ratio 0"),
        (OverflowPolicy(ratio=1.0001), "ratio"),
        (OverflowPolicy(sink_tokens=0), ""),
        (OverflowPolicy(sink_tokens=MAX_SINK_TOKENS), ""),
        (OverflowPolicy(sink_tokens=MAX_SINK_TOKENS + 1), "sink_tokens"),
        (OverflowPolicy(sink_tokens=-1), "sink_tokens -1"),
    ],
)
def test_the_bounds_of_a_policys_values(policy, problem):
    """The bounds themselves are valid, except for a ratio of zero."""
    if not problem:
        policy.check()
        return
    with pytest.raises(InvalidTurnError, match=problem):
        policy.check()


def test_a_prompt_fits_with_one_token_of_the_answer():
    """Or all of it, where nothing may be dropped and the client has given its length."""
    for policy, has_max_tokens, room_tokens in (
        (OverflowPolicy(), True, 1),
        (OverflowPolicy("reject"), False, 1),
        (OverflowPolicy("reject"), True, 20),
    ):
        one = window(policy, has_max_tokens=has_max_tokens)
        one.check_fits(40, 60 - room_tokens)
        with pytest.raises(InputTooLongError) as refused:
            one.check_fits(40, 61 - room_tokens)
        assert ("set overflow.policy to oldest" in refused.value.remedy) is one.is_rigid


def test_a_tiny_window_reserves_one_token():
    """A share of it would be zero; and a cut makes room for one."""
    tiny = TurnWindow(NO_SINKS, 3, 25, 20, True, FrameTokens())
    assert tiny.at_start(text(2), 0) == ()
    assert tiny.at_start(text(3), 0) == ((0, 2),)
    assert tiny.mid_turn(text(4), 3) == ((0, 1),)


def test_with_a_rigid_window_nothing_is_dropped():
    """Only one token of the answer is reserved then."""
    reject = OverflowPolicy("reject")
    assert window(reject, max_tokens=20).mid_turn(text(101), 1) == ()
    assert window(reject, has_max_tokens=False).at_start(text(99), 0) == ()


def test_special_tokens_of_a_template_are_of_two_kinds():
    """Those that open messages, and those that close answers."""
    assert FrameTokens(frozenset({OPEN}), frozenset({CLOSE})).ids == {OPEN, CLOSE}


def test_a_refusal_has_the_requested_length():
    """One more token, or the given number."""
    reject = OverflowPolicy("reject")
    for max_tokens, wanted in ((1, "1 more"), (2, "max_tokens 2")):
        with pytest.raises(
            InputTooLongError, match=rf"50 tokens of history, 50 new ones and {wanted} exceed"
        ):
            window(reject, max_tokens=max_tokens).check_fits(50, 50)
