"""The GPU report completes whatever becomes of its parts, and reports the state of each."""

import sys

import pytest

from tests.gpu import report
from tests.gpu.report import Part

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SLEEP


def run_report(monkeypatch, tmp_path, parts, *arguments):
    """Run the report with these parts; return its exit code and its page."""
    monkeypatch.setattr(
        report, "parts", lambda *, is_tiny, pairs: parts if is_tiny and not pairs else []
    )
    monkeypatch.setattr(sys, "argv", ["report", "--tiny", "--out", str(tmp_path), *arguments])
    code = report.main()
    return code, (tmp_path / "gpu-report.md").read_text()


def states(page):
    """Return the states of the parts, by name."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2] for row in rows[1:]}


def plain(name, code, limit_s=60.0):
    return Part(name, "something", ["-c", code], limit_s, is_bench=False)


def test_failing_and_slow_parts_are_reported(monkeypatch, tmp_path):
    """The parts after them are run."""
    monkeypatch.setattr(report, "END_S", 0.2)
    parts = [
        plain("failing", "print('why'); raise SystemExit(3)"),
        plain("slow", SLEEP, 1.0),
        plain("deaf", DEAF, 1.0),
        plain("good", "print('fine')"),
    ]
    code, page = run_report(monkeypatch, tmp_path, parts)
    assert code == 3
    assert states(page) == {
        "failing": "failed",
        "slow": "too long",
        "deaf": "too long",
        "good": "done",
    }
    assert "why" in page
    assert "fine" in page


def test_only_named_parts_run_and_none_after_the_time_limit(monkeypatch, tmp_path):
    """A part that could not be ended in time is not begun."""
    parts = [plain("one", "print(1)"), plain("other", "print(2)")]
    code, page = run_report(monkeypatch, tmp_path, parts, "--only", "other")
    assert (code, states(page)) == (0, {"other": "done"})
    code, page = run_report(monkeypatch, tmp_path, parts, "--seconds", "5")
    assert (code, states(page)) == (2, {"one": "no time left", "other": "no time left"})


@pytest.mark.long
def test_a_bench_adds_its_tables_document_and_picture(monkeypatch, tmp_path):
    """The tables are on the page, the document and the picture beside it."""
    copies = next(part for part in report.parts(is_tiny=True) if part.name == "copies")
    code, page = run_report(monkeypatch, tmp_path, [copies])
    assert code == 0, page
    assert "both / both floor" in page
    names = {file.name for file in tmp_path.iterdir()}
    assert names >= {"gpu-report.copies.json", "gpu-report.copies.png", "gpu-report.copies.log"}
    assert len(names) == 4  # and the page: what kvd had is gone
