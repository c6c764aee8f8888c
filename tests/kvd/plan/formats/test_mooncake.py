"""Sessions inferred from raw Mooncake traces."""

import json
from pathlib import Path

import pytest

from kvd.plan.formats.mooncake import read_mooncake
from kvd.plan.trace import BadTraceError

SYSTEM = 0  # the first block of every chat


def _write(path: Path, *requests: tuple[int, int, int, list[int]]) -> Path:
    """Requests as (seconds, input, output, hash ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [
        json.dumps(dict(zip(names, (at * 1000, *rest), strict=True))) for at, *rest in requests
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _turns(session):
    return [(turn.new_tokens, turn.output_tokens, turn.history_tokens) for turn in session.turns]


def test_a_prompt_that_contains_an_earlier_one_and_its_answer_continues_it(tmp_path: Path):
    """The history is both; the think time is the gap less 1 s and 30 ms per answer token."""
    path = _write(
        tmp_path / "raw.jsonl",
        (0, 1100, 100, [SYSTEM, 1, 2]),
        (5, 1100, 50, [SYSTEM, 3, 4]),
        (64, 1230, 40, [SYSTEM, 1, 5]),
    )
    sessions, how = read_mooncake(path)
    assert [_turns(session) for session in sessions] == [
        [(1100, 100, 0), (30, 40, 1200)],
        [(1100, 50, 0)],
    ]
    assert sessions[0].turns[1].think_s == pytest.approx(64 - 1 - 0.03 * 100)
    assert (sessions[1].start_s, "continued prompts" in how) == (5, True)


def test_a_prompt_shorter_than_what_it_continues_keeps_a_token_to_compute(tmp_path: Path):
    """Templates make prompts a little shorter than the previous prompt and answer."""
    requests = (0, 1100, 100, [SYSTEM, 1, 2]), (60, 1190, 40, [SYSTEM, 1, 3])
    ((session,), _) = read_mooncake(_write(tmp_path / "raw.jsonl", *requests))
    assert _turns(session) == [(1100, 100, 0), (1, 40, 1189)]


def test_an_equal_prompt_asks_for_another_answer(tmp_path: Path):
    """Its full blocks are reused; it stays one session."""
    requests = (0, 1100, 100, [SYSTEM, 1, 2]), (30, 1100, 80, [SYSTEM, 1, 2])
    ((session,), _) = read_mooncake(_write(tmp_path / "raw.jsonl", *requests))
    assert _turns(session) == [(1100, 100, 0), (76, 80, 1024)]


def test_the_longest_prefix_wins(tmp_path: Path):
    """A third turn continues the second one, though it contains the first one too."""
    path = _write(
        tmp_path / "raw.jsonl",
        (0, 1100, 500, [SYSTEM, 1, 2]),
        (60, 1650, 400, [SYSTEM, 1, 3, 4]),
        (120, 2100, 40, [SYSTEM, 1, 3, 5, 6]),
    )
    ((session,), _) = read_mooncake(path)
    assert _turns(session)[2] == (50, 40, 2050)


def test_a_system_prompt_alone_makes_no_session(tmp_path: Path):
    """One shared block proves nothing."""
    requests = (0, 600, 10, [SYSTEM, 1]), (60, 1300, 10, [SYSTEM, 2, 3])
    sessions, _ = read_mooncake(_write(tmp_path / "raw.jsonl", *requests))
    assert [len(session.turns) for session in sessions] == [1, 1]


def test_questions_about_documents_are_sessions_by_document(tmp_path: Path):
    """Equal first blocks that few share make a session; the best match counts."""
    others = [(at, 600, 10, [1000 + at, 2000 + at]) for at in range(60)]
    path = _write(
        tmp_path / "raw.jsonl",
        *others,
        (60, 1600, 10, [7, 8, 9, 10]),
        (61, 700, 10, [7, 11]),
        (62, 1650, 10, [7, 8, 9, 12]),
    )
    sessions, how = read_mooncake(path)
    assert _turns(sessions[-1]) == [(1600, 10, 0), (188, 10, 512), (114, 10, 1536)]
    assert (len(sessions), "first blocks" in how) == (61, True)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "2: the line is not JSON"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": []}', "2: there is no output_length"),
        (
            '{"timestamp": -1, "input_length": 5, "hash_ids": []}',
            "2: timestamp is not a valid time",
        ),
        ('{"input_length": 5, "hash_ids": []}', "2: timestamp is not a number"),
        (
            '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1]}',
            "2: there are 1 hash_ids for 1100 tokens",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "x"}',
            "2: hash_ids is not a list",
        ),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "2: input_length is 0",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}',
            "2: timestamp is 0, which is earlier than in the line before",
        ),
    ],
)
def test_a_bad_line_is_reported(tmp_path: Path, line, complaint):
    """One line: file, number, the error, the remedy."""
    path = _write(tmp_path / "raw.jsonl", (1, 600, 10, [1]))
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(BadTraceError) as raised:
        read_mooncake(path)
    assert str(raised.value).startswith(f"{path}:{complaint}")
    assert "\n" not in str(raised.value)
