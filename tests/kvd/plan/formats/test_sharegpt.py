"""Conversations without times and lengths."""

import json

import pytest

from kvd.plan.formats.filling import Filling
from kvd.plan.formats.sharegpt import read_sharegpt
from kvd.plan.trace import BadTraceError


def _entry(*messages):
    return {
        "id": "x_0",
        "conversations": [{"from": who, "value": "a" * length} for who, length in messages],
    }


def _write(tmp_path, text):
    path = tmp_path / "share.json"
    path.write_text(text, encoding="utf-8")
    return path


def _turns(session):
    return [(turn.history_tokens, turn.new_tokens, turn.output_tokens) for turn in session.turns]


TALK = _entry(("human", 400), ("gpt", 80), ("human", 39), ("gpt", 4))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([TALK]),
        json.dumps([TALK], indent=1),
        json.dumps(TALK),
        "\ufeff" + json.dumps([TALK]),
    ],
)
def test_a_list_and_lines_read_the_same(tmp_path, text):
    """Four bytes are a token; the answer is part of the next turn's history."""
    sessions, how = read_sharegpt(_write(tmp_path, text), Filling())
    assert [_turns(session) for session in sessions] == [[(0, 100, 20), (120, 10, 1)]]
    assert sessions[0].turns[0].think_s == 0.0
    assert sessions[0].turns[1].think_s >= 1.0
    assert "4 bytes a token" in how


def test_messages_before_the_first_prompt_belong_to_it(tmp_path):
    """A system message, and an answer without its prompt; an unanswered end is left out."""
    entries = [
        _entry(("system", 40), ("gpt", 80), ("human", 40), ("human", 40), ("gpt", 40), ("gpt", 40)),
        _entry(("human", 40), ("gpt", 40), ("human", 40)),
        _entry(("human", 40)),
        _entry(),
    ]
    sessions, _ = read_sharegpt(_write(tmp_path, json.dumps(entries)), Filling())
    assert [_turns(session) for session in sessions] == [[(0, 50, 20)], [(0, 10, 10)]]


def test_contexts_are_truncated_to_the_window(tmp_path):
    """Half a window is dropped at a time, as in the paper."""
    text = json.dumps([_entry(*[("human", 200), ("gpt", 200)] * 3)])
    sessions, _ = read_sharegpt(_write(tmp_path, text), Filling(window_tokens=200))
    assert _turns(sessions[0]) == [(0, 50, 50), (100, 50, 50), (100, 50, 50)]
    sessions, _ = read_sharegpt(_write(tmp_path, text), Filling())
    assert _turns(sessions[0])[2] == (200, 50, 50)


def test_rate_and_seed_determine_the_starts(tmp_path):
    """The data has no times."""
    path = _write(tmp_path, json.dumps([TALK] * 50))
    slow, fast, other = (
        [session.start_s for session in read_sharegpt(path, filling)[0]]
        for filling in (Filling(rate=1.0), Filling(rate=10.0), Filling(seed=1))
    )
    assert slow == pytest.approx([10 * start for start in fast])
    assert slow != other


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", ": not JSON"),
        ("[" * 100_000, ": not JSON"),
        ("[]", ": the file contains no conversation"),
        ("", ": the file contains no conversation"),
        ("[1]", ": entry 1 is not an object"),
        (json.dumps([TALK, {"id": 1}]), ": entry 2: conversations is not a list"),
        (json.dumps(TALK) + '\n{"conversations": 3}', ":2: conversations is not a list"),
        ('{"conversations": [{"from": "human"}]}', ':1: a message has no "from" or no "value"'),
        (json.dumps(TALK) + "\nno json", ":2: the line is not JSON"),
        (json.dumps([_entry(("human", 5))]), ": the file contains no conversation"),
    ],
)
def test_a_bad_entry_is_reported(tmp_path, text, complaint):
    """One line: file, entry, the error, the remedy."""
    path = _write(tmp_path, text)
    with pytest.raises(BadTraceError) as raised:
        read_sharegpt(path, Filling())
    assert raised.value.message.startswith(f"{path}{complaint}")
    assert raised.value.remedy
    assert "\n" not in str(raised.value)
