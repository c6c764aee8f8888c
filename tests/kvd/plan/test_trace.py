"""Traces: how they are read, and the errors of invalid files."""

import gzip
import json
import os
from pathlib import Path

import pytest

from kvd.plan.trace import (
    BadTraceError,
    Session,
    Turn,
    footprint_tokens,
    read_trace,
    sampled,
    truncated,
)

SAMPLE = Path(__file__).parents[2] / "data" / "trace_sample.jsonl.gz"
TURN = {
    "t": 1.5,
    "session": 7,
    "turn": 1,
    "new_tokens": 10,
    "output_tokens": 5,
    "history_tokens": 0,
    "think_s": 0.0,
}


def line(**changes: object) -> str:
    return json.dumps({**TURN, **changes}) + "\n"


def test_sessions_are_read_in_order_of_their_starts(tmp_path):
    """Turns belong to their sessions; only the first arrival time counts."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        line(t=2, hash_ids=[1, 2])
        + line(t=4, session="late")
        + "\n"
        + line(t=9, turn=2, new_tokens=3, history_tokens=15, think_s=6.5)
    )
    early = Session(2.0, (Turn(10, 5, 0, 0.0), Turn(3, 5, 15, 6.5)))
    assert read_trace(path) == [early, Session(4.0, (Turn(10, 5, 0, 0.0),))]
    assert footprint_tokens(read_trace(path)) == 23 + 15


def test_a_turn_may_go_back_to_an_earlier_one(tmp_path):
    """Its history is what was kept after that, more than after the previous turn."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        line(new_tokens=100)
        + line(t=9, turn=2, new_tokens=3)
        + line(t=20, turn=3, new_tokens=3, history_tokens=105)
    )
    (session,) = read_trace(path)
    assert [turn.history_tokens for turn in session.turns] == [0, 0, 105]


def test_tools_and_superseded_sessions_are_read(tmp_path):
    """Both are optional; a session is superseded by name, in any order of sessions."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        line(session="b")
        + line(session="a", tools=["read", "shell"])
        + line(session="a", turn=2, tools=[])
        + line(t=9, session="c", supersedes="a", think_s=2.5)
    )
    b, a, c = read_trace(path)
    assert [turn.tools for turn in a.turns] == [("read", "shell"), ()]
    assert (b.supersedes, a.supersedes, c.supersedes) == (None, None, 1)
    assert (b.turns[0].tools, c.turns[0].think_s) == ((), 2.5)


def test_gzip_and_plain_files_read_the_same(tmp_path):
    """The first bytes show whether a file is compressed, not its name."""
    sessions = read_trace(SAMPLE)
    plain = tmp_path / "sample.gz"
    plain.write_bytes(gzip.decompress(SAMPLE.read_bytes()))
    assert read_trace(plain) == sessions
    assert len(sessions) == 12


@pytest.mark.parametrize(
    ("text", "number", "what"),
    [
        ("nonsense\n", 1, "the line is not JSON"),
        (line() + "[1, 2]\n", 2, "the line is not a JSON object"),
        (line() + "[" * 100_000 + "\n", 2, "the line is not JSON"),
        (line(turn=2), 1, "turn 2 of session 7 is out of order, turn 1 is next"),
        (line() + line(turn=3), 2, "turn 3 of session 7 is out of order, turn 2 is next"),
        (line() + "\n" + line(), 3, "turn 1 of session 7 is out of order, turn 2 is next"),
        (
            line() + "\n" + line(t=1.25, session=8),
            3,
            "t is 1.25, which is earlier than in the line before",
        ),
        (line(history_tokens=1), 1, "history_tokens is 1, but session 7 has at most 0 tokens"),
        (
            line() + line(turn=2, history_tokens=16),
            2,
            "history_tokens is 16, but session 7 has at most 15 tokens",
        ),
        (line(new_tokens=-1), 1, "new_tokens is -1"),
        (line(output_tokens=1 << 40), 1, "output_tokens is 1099511627776"),
        (line(output_tokens=int("9" * 400)), 1, "output_tokens is 999"),
        (line(history_tokens=1.5), 1, "history_tokens is 1.5"),
        (line(new_tokens=True), 1, "new_tokens is true"),
        (line(new_tokens="3"), 1, 'new_tokens is "3"'),
        (line(think_s=float("nan")), 1, "think_s is NaN"),
        (line(think_s=float("inf")), 1, "think_s is Infinity"),
        (line(t=-1), 1, "t is -1"),
        (line(t=1e300), 1, "t is 1e+300"),
        (line(t=None), 1, "t is null"),
        (line(session=[1]), 1, "session is [1]"),
        (line(session=False), 1, "session is false"),
        (line(tools="read"), 1, 'tools is "read"'),
        (line(tools=["read", ""]), 1, 'tools is ["read", ""]'),
        (line(tools=["x"] * 1025), 1, 'tools is ["x", "x"'),
        (line(tools=[1]), 1, "tools is [1]"),
        (line(supersedes=None), 1, "supersedes is null"),
        (line(supersedes=7), 1, "supersedes is 7, but no line before this one has that session"),
        (line() + line(turn=2, supersedes=7), 2, "supersedes is set in turn 2 of session 7"),
        (
            line() + line(session=8, supersedes=7) + line(session=9, supersedes=7),
            3,
            "session 7 was already superseded by session 8",
        ),
        (
            line() + line(session=8, supersedes=7) + line(turn=2),
            3,
            "session 7 continues, although session 8 has superseded it",
        ),
        *((line().replace(f'"{name}"', '"x"'), 1, f"there is no {name}") for name in TURN),
    ],
)
def test_a_bad_line_is_reported(tmp_path, text, number, what):
    """The error is one line: file, line number, the error, and the remedy."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTraceError) as raised:
        read_trace(path)
    assert raised.value.message.startswith(f"{path}:{number}: {what}")
    assert raised.value.remedy
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", ": the trace contains no turn"),
        (b"\n \n", ": the trace contains no turn"),
        (b"\xff\xfe\x00", ":1: the line is not UTF-8 text"),
        (gzip.compress(b"", mtime=0), ": the trace contains no turn"),
        (b"\x1f\x8b broken", ":1: the gzip data is damaged"),
        (gzip.compress(line().encode(), mtime=0)[:-8], ":2: the gzip data is damaged"),
    ],
)
def test_a_bad_file_is_reported(tmp_path, content, what):
    """Empty, binary and broken files have different errors."""
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(BadTraceError) as raised:
        read_trace(path)
    assert raised.value.message.startswith(f"{path}{what}")


def test_special_files_are_refused_at_once(tmp_path):
    """A directory, a pipe without a writer and a missing file are not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for name, what in (
        ("", "is a directory"),
        ("pipe", "is not a regular file"),
        ("missing", "cannot be read (No such file or directory)"),
    ):
        with pytest.raises(BadTraceError, match="give the path of a") as raised:
            read_trace(tmp_path / name)
        assert what in raised.value.message


def test_truncation_drops_halves_of_the_window():
    """Until the new tokens fit; never below nothing."""
    assert truncated(90, 10, 100) == 90
    assert truncated(91, 10, 100) == 41
    assert truncated(140, 20, 100) == 40
    assert truncated(30, 200, 100) == 0


def test_a_share_of_the_sessions_is_always_the_same():
    """Those that supersede one another are taken together, with their links."""
    turn = Turn(1, 1, 0, 0.0)
    sessions = [
        Session(float(n), (turn,), supersedes=n - 1 if n % 4 in (1, 2) else None)
        for n in range(4000)
    ]
    found = sampled(sessions, 0.25)
    assert 700 < len(found) < 1300
    assert found == sampled(sessions, 0.25)
    for number, session in enumerate(found):
        if session.supersedes is not None:
            assert session.supersedes < number
            assert found[session.supersedes].start_s == session.start_s - 1
    starts = {session.start_s for session in found}
    assert all((n in starts) == (n + 1 in starts) == (n + 2 in starts) for n in range(0, 4000, 4))
    assert sampled(sessions, 1.0) == sessions
