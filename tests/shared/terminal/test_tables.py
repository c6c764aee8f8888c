"""Tables that fit the terminal."""

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


def render(width, rows=ROWS):
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
def test_the_least_important_columns_are_dropped_first(width, headings):
    """Those of the highest rank; columns without one always stay."""
    assert render(max(width, 20) if width == 5 else width)[0].split() == headings


def test_names_are_cut_if_a_table_is_too_wide():
    """The end of a long cell becomes an ellipsis; short ones stay complete."""
    for width in (22, 39, 45, 60):
        lines = render(width)
        assert max(map(len, lines)) <= width
        assert "1234567" in lines[2]
    assert "…" in render(22)[1]
    assert "s" * 30 in render(80)[1]


def test_the_least_important_cells_are_cut_first():
    """None below its minimum while another may be cut: names of sessions stay distinguishable."""
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
    assert render(80, [])[0].split() == ["session", "tenant", "model", "tokens"]


def test_a_title_may_use_the_width_of_the_terminal():
    """However narrow the table is; it is wrapped only there."""
    out = io.StringIO()
    title = "longest calls, 200,000 sessions of 8 blocks"
    table = fitted([Column("call")], [("attach",)], 60, title, f"as {title}")
    Console(file=out, width=60).print(table)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        *(title, "call", "attach", f"as {title}"),
    ]


def test_facts_are_wrapped_below_themselves():
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


def test_the_natural_width_is_known():
    """With it nothing is dropped or cut."""
    widest = max(map(len, render(200)))
    assert fits(COLUMNS, ROWS, widest)
    assert not fits(COLUMNS, ROWS, widest - 1)
