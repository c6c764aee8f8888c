"""Which line of a part each of its tests runs: recorded once, under coverage, for mutants.py.

A part's record is kept by test file, and that of a file is used again as long as it, the part and
what its tests share are as they were. Whoever fails or is skipped is not in it. What changes while
it is recorded is recorded again; what changes while mutants are judged by it stops the judging.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".mutants"
SLOWEST_S = 20.0  # a test that computes for longer judges nothing
SHARED = "what tests share"  # in digests, beside the names of test files
NO_TESTS = 5  # pytest's exit code: a file has only long ones
PARTS = {
    "kvd/core": ["tests/kvd/core", "tests/property/test_discards.py"],
    "kvd/tiers": [
        "tests/kvd/tiers",
        "tests/kvd/runtime",
        "tests/fault/test_power_loss.py",
    ],
    "inference_svc/core": ["tests/inference_svc/core"],
    "inference_svc/runtime": ["tests/inference_svc/runtime"],
}
# What Hypothesis draws is the same each time ("not long"), and failures are not kept for the next.
PYTEST = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", "-m", "not long"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already


class Recorder:
    """A pytest plugin: which lines each test runs, how long it takes, and whether it passes."""

    def __init__(self, cov: coverage.Coverage) -> None:
        self._cov = cov
        self.seconds: dict[str, float] = {}
        self.busy_s: dict[str, float] = {}  # of our processor: a busy machine makes no test slow
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test's context."""
        self._cov.switch_context(nodeid)
        self.busy_s[nodeid] = -time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """End it."""
        self.busy_s[nodeid] += time.process_time()
        self._cov.switch_context("")


class LineRecord:
    """What is recorded of a part.

    Attributes:
        tests: their names, by number.
        seconds: how long each takes.
        lines: file → line → numbers of the tests that run it.
        libraries: modules of others that they import.
    """

    def __init__(self, part: str) -> None:
        self._part, self._digests = part, _digests(part)
        self.tests: list[str] = []
        self.seconds: list[float] = []
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.libraries: list[str] = _state(part, self._digests).get("libraries", [])
        known_files = _known(part, self._digests)
        _stop_if(changed_tests(part))
        for known in known_files.values():
            first = len(self.tests)
            self.tests += known["tests"]
            self.seconds += known["seconds"]
            for file, by_line in known["lines"].items():
                lines = self.lines.setdefault(file, {})
                for line, numbers in by_line.items():
                    lines.setdefault(line, []).extend(first + number for number in numbers)

    def check(self) -> None:
        """Stop, in one line, if it no longer says what the tests do: verdicts would be wrong."""
        now = _digests(self._part)
        _stop_if(sorted({file for file, _ in now.items() ^ self._digests.items()}))


def changed_tests(part: str) -> list[str]:
    """Test files of which there is no record as they are."""
    digests = _digests(part)
    return sorted(digests.keys() - {SHARED} - _known(part, digests).keys())


def forget(part: str) -> None:
    """Have all tests of a part recorded anew."""
    _file_of(part).unlink(missing_ok=True)


def record(part: str) -> None:
    """Run the tests that have changed; in a process that has imported nothing of the part."""
    digests = _digests(part)  # before they run: what changes meanwhile is not recorded as it is
    known = _known(part, digests)
    files = sorted(digests.keys() - {SHARED} - known.keys())
    cov = coverage.Coverage(data_file=None, source=[str(ROOT / part)], config_file=False)
    recorder = Recorder(cov)
    cov.start()
    code = pytest.main([*PYTEST, *files], plugins=[recorder])
    cov.stop()
    if code not in (0, 1, NO_TESTS):
        sys.exit(f"the tests of {part} cannot be run")
    for file in files:
        known[file] = {"digest": digests[file], "tests": [], "seconds": [], "lines": {}}
    numbers: dict[str, int] = {}
    for test, seconds in recorder.seconds.items():
        if recorder.busy_s[test] <= SLOWEST_S and test not in recorder.failed:
            of_file = known[_file_in(test)]
            numbers[test] = len(of_file["tests"])
            of_file["tests"].append(test)
            of_file["seconds"].append(seconds)
    data = cov.get_data()
    for path in data.measured_files():
        source = str(Path(path).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(path).items():
            for test in filter(numbers.__contains__, contexts):
                by_line = known[_file_in(test)]["lines"].setdefault(source, {})
                by_line.setdefault(str(line), []).append(numbers[test])
    libraries = {*_state(part, digests).get("libraries", []), *_libraries()}
    state = {"sources": digests[SHARED], "libraries": sorted(libraries), "files": known}
    STATE.mkdir(exist_ok=True)
    _file_of(part).write_text(json.dumps(state), encoding="utf-8")


def _known(part: str, digests: dict[str, str]) -> dict[str, Any]:
    """The records of test files that are as they were, by file."""
    files = _state(part, digests).get("files", {}).items()
    return {file: known for file, known in files if known["digest"] == digests.get(file)}


def _state(part: str, digests: dict[str, str]) -> dict[str, Any]:
    """All that is recorded, if what tests share is as it was; else nothing."""
    path = _file_of(part)
    state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return state if state.get("sources") == digests[SHARED] else {}


def _libraries() -> set[str]:
    """Names of the modules imported so far that are installed, and not of the repository."""
    files = ((name, getattr(module, "__file__", "")) for name, module in sys.modules.items())
    return {name for name, file in files if "site-packages" in (file or "")}


def _stop_if(changed: list[str]) -> None:
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        sys.exit(f"run this again, or in a copy: {changed[0]}{more} changed since it was recorded")


def _file_of(part: str) -> Path:
    return STATE / f"{part.replace('/', '-')}.json"


def _file_in(test: str) -> str:
    return test.split("::", maxsplit=1)[0]


def _sources(part: str) -> list[Path]:
    """Files of a part, and what its tests share."""
    tests = set(_tests(part))
    found = (file for path in (part, *PARTS[part]) for file in (ROOT / path).rglob("*.py"))
    return sorted(file for file in found if file not in tests)


def _digests(part: str) -> dict[str, str]:
    """Digests of each test file, and of all else that a record depends on."""
    files = {str(file.relative_to(ROOT)): _digest([file]) for file in _tests(part)}
    return {SHARED: _digest(_sources(part)), **files}


def _tests(part: str) -> list[Path]:
    paths = [ROOT / path for path in PARTS[part]]
    found = (path.rglob("test_*.py") if path.is_dir() else [path] for path in paths)
    return [file for files in found for file in files]


def _digest(files: list[Path]) -> str:
    """A digest of files, their names included."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
