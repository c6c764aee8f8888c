"""Reports: a document, tables, and their destinations."""

import json

import pytest

from shared.measuring.report import (
    ONLY,
    UnusableOutputError,
    check_json,
    number,
    print_progress,
    print_report,
    quartiles,
    table_of,
    verdict,
)
from shared.measuring.statistics import Spread
from shared.terminal.tables import Column

CELLS = (
    (Column("name"), lambda each: each[0]),
    (number("median"), lambda each: f"{each[1].median:g}"),
    (number("quartiles", 1), lambda each: quartiles(each[1])),
)
FOUND = [("ca", Spread(1.0, 2.0, 3.0)), ("re", Spread(4.0, 5.0, 6.0))]


def _tables(width):
    return [table_of(CELLS, FOUND, width, "found")]


def test_a_report_is_printed_and_written(tmp_path, capsys):
    """Tables and notes for people, the document in a file."""
    path = tmp_path / "found.json"
    print_report({"a": 1}, _tables, str(path), ["a note"])
    shown = capsys.readouterr().out
    assert json.loads(path.read_text()) == {"a": 1}
    for part in ("found", "name", "ca", "1.00 - 3.00", "a note"):
        assert part in shown


def test_the_document_can_be_the_only_output(capsys):
    """For scripts: standard output has nothing else."""
    print_report({"a": 1}, _tables, ONLY, ["a note"])
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_an_unwritable_file_is_refused_before_and_after(tmp_path):
    """Minutes of measuring are not lost, and no traceback is shown."""
    for path in (tmp_path, tmp_path / "none" / "found.json"):
        with pytest.raises(UnusableOutputError, match="cannot be written"):
            check_json(str(path))
    with pytest.raises(UnusableOutputError, match="cannot be written"):
        print_report({}, _tables, str(tmp_path))
    for unproblematic in ("", ONLY, str(tmp_path / "found.json")):
        check_json(unproblematic)


def test_progress_goes_to_standard_error(capsys):
    """Standard output is for the report."""
    print_progress("half of it")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "measuring: half of it\n")
    assert (verdict(True), verdict(False)) == ("met", "MISSED")
