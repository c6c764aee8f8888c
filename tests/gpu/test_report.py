"""The GPU report comes to its end, whatever becomes of its parts, and says what did."""

import sys

import pytest

from tests.gpu import report
from tests.gpu.report import Part

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SLEEP


def run_report(monkeypatch, tmp_path, parts, *arguments):
    """Run it with these parts; returns its exit code and its page."""
    monkeypatch.setattr(
        report, "parts", lambda *, is_tiny, pairs: parts if is_tiny and not pairs else []
    )
    monkeypatch.setattr(sys, "argv", ["report", "--tiny", "--out", str(tmp_path), *arguments])
    code = report.main()
    return code, (tmp_path / "gpu-report.md").read_text()


def states(page):
    """The states of the parts, by name."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2] for row in rows[1:]}


def plain(name, code, limit_s=60.0):
    return Part(name, "something", ["-c", code], limit_s, is_bench=False)


def test_what_fails_or_takes_too_long_is_said(monkeypatch, tmp_path):
    """And what comes behind is run."""
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


def test_parts_are_named_and_time_ends(monkeypatch, tmp_path):
    """Only what is asked for; and nothing is begun that cannot be ended in time."""
    parts = [plain("one", "print(1)"), plain("other", "print(2)")]
    code, page = run_report(monkeypatch, tmp_path, parts, "--only", "other")
    assert (code, states(page)) == (0, {"other": "done"})
    code, page = run_report(monkeypatch, tmp_path, parts, "--seconds", "5")
    assert (code, states(page)) == (2, {"one": "no time left", "other": "no time left"})


@pytest.mark.long
def test_a_bench_has_its_tables_on_the_page(monkeypatch, tmp_path):
    """And its document and its picture beside it."""
    copies = next(part for part in report.parts(is_tiny=True) if part.name == "copies")
    code, page = run_report(monkeypatch, tmp_path, [copies])
    assert code == 0, page
    assert "both / both floor" in page
    names = {file.name for file in tmp_path.iterdir()}
    assert names >= {"gpu-report.copies.json", "gpu-report.copies.png", "gpu-report.copies.log"}
    assert len(names) == 4  # and the page: what kvd had is gone
