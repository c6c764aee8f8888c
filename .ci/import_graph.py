"""Who imports whom: the graph of the code's modules, its longest chain, its knots."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp
import networkx as nx

PACKAGES = ("inference_svc", "kvd", "shared")
GENERATED = "shared.pb"


def read_graph(root: Path, modules: Iterable[str]) -> grimp.ImportGraph:
    """Read who imports whom. A file outside a package would go unseen, and is refused.

    Args:
        root: the checkout.
        modules: the names of all files.
    """
    sys.path.insert(0, str(root))
    packages = [package for package in PACKAGES if (root / package).is_dir()]
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    for module in [m for m in graph.modules if f"{m}.".startswith(f"{GENERATED}.")]:
        graph.remove_module(module)
    unseen = sorted(set(modules) - graph.modules)
    if unseen:
        sys.exit(f"structure: no package holds {', '.join(unseen)}; add an __init__.py beside it")
    return graph


def chain_of(graph: grimp.ImportGraph) -> list[str]:
    """Find the longest chain of modules, importer first; the modules of a circle are one."""
    whole = nx.DiGraph()
    modules = sorted(graph.modules)
    whole.add_nodes_from(modules)
    for importer in modules:
        imported = graph.find_modules_directly_imported_by(importer)
        whole.add_edges_from((importer, module) for module in sorted(imported))
    parts = sorted(nx.strongly_connected_components(whole), key=min)  # the same each time
    circles = nx.condensation(whole, parts)
    longest = nx.dag_longest_path(circles)
    return [" + ".join(sorted(circles.nodes[node]["members"])) for node in longest]


def knots_of(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Yield for each knot its package and parts, its edges, fewest first, and what would cut it."""
    for package in sorted(m for m in graph.modules if graph.find_children(m)):
        edges: dict[tuple[str, str], list[str]] = {}
        places: dict[tuple[str, str], str] = {}
        depth = package.count(".") + 1
        for importer, imported in _inner_imports(graph, package):
            edge = (importer.split(".")[depth], imported.split(".")[depth])
            if edge[0] != edge[1]:
                places[importer, imported] = place = _place(graph, importer, imported)
                edges.setdefault(edge, []).append(place)
        for parts in nx.strongly_connected_components(nx.DiGraph(list(edges))):
            if len(parts) == 1:
                continue
            inside = [edge for edge in edges if parts.issuperset(edge)]
            inside.sort(key=lambda edge: (len(edges[edge]), edge))
            cuts = sorted(graph.nominate_cycle_breakers(package))
            yield [
                f"{package}: {', '.join(sorted(parts))}",
                *(f"  {a} -> {b}, {len(edges[a, b])}: {edges[a, b][0]}" for a, b in inside),
                *(f"  cut: {places[cut]}" for cut in cuts if parts & {cut[0].split(".")[depth]}),
            ]


def _inner_imports(graph: grimp.ImportGraph, package: str) -> Iterator[tuple[str, str]]:
    inside = graph.find_descendants(package)
    for importer in sorted(inside):
        for imported in sorted(graph.find_modules_directly_imported_by(importer) & inside):
            yield importer, imported


def _place(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    details = graph.get_import_details(importer=importer, imported=imported)
    return f"{importer}:{details[0]['line_number']} imports {imported}"
