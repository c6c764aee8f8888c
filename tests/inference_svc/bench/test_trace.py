"""Traces, read and generated."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.bench.trace import (
    BadTraceError,
    PlannedTurn,
    chat_like_sessions,
    fitting,
    read_trace,
    scaled,
)

SAMPLE = Path(__file__).parents[2] / "data" / "trace_sample.jsonl.gz"
TURNS = st.builds(
    PlannedTurn, st.integers(1, 500), st.integers(1, 500), st.floats(0, 100, allow_nan=False)
)
SESSIONS = st.lists(st.lists(TURNS, min_size=1, max_size=8).map(tuple), max_size=5)


def test_the_sample_has_its_sessions_in_order_of_their_starts():
    sessions = read_trace(SAMPLE, 100)
    assert len(sessions) == 12
    assert sum(map(len, sessions)) == 88
    assert sessions[0][0] == PlannedTurn(9, 301, 0.0)
    assert all(turns[0].think_s == 0 for turns in sessions)


def test_only_the_first_sessions_are_read_completely():
    assert read_trace(SAMPLE, 5) == read_trace(SAMPLE, 100)[:5]


def test_a_trace_may_be_plain(tmp_path):
    plain = tmp_path / "trace.jsonl"
    plain.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
    assert read_trace(plain, 100) == read_trace(SAMPLE, 100)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense\n",
        b"[1, 2]\n",
        b'{"session": 1}\n',
        b'{"session": 1, "new_tokens": -1, "output_tokens": 1, "think_s": 0}\n',
        b'{"session": 1, "new_tokens": null, "output_tokens": 1, "think_s": 0}\n',
        b"\xff\xfe\x00",
        gzip.compress(b"x" * 1000, mtime=0)[:20],
    ],
)
def test_invalid_traces_are_refused_in_one_line(tmp_path, content):
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(BadTraceError) as refused:
        read_trace(file, 10)
    assert "\n" not in str(refused.value)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(BadTraceError, match="FileNotFoundError"):
        read_trace(tmp_path / "none", 10)


@given(SESSIONS, st.floats(0.001, 4))
def test_scaling_leaves_every_turn_with_a_token_of_each(sessions, scale):
    smaller = scaled(sessions, scale, think_scale=0.5)
    assert [len(turns) for turns in smaller] == [len(turns) for turns in sessions]
    for before, after in zip(sessions, smaller, strict=True):
        for turn, made in zip(before, after, strict=True):
            assert made.new_tokens >= 1
            assert made.output_tokens >= 1
            assert made.think_s == turn.think_s * 0.5


@given(SESSIONS, st.integers(1, 2000))
def test_sessions_end_before_they_outgrow_the_window(sessions, window_tokens):
    kept, num_cut = fitting(sessions, window_tokens)
    assert all(kept)
    assert sum(map(len, kept)) + num_cut == sum(map(len, sessions))
    for turns in kept:
        assert sum(turn.new_tokens + turn.output_tokens for turn in turns) <= window_tokens


def test_generated_sessions_are_the_same_for_the_same_seed():
    assert chat_like_sessions(20, seed=3) == chat_like_sessions(20, seed=3)
    assert chat_like_sessions(20, seed=3) != chat_like_sessions(20, seed=4)


def test_generated_sessions_resemble_their_model():
    sessions = chat_like_sessions(4000, seed=1)
    turns = [turn for session in sessions for turn in session]
    assert len(turns) / len(sessions) == pytest.approx(5.75, rel=0.1)
    assert sum(len(session) > 1 for session in sessions) / len(sessions) == pytest.approx(
        0.73, abs=0.03
    )
    outputs = sorted(turn.output_tokens for turn in turns)
    assert outputs[len(outputs) // 2] == pytest.approx(355, rel=0.15)
    assert json.dumps([turn.new_tokens for turn in turns])  # plain numbers
