"""Writes diagram and table of packages of docs/architecture.md, from imports and docstrings.

python -m tests.docs.package_diagram

The text outside the two markers is written by hand.
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- `python -m tests.docs.package_diagram` writes from here on. -->"
END = "<!-- Up to here. -->"
PROCESSES = ("inference_svc", "kvd")
BELOW = "shared"
INSIDE = ("inference_svc.runtime", "kvd.core")  # packages large enough to show their parts
GENERATED = "shared.pb"


def document() -> str:
    """Return the whole document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generate()}\n\n{END}{after}"


def generate() -> str:
    """Return the part between the markers: a diagram of layers, and each package's purpose."""
    graph = grimp.build_graph(*PROCESSES, BELOW, exclude_type_checking_imports=True, cache_dir=None)
    for module in [m for m in graph.modules if f"{m}.".startswith(f"{GENERATED}.")]:
        graph.remove_module(module)
    diagram = [
        *_beside(graph, PROCESSES),
        "",
        *_beside(graph, (BELOW,)),
        "",
        *_beside(graph, INSIDE),
    ]
    return "\n".join(("```", *(line.rstrip() for line in diagram), "```", "", *_table(graph)))


def _beside(graph: grimp.ImportGraph, packages: Sequence[str]) -> Iterator[str]:
    """Draw packages side by side, each as layers: a part imports from lower layers only."""
    columns = [_column(graph, package) for package in packages]
    widths = [max(map(len, column)) for column in columns]
    for row in zip_longest(*columns, fillvalue=""):
        yield "    ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))


def _column(graph: grimp.ImportGraph, package: str) -> list[str]:
    floors = [" · ".join(floor) for floor in _floors(graph, package)]
    width = max(len(package), *map(len, floors)) + 2
    cells = (f"│ {floor:{width - 2}} │" for floor in floors)
    return [
        f"┌{f' {package} ':─^{width}}┐",
        *cells,
        f"└{'─' * width}┘",
    ]


def _floors(graph: grimp.ImportGraph, package: str) -> list[list[str]]:
    """Arrange the parts of a package in layers, the top first: each below all that import it."""
    depth = package.count(".") + 1
    parts = nx.DiGraph()
    inside = graph.find_descendants(package)
    parts.add_nodes_from(module.split(".")[depth] for module in inside)
    for importer in inside:
        for imported in graph.find_modules_directly_imported_by(importer) & inside:
            edge = importer.split(".")[depth], imported.split(".")[depth]
            if edge[0] != edge[1]:
                parts.add_edge(*edge)
    return [sorted(floor) for floor in nx.topological_generations(parts)]


def _table(graph: grimp.ImportGraph) -> Iterator[str]:
    yield "| package | what it is for |"
    yield "|---|---|"
    for module in sorted(graph.modules):
        path = ROOT.joinpath(*module.split("."), "__init__.py")
        if path.exists():
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            purpose = " ".join(doc.split("\n\n")[0].split())
            yield f"| `{module.replace('.', '/')}` | {purpose} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
