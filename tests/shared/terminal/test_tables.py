"""Tables that fit."""

import io

import pytest
from rich.console import Console

from shared.terminal.tables import Column, facts, fits, fitted

COLUMNS = (
    Column("session", may_be_cut=True, least=10),
    Column("tenant", rank=1),
    Column("model", rank=2),
    Column("tokens", is_number=True),
)
ROWS = [("s" * 30, "acme", "5e5e5e5e5e5e", "17"), ("t", "default", "5e5e5e5e5e5e", "1234567")]


def shown(width, rows=ROWS):
    out = io.StringIO()
    Console(file=out, width=width).print(fitted(COLUMNS, rows, width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (200, ["session", "tenant", "model", "tokens"]),
        (45, ["session", "tenant", "model", "tokens"]),
        (39, ["session", "tenant", "tokens"]),
        (22, ["session", "tokens"]),
        (5, ["session", "tokens"]),
    ],
)
def test_what_matters_least_goes_first(width, headings):
    """Columns of the highest rank go; those without one are always there."""
    assert shown(max(width, 20) if width == 5 else width)[0].split() == headings


def test_names_are_cut_before_a_table_is_too_wide():
    """The end of a long cell becomes an ellipsis; short ones stay whole."""
    for width in (22, 39, 45, 60):
        lines = shown(width)
        assert max(map(len, lines)) <= width
        assert "1234567" in lines[2]
    assert "…" in shown(22)[1]
    assert "s" * 30 in shown(80)[1]


def test_what_matters_least_is_cut_first():
    """None below its least while another may be cut: a name that distinguishes sessions stays."""
    columns = (
        Column("session", may_be_cut=True, least=14),
        Column("process", rank=1, may_be_cut=True, least=8),
        Column("state", may_be_cut=True),
    )
    out = io.StringIO()
    row = ("conversation-17", "inference-svc", "attached, waits")
    Console(file=out, width=40).print(fitted(columns, [row], 40))
    cells = out.getvalue().splitlines()[1].split("  ")
    assert [cell.strip() for cell in cells[:2]] == ["conversation-…", "inferen…"]
    assert cells[2].startswith("attached, w")


def test_an_empty_table_has_its_headings():
    """Nothing stored is no error."""
    assert shown(80, [])[0].split() == ["session", "tenant", "model", "tokens"]


def test_a_title_is_as_wide_as_the_terminal():
    """However narrow the table is; it goes on below itself only where the terminal ends."""
    out = io.StringIO()
    title = "longest calls, 200,000 sessions of 8 blocks"
    table = fitted([Column("call")], [("attach",)], 60, title, f"as {title}")
    Console(file=out, width=60).print(table)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        *(title, "call", "attach", f"as {title}"),
    ]


def test_facts_go_on_below_themselves():
    """Between words, behind their name."""
    out = io.StringIO()
    Console(file=out, width=20).print(facts([("cpu", "a fast one"), ("kernel", "6.1")], 20))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        *("cpu     a fast one", "kernel  6.1"),
    ]
    out = io.StringIO()
    Console(file=out, width=16).print(facts([("cpu", "a fast one")], 16))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == ["cpu  a fast one"]
    out = io.StringIO()
    Console(file=out, width=12).print(facts([("cpu", "a fast one")], 12))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == ["cpu  a fast", "     one"]


def test_what_fits_is_known():
    """Nothing is left out of it, and nothing cut."""
    widest = max(map(len, shown(200)))
    assert fits(COLUMNS, ROWS, widest)
    assert not fits(COLUMNS, ROWS, widest - 1)
