"""What `make structure` counts, on a small tree whose figures are known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "structure.py"

FORWARDING = '''"""Classes."""


class Forwarder:
    """Forwards."""

    rows: list = field(default_factory=list)

    def __init__(self, part, state):
        self._part = part
        self._state = state
        self._table = {}
        self._order: SortedList = SortedList()

    def same(self, key, *, depth):
        """Same arguments."""
        return self._part.same(key, depth=depth)

    async def other(self, key):
        return await self._part.inner.changed((key.tenant, *key.names))

    # what it is not told, or is its own: no forwarding
    def with_constant(self, key):
        return self._part.inner.changed(key, 1)

    def with_own(self, key):
        return self._part.changed(key, self._state)

    def with_made(self, key):
        return functions.act(self._part, key=str(key))

    def of_table(self, key):
        return self._table.pop(key)

    def of_order(self, key):
        return self._order.index(key)

    def of_rows(self, row):
        self.rows.append(row)

    def timed(self, key, now_ns):
        """Advance the time, then call a function with a part."""
        self._state.advance(now_ns)
        functions.act(self._state, key)

    @property
    def size(self):
        return self._part.size

    def own(self, key):
        """Call itself: no forwarding."""
        return self._find(key)

    def more(self, key):
        self._part.same(key)
        return self._part.other(key)

    def function(self, key):
        return functions.act(key)

    def getter(self):
        return self._part
'''
COUNTED = '''"""Has a docstring
of two lines."""

# A comment.
import os
from kvd.core import (
    block,
)

NOTE = """
# no comment
"""


def f(x):
    """Do.

    Args:
        x: a number.

    Returns:
        Another.
    """
    return x  # not a line of its own
'''
FILES = {
    # a chain of five, whose last step but one is imported inside a function
    "kvd/__init__.py": "",
    "kvd/app.py": "import kvd.core.engine\nimport kvd.long\n",
    "kvd/core/__init__.py": '"""The core."""\n',
    "kvd/core/engine.py": "from kvd.core import state\n",
    "kvd/core/state.py": "def f():\n    from kvd.core.block import Block\n    return Block\n",
    "kvd/core/block.py": "from shared.units import Block\n",
    # of which TYPE_CHECKING would make a circle, and a chain of six
    "shared/__init__.py": "",
    "shared/units.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shared.late\nBlock = 1\n"
    ),
    "shared/late.py": "import shared.units\n",
    "shared/pb/__init__.py": "",
    "shared/pb/stubs.py": "import shared.units\n" * 500,
    # a knot of three, of a module and two packages, and one of modules alone
    "inference_svc/__init__.py": "",
    "inference_svc/config.py": "import inference_svc.left.a\n",
    "inference_svc/left/__init__.py": "",
    "inference_svc/left/a.py": "import inference_svc.right.b\nimport inference_svc.left.c\n",
    "inference_svc/left/c.py": "import inference_svc.left.a\n",
    "inference_svc/right/__init__.py": "",
    "inference_svc/right/b.py": "import inference_svc.config\n",
    "inference_svc/right/alone.py": FORWARDING,
    "inference_svc/right/counted.py": COUNTED,
    "kvd/long.py": "x = 1\n" * 401,
    "kvd/full.py": "x = 1\n" * 400,
    "tests/kvd/core/test_block.py": "def test_it():\n    assert 1\n" + "\n# A comment.\n" * 300,
    # mirrors nothing, and covers two
    "tests/kvd/test_both.py": "import kvd.app\nfrom kvd.core import engine\n",
}


def write(root, files):
    """Write files below a directory."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(root, *options):
    return subprocess.run(
        (sys.executable, SCRIPT, "--root", root, *options),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tree"), FILES)


@pytest.fixture(scope="module")
def figures(tree):
    asked = run(tree, "--json")
    assert asked.returncode == 0, asked.stderr
    return {figure["name"]: figure for figure in json.loads(asked.stdout)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files at the top of kvd", 3),
        ("files at the top of kvd/core", 3),
        ("files at the top of shared", 2),
        ("files at the top of inference_svc", 1),
        ("modules with < 40 lines of code", 12),
        ("modules with exactly one importer", 6),
        ("modules with exactly one importer, in its folder", 3),
        ("modules with exactly one importer, into which it fits", 2),
        ("knots", 2),
        ("modules without a test file that mirrors them", 13),
        ("modules that no test file mirrors or imports", 11),
        ("methods that only forward", 4),
        ("methods that only forward, with the same arguments", 1),
        ("functions with a docstring", 4),
        ("functions with Args in theirs", 1),
        ("functions with Returns in theirs", 1),
        ("files over 400 lines", 1),
        ("test files over 400 lines", 1),
        ("modules", 14),
        ("lines of code of shared", 5),
        ("lines of code of kvd", 808),
    ],
)
def test_each_figure_matches_the_tree(figures, name, value):
    assert figures[name]["value"] == value, figures[name]["details"]


def test_the_longest_chain_takes_late_imports_and_none_for_types(figures):
    """An import inside a function is a step; one under TYPE_CHECKING would be a third knot."""
    assert figures["longest import chain"]["details"] == [
        "kvd.app",
        "kvd.core.engine",
        "kvd.core.state",
        "kvd.core.block",
        "shared.units",
    ]


def test_a_cycle_is_reported_with_its_edges_and_those_that_cut_it(figures):
    """Cycles of packages, of modules of one package, and of modules and packages are reported."""
    of_packages, of_modules = "\n".join(figures["knots"]["details"]).split("\ninference_svc.left: ")
    lines = of_packages.split("\n")
    assert lines[0] == "inference_svc: config, left, right"
    edges = [
        "  config -> left, 1: inference_svc.config:1 imports inference_svc.left.a",
        "  left -> right, 1: inference_svc.left.a:1 imports inference_svc.right.b",
        "  right -> config, 1: inference_svc.right.b:1 imports inference_svc.config",
    ]
    assert lines[1:4] == edges
    (cut,) = lines[4:]
    assert cut.removeprefix("  cut: ") in {edge.split(": ")[1] for edge in edges}
    assert of_modules.startswith("a, c\n")


def test_lines_are_counted_without_docstrings_comments_and_blanks(tmp_path):
    """A number sign in a string begins no comment; a comment beside code is no line."""
    write(tmp_path, {"kvd/__init__.py": "", "kvd/counted.py": COUNTED.replace("kvd.core", "kvd")})
    figures = {f["name"]: f["value"] for f in json.loads(run(tmp_path, "--json").stdout)}
    assert figures["physical lines"] == 24
    assert figures["lines of code"] == 9
    assert figures["lines of code that are imports, %"] == 44.4
    assert figures["lines that are comments, %"] == 4.2


def test_a_check_fails_on_knots_and_long_files_and_names_them(tree):
    """Run the check on a tree with a cycle and a long file: it fails and names both."""
    asked = run(tree, "--check")
    assert asked.returncode == 1
    assert asked.stderr.splitlines() == [
        "structure: knots: inference_svc: config, left, right; inference_svc.left: a, c",
        "structure: files over 400 lines: kvd/long.py (401)",
    ]
    assert "methods that only forward, with" in asked.stdout


def test_a_check_of_a_tree_without_cycles_and_long_files_passes(tmp_path):
    """Other figures are reported, but do not fail the check."""
    files = {name: text for name, text in FILES.items() if name.startswith(("kvd/", "shared/"))}
    files["kvd/long.py"] = ""
    asked = run(write(tmp_path, files), "--check")
    assert (asked.returncode, asked.stderr) == (0, "")
    shares = [line for line in asked.stdout.splitlines() if line.startswith("lines of code that")]
    assert len(shares) == 1


def test_lists_are_printed_only_on_request(tree):
    title = "modules without a test file that mirrors them:"
    assert title not in run(tree).stdout.splitlines()
    lines = run(tree, "--verbose").stdout.splitlines()
    without = lines[lines.index(title) + 1 :]
    without = without[: without.index("")]
    assert "  kvd/app.py (2): tests/kvd/test_both.py" in without
    assert "  kvd/long.py (401): none imports it" in without
    assert not any("block" in line for line in without)


def test_a_file_outside_a_package_is_refused(tmp_path):
    """The imports of such a file would not be seen."""
    asked = run(write(tmp_path, {"kvd/__init__.py": "", "kvd/lost/file.py": ""}))
    assert asked.returncode == 1
    assert (
        asked.stderr == "structure: no package holds kvd.lost.file; add an __init__.py beside it\n"
    )
