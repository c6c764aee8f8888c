"""The table of faults and outcomes, printed after the run.

One line per test of this folder. The test itself reports what happened to stored sessions, with
`outcome`. With FAULT_TABLE=FILE the table is also written there, as Markdown.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faulty_kvd import FaultyKvd

HERE = Path(__file__).parent
ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
_config: list[pytest.Config] = []  # a test report does not name its session


@pytest.fixture
def outcome(record_property) -> Callable[[object], None]:
    """Let a test report what became of the stored data."""

    def tell(text: object) -> None:
        told = text if isinstance(text, str) else ", ".join(f"{n} {k}" for k, n in text.items())
        record_property("outcome", told)

    return tell


@pytest_asyncio.fixture
async def new_kvd(tmp_path):
    """Return a factory for the kvd of a test, which is not started yet; it is killed at the end."""
    made: list[FaultyKvd] = []

    def make(settings: dict[str, str], keep: str = "file", kind=FaultyKvd) -> FaultyKvd:
        made.append(kind(tmp_path, keep=keep, **settings))
        return made[-1]

    yield make
    for kvd in made:
        await kvd.kill()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with an empty table."""
    config.stash[ROWS] = []
    _config[:] = [config]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a row for a test that has ended."""
    is_ours = (_config[0].rootpath / report.nodeid.split("::")[0]).is_relative_to(HERE)
    if not is_ours or not (report.when == "call" or report.skipped):
        return
    file, _, name = report.nodeid.partition("::")
    fault = f"{Path(file).stem.removeprefix('test_')}: {name.removeprefix('test_')}"
    told = "; ".join(str(text) for key, text in report.user_properties if key == "outcome")
    _config[0].stash[ROWS].append((fault.replace("_", " "), report.outcome, told))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    rows = _config[0].stash[ROWS]
    if not rows:
        return
    terminalreporter.section("faults and outcomes")
    width = max(len(fault) for fault, _, _ in rows)
    for fault, result, told in rows:
        terminalreporter.write_line(f"{fault:{width}}  {result:7} {told}".rstrip())
    if path := os.environ.get("FAULT_TABLE"):
        lines = ["| fault | result | outcome |", "|---|---|---|"]
        lines += [f"| {fault} | {result} | {told} |" for fault, result, told in rows]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
