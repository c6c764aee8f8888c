"""Azure's and BurstGPT's tables of requests."""

import pytest

from kvd.plan.formats.filling import Filling
from kvd.plan.formats.request_tables import read_azure, read_burstgpt
from kvd.plan.trace import BadTraceError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)
EARLIER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def _write(tmp_path, header, *rows):
    path = tmp_path / "table.csv"
    path.write_text("\r\n".join([header, *rows]) + "\r\n", encoding="utf-8")
    return path


def _turns(session):
    return [(turn.history_tokens, turn.new_tokens, turn.output_tokens) for turn in session.turns]


def test_azures_dates_are_read_with_and_without_a_zone(tmp_path):
    """Seven digits of a second in 2023, a zone in 2024; other columns do not matter."""
    path = _write(
        tmp_path,
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,0,374,44",
        "2023-11-16 18:15:50+00:00,2,91,16",
    )
    sessions, how = read_azure(path, Filling(seed=5))
    assert [_turns(session) for session in sessions] == [[(0, 374, 44)], [(0, 91, 16)]]
    assert sessions[1].start_s - sessions[0].start_s == pytest.approx(3.31941, abs=1e-5)
    assert "drawn, seed 5" in how


def test_burstgpts_conversations_are_sessions(tmp_path):
    """By id; calls of the API have none, and failures have no answer."""
    path = _write(
        tmp_path,
        BURSTGPT,
        "10.0,a,4,GPT-4,100,50,150,Conversation log",
        "11.0,,2,ChatGPT,700,9,709,API log",
        "12.0,b,1,ChatGPT,30,10,40,Conversation log",
        "13.0,a,2,GPT-4,160,0,160,Conversation log",
        "14.0,,1,ChatGPT,800,9,809,API log",
        "44.0,a,2,GPT-4,180,20,200,Conversation log",
    )
    sessions, how = read_burstgpt(path, Filling())
    assert [_turns(session) for session in sessions] == [
        [(0, 100, 50), (150, 30, 20)],
        [(0, 700, 9)],
        [(0, 30, 10)],
        [(0, 800, 9)],
    ]
    assert sessions[0].turns[1].think_s == 30.0
    assert how == "sessions by their id"


def test_conversations_are_drawn_for_the_earlier_burstgpt(tmp_path):
    """It has no ids; calls of the API stay separate."""
    rows = [f"{20 * at},ChatGPT,{100 + 60 * at},20,0,Conversation log" for at in range(60)]
    api = [f"{20 * at + 5},ChatGPT,{100 + 60 * at},20,0,API log" for at in range(60)]
    both = [row for pair in zip(rows, api, strict=True) for row in pair]
    alone, _ = read_burstgpt(_write(tmp_path, EARLIER, *api), Filling())
    assert {len(session.turns) for session in alone} == {1}
    sessions, how = read_burstgpt(_write(tmp_path, EARLIER, *both), Filling())
    assert sum(len(session.turns) for session in sessions) == 120
    assert 60 < len(sessions) < 120
    assert "drawn" in how


@pytest.mark.parametrize(
    ("read", "lines", "complaint"),
    [
        (read_azure, ["TIMESTAMP,ContextTokens"], ":1: there is no column GeneratedTokens"),
        (read_azure, [AZURE], ": the trace contains no request"),
        (read_azure, [], ": the trace contains no request"),
        (read_azure, [AZURE, "soon,1,1"], ":2: TIMESTAMP is 'soon'"),
        (
            read_azure,
            [AZURE, "2023-11-16 18:15:46,1"],
            ":2: the line has 2 cells, but there are 3 columns",
        ),
        (read_azure, [AZURE, "2023-11-16 18:15:46,-1,1"], ":2: ContextTokens is '-1'"),
        (read_azure, [AZURE, "2023-11-16 18:15:46,0,1"], ":2: ContextTokens is 0"),
        (read_azure, [AZURE, "2023-11-16 18:15:46,1,x"], ":2: GeneratedTokens is 'x'"),
        (
            read_azure,
            [AZURE, "2023-11-16 18:15:46,1,1", "2023-11-16 18:15:45,1,1"],
            ":3: TIMESTAMP is 2023-11-16 18:15:45, which is earlier than in the line before",
        ),
        (
            read_burstgpt,
            ["Timestamp,Model"],
            ":1: there is no column Request tokens, Response tokens",
        ),
        (read_burstgpt, [EARLIER, "x,m,1,1,2,API log"], ":2: Timestamp is 'x'"),
        (read_burstgpt, [EARLIER, "nan,m,1,1,2,API log"], ":2: Timestamp is 'nan'"),
        (read_burstgpt, [EARLIER, "1,m,1.5,1,2,API log"], ":2: Request tokens is '1.5'"),
        (read_burstgpt, [BURSTGPT, "1,a,x,m,1,1,2,API log"], ":2: Elapsed time is 'x'"),
        (
            read_burstgpt,
            [EARLIER, "9,m,1,1,2,API log", "8,m,1,1,2,API log"],
            ":3: Timestamp is 8, which is earlier than in the line before",
        ),
        (read_burstgpt, [EARLIER, "1,m,1,0,1,API log"], ": the trace contains no request"),
    ],
)
def test_a_bad_line_is_reported(tmp_path, read, lines, complaint):
    """One line: file, number, the error, the remedy."""
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadTraceError) as raised:
        read(path, Filling())
    assert raised.value.message.startswith(f"{path}{complaint}")
    assert raised.value.remedy
    assert "\n" not in str(raised.value)
