"""A session's context: tokens of turns, effects of discards, and places to continue from."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.compression import all_but, free_tokens, special_tokens
from inference_svc.core.context import Context, prompt_marks, replay
from inference_svc.core.ranges import merge_ranges
from inference_svc.core.transcript_format import Header, Transcript, decode_header, encode_header
from inference_svc.core.turn_record import COMPRESSION, OVERFLOW, Discard, TurnRecord, Usage
from shared.types.lineage import WHOLE


def turn(number=0, input_ids=(1, 2, 3), output_ids=(4, 5), uncomputed_tokens=1, **others):
    return TurnRecord(
        turn=number,
        request_id=f"r{number}",
        request_digest="d",
        input_ids=tuple(input_ids),
        output_ids=tuple(output_ids),
        pieces=("x",) * len(output_ids),
        logprobs=(),
        top_logprobs=(),
        uncomputed_tokens=uncomputed_tokens,
        finish_reason="stop",
        usage=Usage(),
        created_unix_s=0.0,
        **others,
    )


def test_input_and_answer_grow_a_context():
    """Input may begin messages unless it is raw text; an answer does not, and ends the context."""
    context = Context().with_input((1, 2, 3), system_tokens=2)
    assert (context.token_ids, context.system_tokens) == ((1, 2, 3), 2)
    assert (context.framed, context.ends_with_answer) == (b"\1\1\1", False)
    context = context.with_answer((4,)).with_answer((5, 6))
    assert (context.framed, context.answer_tokens) == (b"\1\1\1\0\0\0", 3)
    assert (context.computed_ids, context.ends_with_answer) == ((), True)
    context = context.with_input((7,), system_tokens=9, is_text=True)
    assert (context.system_tokens, context.framed[6:]) == (2, b"\0")
    assert not context.ends_with_answer


def test_the_last_tokens_of_a_turn_are_not_computed():
    """The model's part of it is an answer; an empty one counts the token before it."""
    context = Context().with_turn(turn(system_tokens=1))
    assert (context.token_ids, context.computed_tokens) == ((1, 2, 3, 4, 5), 4)
    assert (context.system_tokens, context.answer_tokens) == (1, 2)
    assert context.framed == b"\1\1\1\0\0"
    context = context.with_turn(turn(1, (6,), (), uncomputed_tokens=0, system_tokens=5))
    assert (context.computed_tokens, context.answer_tokens, context.system_tokens) == (6, 1, 1)
    context = context.with_turn(turn(2, (7,), (8, 9), is_text=True))
    assert (context.framed[5:], context.answer_tokens) == (b"\1\0\0\0", 2)


@pytest.mark.parametrize(
    ("reason", "after_tokens", "ranges", "left", "num_computed"),
    [
        (OVERFLOW, 0, ((0, 2),), (3, 4, 5, 1, 2, 3, 4, 5), 4),
        (OVERFLOW, 4, ((0, 5),), (1, 2, 3, 4, 5), 8),  # during its answer
        (COMPRESSION + "x", 5, ((0, 5), (6, 7)), (1, 3, 4, 5), 9),
    ],
)
def test_a_discard_within_a_turn_applies_at_its_time(
    reason, after_tokens, ranges, left, num_computed
):
    """Before the turn's input, during its answer, or after it; to the tokens of that time."""
    discard = Discard(ranges, after_tokens, reason)
    turns = (turn(), turn(1, discards=(discard,)))
    context = replay(turns)
    assert (context.token_ids, context.computed_tokens) == (left, len(left) - 1)
    computed = struct.pack(f"<{num_computed}I", *((1, 2, 3, 4, 5) * 2)[:num_computed])
    assert context.lineage == WHOLE.after(computed, ranges)
    assert context == Context().with_turn(turns[0]).with_turn(turns[1])
    assert context.answer_tokens == 2


def test_a_discard_shortens_each_part():
    """System message, computed tokens, answer: each loses its dropped tokens."""
    context = Context(tuple(range(10)), 8, 3, framed=b"\1" * 6 + b"\0" * 4, answer_tokens=4)
    left = context.with_discard(Discard(((1, 2), (5, 7), (9, 10))))
    assert left.token_ids == (0, 2, 3, 4, 7, 8)
    assert (left.computed_tokens, left.system_tokens, left.answer_tokens) == (5, 2, 2)
    assert left.framed == b"\1\1\1\1\0\0"


def test_overlapping_and_adjacent_ranges_are_merged():
    """In any order; separate ones stay separate."""
    assert merge_ranges([(4, 6), (0, 2), (1, 3), (6, 7), (0, 1)], 9) == ((0, 3), (4, 7))
    assert merge_ranges([(0, 5), (1, 2)], 5) == ((0, 5),)


def test_special_tokens_are_protected_and_the_rest_is_free():
    """Each separately; a protected range may reach beyond the context, or lie behind it."""
    assert special_tokens((7, 1, 7, 7, 2), {7}) == ((0, 1), (2, 4))
    assert free_tokens(6, ((0, 1), (2, 4), (5, 9), (8, 9))) == [1, 4]
    assert all_but((1,), (1, 4, 5), 6) == ((4, 6),)


def test_a_transcripts_counts():
    """They cover all its turns, whatever was discarded; an ended one keeps its context."""
    transcript = Transcript(Header("default", "model", "s1"), (turn(), turn(1, (6,), (7,))))
    assert transcript.num_tokens == 7
    ended = transcript.with_end()
    assert (ended.has_ended, ended.context, ended.turns) == (
        True,
        transcript.context,
        transcript.turns,
    )


@pytest.mark.parametrize("line", [b"", b"{}\n", b"nothing of ours\n"])
def test_a_first_line_must_be_a_header(line):
    """It names the file's session."""
    assert decode_header(line) is None
    header = Header("default", "model", "s1", "s0")
    assert decode_header(encode_header(header)) == header
    assert decode_header(encode_header(header)[:-3]) is None


@pytest.mark.parametrize(
    ("num_tokens", "turning_points", "every", "marks"),
    [
        (100, (20, 95), 0, (20, 95)),
        (100, (20, 95), 40, (20, 40, 80, 95)),
        (100, (40, 40), 40, (40, 80)),
        (100, (0, 100), 50, (50,)),  # 0 is no mark, nor is a place behind the last token
        (100, (), 100, ()),
        (1, (0, 1), 1, ()),
    ],
)
def test_marks_are_where_others_may_branch_off(num_tokens, turning_points, every, marks):
    """Turning points, and multiples of a number of tokens."""
    assert prompt_marks(num_tokens, turning_points, every) == marks


@given(st.integers(1, 200), st.lists(st.integers(0, 250)), st.integers(0, 60), st.integers(0, 99))
def test_prompts_with_one_beginning_have_marks_at_the_same_places(size, points, every, more):
    """A longer prompt has those of a shorter one, and all are inside, in order."""
    marks = prompt_marks(size, points, every)
    assert list(marks) == sorted(set(marks))
    assert all(0 < mark < size for mark in marks)
    assert set(marks) <= set(prompt_marks(size + more, points, every))
