"""The demo's table and its closing words."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from inference_svc.demo.cli import shipped_conversations
from inference_svc.demo.report import TurnFacts, closing_words, summarise, turn_table

# As wide as a row of the shipped conversations gets: found in both tiers, after the kill.
WIDE = TurnFacts(
    session_id="",
    turn=4,
    history_tokens=1471,
    reused_tokens=1471,
    new_tokens=1234,
    output_tokens=32,
    tiers=("ssd", "dram"),
    ttft_s=0.147,
    recompute_ttft_s=6.3,
    identical=True,
    after_kill=True,
)


def draw_report(turns):
    console = Console(width=80, file=StringIO())
    console.print(turn_table(turns))
    return console.file.getvalue()


def test_the_table_fits_a_terminal():
    """No cell is cut off in 80 columns, for any of the included sessions."""
    names = [conversation.session_id for conversation in shipped_conversations()]
    text = draw_report([replace(WIDE, session_id=name) for name in names])
    assert "…" not in text
    assert all(name in text for name in (*names, "ssd+dram*", "147 ms", "42.9x", "identical?"))


def test_a_different_answer_is_marked():
    """In its row, and in the closing words."""
    turns = [replace(WIDE, session_id="a", identical=False)]
    assert "NO" in draw_report(turns)
    assert "some answers differ" in closing_words(summarise(turns))
    assert "42.9x sooner" in closing_words(summarise(turns))
