"""Print how the code is built, beside what it is to be: `make structure`.

    .ci/structure.py [--root DIR] [--check] [--verbose | --json]

What is read is the code alone: its files, syntax trees and imports. `--check` fails on a knot and
on a file of more than 400 lines, and names each. `--verbose` lists what is behind each figure,
`--json` writes everything, to be compared. Generated stubs (shared/pb) are left out.

How it is counted:
1. Imports inside functions count like others: a module needs what it imports late, too. Those
   under `if TYPE_CHECKING:` do not. An import of a name from a package is one of its `__init__`.
2. A chain is of modules, each importing the next; modules in a circle count as one.
3. A knot is a circle among the parts of one package, its sub-packages and modules. "cut" names
   imports without which there is none (a small set, not always the smallest).
4. A line of code holds neither only a comment, nor a docstring, nor nothing. A module is a file
   but for `__init__.py`. A file's length is in physical lines.
5. A method only forwards if it does nothing, but for its docstring and a leading `advance(...)` of
   the time, but call a part of its object or a function with such a part first, or return a part's
   attribute. One that gives the part something besides its own arguments and what is read off them
   (a constant, a value of the object, something made of them) knows what its caller need not: that
   is its work. A table that the object has made itself (`self._x = {}`) is no part of it, but what
   it is: its methods are the only ones that may have hold of it. Methods with the same arguments,
   which do not even choose among them, are counted once more.
6. Modules fit into their only importer, of the same folder, if all of them have at most 320 lines.
7. tests/PATH/test_NAME.py mirrors PATH/NAME.py. A module without one is listed with test files
   that import it.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import grimp
from import_graph import GENERATED, PACKAGES, chain_of, knots_of, read_graph

MAX_LINES = 400
MAX_MERGED_LINES = 320
SMALL = 40  # lines of code
WORST = 10  # classes that forward most
COVERING = 3  # test files that are named for a module which none mirrors
# What each figure is to be at most; the others have no bound.
BOUNDS = {
    "longest import chain": 20,
    "files at the top of kvd": 10,
    "files at the top of kvd/core": 4,
    "files at the top of shared": 4,
    "files at the top of inference_svc/http_api": 12,
    f"modules with < {SMALL} lines of code": 72,
    "modules with exactly one importer": 97,
    "lines of code that are imports, %": 7.0,
    "knots": 0,
    "methods that only forward": 60,
    f"files over {MAX_LINES} lines": 0,
    "lines of code": 45_000,
}
CHECKED = ("knots", f"files over {MAX_LINES} lines")
ALWAYS_LISTED = (*CHECKED, "methods that only forward")
TABLES = {  # types of containers, as they are made
    *("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"),
    *("SortedList", "SortedKeyList", "SortedDict", "SortedSet"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    value: float
    bound: float | None  # at most
    details: Sequence[str]  # what is behind it

    @property
    def is_over(self) -> bool:
        """Whether it is above its bound."""
        return self.bound is not None and self.value > self.bound


class Source:
    """A file of Python as it is counted; `code` are the numbers of its lines of code."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(text)
        nodes = list(ast.walk(self.tree))
        lines = text.splitlines()
        self.num_lines = len(lines)
        strings = {
            number
            for node in nodes
            if isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
            for number in _lines_of(node)[1:]  # where a number sign begins no comment
        }
        docs = {number for node in nodes for number in _docstring_lines(node)}
        written = {number for number, line in enumerate(lines, 1) if line.strip()} | strings
        comments = {
            number
            for number in written - strings - docs
            if lines[number - 1].lstrip().startswith("#")
        }
        self.code = written - docs - comments
        self.num_comments = len(comments)
        imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        self.num_imports = len({number for node in imports for number in _lines_of(node)})

    @property
    def is_module(self) -> bool:
        """Whether it is no package's own file."""
        return self.path.name != "__init__.py"

    @cached_property
    def module(self) -> str:
        """Its name, as it is imported."""
        path = self.path.with_suffix("") if self.is_module else self.path.parent
        return ".".join(path.parts)

    def __str__(self) -> str:
        return f"{self.path} ({self.num_lines})"


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstring_lines(node: ast.AST) -> range:
    documented = ast.Module | ast.ClassDef | Function
    has = isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    return _lines_of(node.body[0]) if has else range(0)


# ----------------------------------------------------------------------------------- forwarding


def forwarding(sources: Sequence[Source]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Count methods that only forward.

    Returns:
        By class: how many forward, of how many methods; how many there are in all, and how many
        with the same arguments.
    """
    by_class, num_all, num_same = {}, 0, 0
    for source in sources:
        for owner in (n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)):
            methods = [node for node in owner.body if isinstance(node, Function)]
            forwarding = [m for m in methods if _forwards(m, _own_tables(owner))]
            if forwarding:
                by_class[f"{source.module}.{owner.name}"] = (len(forwarding), len(methods))
            num_all += len(forwarding)
            num_same += sum(_has_same_arguments(method) for method in forwarding)
    return by_class, num_all, num_same


def _own_tables(owner: ast.ClassDef) -> set[str]:
    """Name the attributes that an object makes empty or full containers of itself."""
    made = set()
    for node in ast.walk(owner):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name("self"), attr=name)], value=value
            ):
                pass
            case ast.AnnAssign(
                target=ast.Attribute(value=ast.Name("self"), attr=name), value=value
            ):
                pass
            case ast.AnnAssign(target=ast.Name(name), value=ast.Call(keywords=keywords)):
                value = next((k for k in keywords if k.arg == "default_factory"), None)
            case _:
                continue
        if _is_table(value):
            made.add(name)
    return made


def _is_table(value: ast.AST | None) -> bool:
    """Whether a container is made: `{}`, `deque(...)`, `dict[int, str]()`, a field's factory."""
    match value:
        case ast.keyword(value=ast.Name(name)) | ast.Call(func=ast.Name(name)):
            return name in TABLES
        case ast.Call(func=ast.Subscript(value=ast.Name(name))):
            return name in TABLES
    displays = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, displays)


def _forwards(method: Function, tables: set[str]) -> bool:
    match _only_value(method):
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[first, *_]) as call if (
            name != "self" and _depth(first)
        ):
            return _adds_nothing(method, call, 1)  # a function of a module, with a part
        case ast.Call(func=ast.Attribute(value=ast.Attribute(ast.Name("self"), name))) if (
            name in tables
        ):
            return False
        case ast.Call(func=reached) as call:
            return _depth(reached) >= 2 and _adds_nothing(method, call)
        case ast.Attribute() as reached:
            return _depth(reached) >= 2
    return False


def _adds_nothing(method: Function, call: ast.Call, num_first: int = 0) -> bool:
    """Whether a call's arguments, but for the first, are the method's own, or read off them."""
    own = _argument_names(method)
    given = _given(call)[num_first:]
    while given:
        match given.pop():
            case ast.Attribute(value=value) | ast.Starred(value=value):
                given.append(value)
            case ast.Tuple(elts=values) | ast.List(elts=values):
                given += values
            case ast.Name(name) if name in own:
                pass
            case _:
                return False
    return True


def _only_value(method: Function) -> ast.expr | None:
    """What the only statement calls or returns; None if there are others."""
    body = method.body[bool(ast.get_docstring(method, clean=False)) :]
    match body:
        case [ast.Expr(value=ast.Call(func=ast.Attribute(attr="advance"))), last]:
            body = [last]
    match body:
        case [ast.Return(value=value) | ast.Expr(value=value)]:
            return value.value if isinstance(value, ast.Await) else value
    return None


def _depth(node: ast.expr) -> int:
    """How many attributes are followed from self: 2 for self.a.b; 0 if it begins elsewhere."""
    depth = 0
    while isinstance(node, ast.Attribute):
        node, depth = node.value, depth + 1
    return depth if isinstance(node, ast.Name) and node.id == "self" else 0


def _has_same_arguments(method: Function) -> bool:
    value = _only_value(method)
    if not isinstance(value, ast.Call) or _depth(value.func) < 2:
        return False
    given = [arg.value if isinstance(arg, ast.Starred) else arg for arg in _given(value)]
    names = sorted(_argument_names(method))
    return names == sorted(arg.id if isinstance(arg, ast.Name) else "" for arg in given)


def _argument_names(method: Function) -> set[str]:
    takes = method.args
    own = [*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg]
    return {argument.arg for argument in own if argument and argument.arg != "self"}


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


# ---------------------------------------------------------------------------------------- figures


def measure(root: Path) -> list[Figure]:
    """Read the code below `root` and count."""
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    all_sources = [Source(root, path) for path in files]
    sources = {s.module: s for s in all_sources if not s.module.startswith(GENERATED)}
    tests = [Source(root, path) for path in sorted((root / "tests").rglob("*.py"))]
    graph = read_graph(root, sources)
    rows = [*_shape(root, sources, graph, tests), *_forms(list(sources.values()))]
    rows += _sizes(list(sources.values()), tests)
    return [Figure(name, value, BOUNDS.get(name), details) for name, value, details in rows]


Row = tuple[str, float, Sequence[str]]


def _shape(
    root: Path, sources: dict[str, Source], graph: grimp.ImportGraph, tests: Sequence[Source]
) -> Iterator[Row]:
    chain = chain_of(graph)
    yield "longest import chain", len(chain), chain
    for folder in ("kvd", "kvd/core", "shared", "inference_svc", "inference_svc/http_api"):
        here = [s for s in sources.values() if s.is_module and s.path.parent == Path(folder)]
        if (root / folder).is_dir():
            yield f"files at the top of {folder}", len(here), [str(source) for source in here]
    modules = [source for source in sources.values() if source.is_module]
    small = [str(source) for source in modules if len(source.code) < SMALL]
    yield f"modules with < {SMALL} lines of code", len(small), small
    users = {s.module: graph.find_modules_that_directly_import(s.module) for s in modules}
    single = [(s, sources[min(users[s.module])]) for s in modules if len(users[s.module]) == 1]
    near = [(source, user) for source, user in single if source.path.parent == user.path.parent]
    fits = _merged(near)
    rows = {"": single, ", in its folder": near, ", into which it fits": fits}
    for which, pairs in rows.items():
        details = [f"{source} <- {user}" for source, user in pairs]
        yield f"modules with exactly one importer{which}", len(pairs), details
    knots = list(knots_of(graph))
    yield "knots", len(knots), [line for knot in knots for line in knot]
    mirrors = {s: root / "tests" / s.path.with_name(f"test_{s.path.name}") for s in modules}
    without = [source for source, mirror in mirrors.items() if not mirror.exists()]
    covering = _importers(tests)
    details = [f"{s}: {', '.join(covering.get(s.module, ['none imports it']))}" for s in without]
    yield "modules without a test file that mirrors them", len(without), details
    strange = [str(source) for source in without if source.module not in covering]
    yield "modules that no test file mirrors or imports", len(strange), strange


def _importers(tests: Sequence[Source]) -> dict[str, list[str]]:
    """Name the first test files that import each module, by the module's name."""
    found: dict[str, list[str]] = {}
    for test in tests:
        for node in ast.walk(test.tree):
            names = {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            for name in names:
                files = found.setdefault(name, [])
                if str(test.path) not in files and len(files) < COVERING:
                    files.append(str(test.path))
    return found


def _merged(pairs: Sequence[tuple[Source, Source]]) -> list[tuple[Source, Source]]:
    """Choose the modules that fit into their users together, the shortest ones first."""
    lengths = {user.path: user.num_lines for _, user in pairs}
    fits = []
    for source, user in sorted(pairs, key=lambda pair: pair[0].num_lines):
        length = lengths[user.path] + source.num_lines
        if length <= MAX_MERGED_LINES:
            lengths[user.path] = length
            fits.append((source, user))
    return fits


def _forms(sources: Sequence[Source]) -> Iterator[Row]:
    by_class, num_forwarding, num_same = forwarding(sources)
    worst = sorted(by_class.items(), key=lambda item: (-item[1][0], item[0]))[:WORST]
    details = [f"{name}: {number} of {of} methods" for name, (number, of) in worst]
    yield "methods that only forward", num_forwarding, details
    yield "methods that only forward, with the same arguments", num_same, ()
    functions = (n for s in sources for n in ast.walk(s.tree) if isinstance(n, Function))
    docs = [doc for doc in map(ast.get_docstring, functions) if doc]
    yield "functions with a docstring", len(docs), ()
    for section in ("Args", "Returns"):
        num_docs = sum(f"{section}:" in doc.split() for doc in docs)
        yield f"functions with {section} in theirs", num_docs, ()


def _sizes(sources: Sequence[Source], tests: Sequence[Source]) -> Iterator[Row]:
    for which, files in (("files", sources), ("test files", tests)):
        long = [str(source) for source in files if source.num_lines > MAX_LINES]
        yield f"{which} over {MAX_LINES} lines", len(long), long
    num_code: Counter[str] = Counter()
    for source in sources:
        num_code[source.path.parts[0]] += len(source.code)
    num_lines, total = sum(s.num_lines for s in sources), num_code.total()
    yield "modules", sum(source.is_module for source in sources), ()
    yield "physical lines", num_lines, ()
    yield "lines of code", total, ()
    for package, number in sorted(num_code.items()):
        yield f"lines of code of {package}", number, ()
    num_imports = sum(source.num_imports for source in sources)
    yield "lines of code that are imports, %", _percent(num_imports, total), ()
    num_comments = sum(source.num_comments for source in sources)
    yield "lines that are comments, %", _percent(num_comments, num_lines), ()
    num_test_code = sum(len(source.code) for source in tests)
    yield "lines of test code to a line of code", round(num_test_code / max(1, total), 2), ()


def _percent(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 1)


# ------------------------------------------------------------------------------------------ main


def table(figures: Sequence[Figure], *, is_verbose: bool) -> Iterator[str]:
    """Yield the lines of the table, and of what is behind its figures."""
    width = max(len(figure.name) for figure in figures)
    yield f"{'':{width}}  {'is':>8}  to be"
    for figure in figures:
        bound = "" if figure.bound is None else f"<= {figure.bound:,}"
        mark = "  *" if figure.is_over else ""
        yield f"{figure.name:{width}}  {figure.value:>8,}  {bound}{mark}".rstrip()
    for figure in figures:
        if figure.details and (is_verbose or figure.name in ALWAYS_LISTED):
            yield f"\n{figure.name}:"
            yield from (f"  {line}" for line in figure.details)


def main() -> int:
    """Count and print; with --check 1 if there is a knot or a file that is too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--check", action="store_true", help="fail on a knot and on a long file")
    parser.add_argument("--verbose", action="store_true", help="list what is behind each figure")
    parser.add_argument("--json", action="store_true", help="write everything as JSON")
    options = parser.parse_args()
    figures = measure(options.root.resolve())
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
    else:
        print("\n".join(table(figures, is_verbose=options.verbose)))
    wrong = [f for f in figures if f.name in CHECKED and f.is_over] if options.check else []
    for figure in wrong:
        named = (line for line in figure.details if not line.startswith(" "))
        print(f"structure: {figure.name}: {'; '.join(named)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
