"""The judging of mutants: accepted survivors, and records of which test runs which lines."""

import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
PASSES = "from part.it import one\ndef test_one():\n    assert one() == 1\n"
# A test that changes its own file the first time, as an editor might while it runs.
CHANGES_ITSELF = f"""{PASSES}
def test_two():
    from pathlib import Path
    file = Path(__file__)
    if not file.read_text().endswith("#"):
        file.write_text(file.read_text() + "#")
"""
ON_A_TREE = """
import sys
from pathlib import Path
sys.path[:0] = [{ci!r}, {tree!r}]
import line_records
line_records.ROOT = Path({tree!r})
line_records.STATE = line_records.ROOT / ".mutants"
line_records.PARTS = {{"part": ["tests"]}}
from line_records import LineRecord, changed_tests, record
"""


@pytest.fixture
def mutants(monkeypatch):
    """Return the module .ci/mutants.py."""
    monkeypatch.setattr(sys, "path", [str(CI), *sys.path])
    import mutants

    return mutants


@pytest.fixture
def on_tree(tmp_path):
    """Return a function that runs code on a tree of one part with a test file.

    It runs in its own process and returns it when it has ended: recording uses coverage, which may
    be active here.
    """
    (tmp_path / "part").mkdir()
    (tmp_path / "part/it.py").write_text("def one():\n    return 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(PASSES)

    def run(code):
        script = ON_A_TREE.format(ci=str(CI), tree=str(tmp_path)) + code
        command = [sys.executable, "-c", script]
        return subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_each_accepted_mutant_still_matches_the_code(mutants):
    """An entry whose line or function has changed would stop `make mutants`."""
    assert mutants._accepted()


@pytest.mark.long
def test_a_file_that_changes_while_mutants_are_judged_stops_the_judging(on_tree, tmp_path):
    """Verdicts by changed tests are wrong; the error names the changed file."""
    (tmp_path / "tests/test_other.py").write_text(PASSES)
    ended = on_tree(
        """
record("part")
recorded = LineRecord("part")
recorded.check()
print(recorded.tests, recorded.lines["part/it.py"]["2"])
with open("tests/test_it.py", "a") as file:
    file.write("# more")
recorded.check()
"""
    )
    assert "['tests/test_it.py::test_one', 'tests/test_other.py::test_one'] [0, 1]" in ended.stdout
    says = "run this again, or in a copy: tests/test_it.py changed since it was recorded"
    assert ended.stderr.splitlines()[-1] == says
    assert ended.returncode == 1


def test_a_record_without_one_of_the_test_files_is_not_used(on_tree):
    """It would report mutants of the code which that file tests as alive."""
    ended = on_tree('record("part"); open("tests/test_new.py", "w").close(); LineRecord("part")')
    says = "run this again, or in a copy: tests/test_new.py changed since it was recorded"
    assert ended.stderr.splitlines()[-1] == says


@pytest.mark.long
def test_a_file_that_changes_while_it_is_recorded_is_recorded_again(on_tree, tmp_path):
    """Otherwise the record would describe an older version of the file."""
    (tmp_path / "tests/test_it.py").write_text(CHANGES_ITSELF)
    ended = on_tree(
        """
for _ in range(2):
    record("part")
    print(changed_tests("part"))
"""
    )
    printed = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert printed == ["['tests/test_it.py']", "[]"]
