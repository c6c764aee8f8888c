"""Mutate what is tested and see whether a test notices: `make mutants`.

    .ci/mutants.py [--count 160] [--seed 1] [--only PART] [--workers 2] [--record]

1. The tests of `PARTS` run once, under coverage with a context for each test: all (`--record`), or
   those of which .mutants/ has no record as they are: see line_records.py. Who fails or is skipped
   judges no mutant.
2. Mutants are drawn with a seed from all that functions of `PARTS` hold: see mutations.py.
3. Each is compiled in a process forked from one that has imported what tests import of others, and
   put in the place of its module by an import hook: no file changes, whatever is killed when. Tests
   that run its line judge it, first those that run little else, the quickest first, until one
   fails. A test that takes ten times as long as it should has failed, too.
4. Survivors that tests/mutants.toml does not accept are judged once more, by PROPERTIES: what only
   those notice is killed, and named, since nobody sees from their failing what is wrong.
5. Below MIN_KILLED of what is not accepted it fails.

Own, because of what there is: cosmic-ray writes mutants into the checkout and starts an interpreter
for each, with torch; mutmut has no sample, and leaves functions with most decorators out.
"""

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from line_records import PARTS, PYTEST, ROOT, LineRecord, changed_tests, forget, record
from mutations import Mutant, mutants_of, mutated

ACCEPTED = ROOT / "tests/mutants.toml"
MIN_KILLED = 0.95
# By pytest's exit code; 2 and 4: a module cannot be imported. Others say nothing of the mutant.
VERDICTS = {0: "survived", 1: "killed", 2: "killed", 4: "killed"}
ALIVE = {"survived", "not run", "broken"}
ONLY_PROPERTIES = "killed by properties only"
MAX_TESTS = 150  # that judge one mutant first: those that run its line and little else
# Random tests of everything at once: they run every line, so that each is of use for any mutant.
PROPERTIES = {
    "kvd/core": ["test_cache_engine", "test_session_placement", "test_prefetching"],
    "inference_svc/core": ["test_scheduler"],
}
# Where a mutant says nothing of the tests.
NOT_DRAWN = (
    "inference_svc/runtime/cuda/kernels/",  # Triton compiles what is in the file, not what we do
    "inference_svc/runtime/cuda/driver.py",  # calls of a driver that only a GPU's host has
)
PROPERTY_EXAMPLES = 100  # of a state machine
PROPERTY_LIMIT_S = 600.0
TEST_LIMIT_S = 30.0  # for what fixtures make that another test has made before


class MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a tree instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = ROOT / mutant.file
        self._name = mutant.file.removesuffix(".py").replace("/", ".")
        self._tree = mutated(mutant, self._path.read_text(encoding="utf-8"))

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Find the one module."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the tree."""
        exec(compile(self._tree, self._path, "exec"), module.__dict__)  # noqa: S102  # ours


# --------------------------------------------------------------------------------------- judging


class Judge:
    """Which tests judge a mutant, and what they say.

    Args:
        part: whose tests.
        is_second: those that the first judge has left out.
    """

    def __init__(self, part: str, *, is_second: bool = False) -> None:
        self._is_second = is_second
        self._recorded = recorded = LineRecord(part)
        self._tests, self._seconds = recorded.tests, recorded.seconds
        self._lines = recorded.lines
        self._num_lines: Counter[int] = Counter()
        for by_line in self._lines.values():
            for tests in by_line.values():
                self._num_lines.update(tests)

    def tests_of(self, mutant: Mutant) -> list[int]:
        """Those that run its line: the most special ones, or all others; quickest first."""
        tests = self.that_run(mutant)
        special = sorted(tests, key=lambda test: self._num_lines[test])
        chosen = special[MAX_TESTS:] if self._is_second else special[:MAX_TESTS]
        return sorted(chosen, key=lambda test: self._seconds[test])

    def that_run(self, mutant: Mutant) -> list[int]:
        """Those that run its line, its statement, or what is nearest before it in its function.

        CPython 3.11 tells nothing of some lines, as of an await that ends an if's condition.
        """
        by_line = self._lines.get(mutant.file, {})
        before = range(mutant.statement, mutant.begin, -1)
        found = (by_line.get(str(line)) for line in (mutant.line, *before))
        return next(filter(None, found), [])

    def begin(self, mutant: Mutant) -> tuple[int, float]:
        """Fork; returns the process and when it is to be killed. No tests: (0, 0)."""
        self._recorded.check()
        tests = self.tests_of(mutant)
        if not tests:
            return 0, 0.0
        seconds = {self._tests[test]: self._seconds[test] for test in tests}
        pid = os.fork()
        if not pid:
            _run(list(seconds), mutant, Limits(seconds))
        return pid, time.monotonic() + 60.0 + 10 * sum(seconds.values())


class PropertyJudge:
    """Judges what no other test has noticed."""

    def __init__(self, part: str) -> None:
        self._tests = [f"tests/property/{name}.py" for name in PROPERTIES.get(part, [])]

    def begin(self, mutant: Mutant) -> tuple[int, float]:
        """As a judge's."""
        if not self._tests:
            return 0, 0.0
        pid = os.fork()
        if not pid:
            _run(self._tests, mutant)
        return pid, time.monotonic() + PROPERTY_LIMIT_S


class FewExamples:
    """A pytest plugin: state machines run less often, and what fails is not made any smaller."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Change what test modules begin with; the profile is that of `make test`."""
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("judging", settings.get_profile("seeded"), phases=phases)
        settings.load_profile("judging")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Change the machines."""
        for item in items:
            machine = getattr(item, "cls", None)
            if machine is not None and isinstance(getattr(machine, "settings", None), settings):
                few = min(machine.settings.max_examples, PROPERTY_EXAMPLES)
                machine.settings = settings(machine.settings, max_examples=few)


class Limits:
    """A pytest plugin: the process ends, by SIGALRM, with the first test that takes far too long.

    Args:
        seconds: how long each takes.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test; pytest-timeout would only fail it, and then wait for what it has left."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT_S + 10 * self._seconds[nodeid])


def _run(tests: list[str], mutant: Mutant, *plugins: object) -> None:
    """In the child: run tests with the mutant in its module's place; exit 0 if all pass."""
    os.setsid()
    code = 3
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        sys.meta_path.insert(0, MutantImporter(mutant))
        code = int(pytest.main([*PYTEST, "-x", *tests], plugins=[FewExamples(), *plugins]))
    finally:
        os._exit(code)


def judge(
    make_judge: Callable[[str], Judge | PropertyJudge],
    mutants: list[tuple[str, Mutant]],
    num_workers: int,
) -> Iterator[tuple[str, Mutant, str]]:
    """Judge all: "killed", "timeout", "survived", "not run" by any test, or "broken": unjudged."""
    judges = {part: make_judge(part) for part in {part for part, _ in mutants}}
    waiting = mutants[::-1]
    running: dict[int, tuple[str, Mutant, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                part, mutant = waiting.pop()
                pid, until_s = judges[part].begin(mutant)
                if pid:
                    running[pid] = (part, mutant, until_s)
                else:
                    yield part, mutant, "not run"
            for pid, (part, mutant, until_s) in list(running.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                is_late = not found and time.monotonic() > until_s
                if found or is_late:
                    del running[pid]
                    _kill(pid, is_over=bool(found))
                    yield part, mutant, "timeout" if is_late else _verdict(status)
            time.sleep(0.02)
    finally:
        for pid in running:
            _kill(pid)


def _kill(pid: int, *, is_over: bool = False) -> None:
    """End a child, unless it has ended, and the processes that its tests have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not is_over:
        os.waitpid(pid, 0)


def _verdict(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return "timeout"
    return "killed" if code < 0 else VERDICTS.get(code, "broken")


# ------------------------------------------------------------------------------------------ main


def main() -> int:
    """Draw, judge, report; 1 if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="of files whose paths begin so")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--record", nargs="?", const="all", help="run the tests of all parts, or one"
    )
    options = parser.parse_args()
    only = options.only
    parts = [part for part in PARTS if only.startswith(part) or part.startswith(only)]
    if options.record in PARTS:
        record(options.record)
        return 0
    accepted = _accepted()
    for part in parts:
        if options.record:
            forget(part)
        while changed_tests(part):
            subprocess.run([sys.executable, __file__, "--record", part], cwd=ROOT, check=True)
    drawn = _draw(parts, only, options.count, options.seed)
    for part in parts:
        _import(LineRecord(part).libraries)
    counts: Counter[str] = Counter()
    alive = _survivors(Judge, drawn, options.workers, counts)
    alive = _survivors(partial(Judge, is_second=True), alive, options.workers, counts)
    counts["accepted"] = sum(mutant in accepted for _, mutant in alive)
    alive = [(part, mutant) for part, mutant in alive if mutant not in accepted]
    print(*(f"not killed by tests: {mutant.name}" for _, mutant in alive), sep="\n", flush=True)
    judges = {part: Judge(part) for part in {part for part, _ in alive}}
    for part, mutant, verdict in judge(PropertyJudge, alive, options.workers):
        counts["alive" if verdict in ALIVE else ONLY_PROPERTIES] += 1
        why = "no test runs it" if not judges[part].that_run(mutant) else "alive"
        print(f"{why if verdict in ALIVE else ONLY_PROPERTIES}: {mutant.name}", flush=True)
    num_judged = counts.total() - counts["accepted"]
    num_killed = num_judged - counts["alive"]
    share = num_killed / max(1, num_judged)
    print(f"{num_killed} of {num_judged} killed ({share:.1%}); {dict(counts)}")
    return int(share < MIN_KILLED)


def _import(libraries: list[str]) -> None:
    """Import what tests are going to, before the forks, which share it: else each spends seconds.

    Torch comes first: some modules cannot be imported by themselves.
    """
    for name in sorted(libraries, key=lambda name: (name != "torch", name)):
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)


def _survivors(
    make_judge: Callable[[str], Judge],
    mutants: list[tuple[str, Mutant]],
    num_workers: int,
    counts: Counter[str],
) -> list[tuple[str, Mutant]]:
    """Judge mutants, count those that are killed, and return the others."""
    alive = []
    for part, mutant, verdict in judge(make_judge, mutants, num_workers):
        if verdict in ALIVE:
            print(f"still alive: {mutant.name}", flush=True)
            alive.append((part, mutant))
        else:
            counts[verdict] += 1
    return alive


def _accepted() -> set[Mutant]:
    """Find those that may survive; an entry that names none, or several, is to be mended first."""
    accepted, sources = set(), {}
    for entry in tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))["accepted"]:
        file = entry["file"]
        if file not in sources:
            source = (ROOT / file).read_text(encoding="utf-8")
            sources[file] = list(mutants_of(file, source))
        found = [
            mutant
            for mutant in sources[file]
            if (mutant.function, mutant.change) == (entry["function"], entry["change"])
            and mutant.place.endswith(entry.get("place", ""))
        ]
        if len(found) != 1:
            places = "".join(f"\n    {mutant.place!r}" for mutant in found)
            sys.exit(f"{ACCEPTED}: {len(found)} mutants are meant by {entry}{places}")
        accepted.add(found[0])
    return accepted


def _draw(parts: list[str], only: str, count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Draw mutants, by part in equal shares."""
    rng = random.Random(seed)  # noqa: S311  # the same ones each time
    drawn = []
    for number, part in enumerate(parts):
        found: list[Mutant] = []
        for path in sorted((ROOT / part).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if file.startswith(only) and not file.startswith(NOT_DRAWN):
                found += mutants_of(file, path.read_text(encoding="utf-8"))
        share = count * (number + 1) // len(parts) - count * number // len(parts)
        drawn += [(part, m) for m in rng.sample(found, min(share, len(found)))]
    return drawn


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
