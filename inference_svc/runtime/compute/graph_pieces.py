"""Graph pieces: a graph divided at operations that a compiler cannot look into, as attention is.

What lies between two of them is a piece. The layers of a model are the same operations over other
weights: with weights as arguments, most pieces are equal, and a compiler makes kernels of a few
instead of all (piecewise compilation, as in vLLM). Sizes are not passed between pieces: each reads
them from the shapes of its arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Operation:
    """An operation that stands alone, as a function that returns all of its results.

    Attributes:
        target: an operator of torch.
    """

    target: Any

    def __call__(self, *arguments: Any) -> Sequence[Tensor]:
        """Compute it."""
        return (self.target(*arguments),)


@dataclass(frozen=True)
class Part:
    """A piece, or an operation between pieces.

    Attributes:
        run: computes it; takes the arguments' values, and returns those of the outputs.
        arguments: nodes of the whole graph, and constants.
        outputs: nodes of the whole graph.
        key: equal for pieces that do the same with tensors of the same shapes; "": no piece.
    """

    run: Run
    arguments: tuple[Any, ...]
    outputs: tuple[Node, ...]
    key: str = ""


def divide(whole: GraphModule, is_cut: Callable[[Node], bool]) -> list[Part]:
    """Divide a graph, and drop operations whose results nobody reads.

    Args:
        whole: the graph; its operations have no side effects, and one result each.
        is_cut: whether an operation stands alone; it may not take or return sizes.

    Returns:
        The parts in an order in which they can run; `run` of a piece is a `GraphModule`.
    """
    whole.graph.eliminate_dead_code()
    parts: list[Part] = []
    pending: list[Node] = []
    for node in whole.graph.nodes:
        if node.op != "call_function" or is_size(node):
            continue
        if not is_cut(node):
            pending.append(node)
            continue
        if pending:
            parts.append(_piece(whole, pending))
            pending = []
        parts.append(Part(Operation(node.target), node.args, (node,)))
    if pending:
        parts.append(_piece(whole, pending))
    return parts


def is_size(node: Node) -> bool:
    """Whether an operation returns a number, such as the size of a tensor."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, int | torch.SymInt)


def tensor_of(whole: GraphModule, node: Node) -> Tensor:
    """Return a graph's weight; of other nodes, what the trace had: a tensor without contents."""
    found = weight_of(whole, node) if node.op == "get_attr" else node.meta["val"]
    assert isinstance(found, Tensor), f"{node} is not a tensor"  # noqa: S101
    return found.detach()


def weight_of(whole: GraphModule, node: Node) -> Tensor:
    """Return a graph's weight itself: the model's, unless another was put there."""
    found: Any = whole
    for name in str(node.target).split("."):
        found = getattr(found, name)
    weight: Tensor = found
    return weight


def _piece(whole: GraphModule, nodes: Sequence[Node]) -> Part:
    """Make a graph of some operations of the whole one."""
    own = set(nodes)
    inputs = tuple(dict.fromkeys(_tensors_read(nodes, own)))
    outputs = tuple(node for node in nodes if any(user not in own for user in _readers(node)))
    graph = Graph()
    copies: dict[Node, Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{number}")
        copies[node].meta["val"] = tensor_of(whole, node)

    def copy_of(node: Node) -> Node:
        if node not in copies:  # operations are copied in order, so it is a size
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    for node in nodes:
        copy_of(node)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(GraphModule({}, graph), inputs, outputs, _key(graph))


def _tensors_read(nodes: Sequence[Node], own: set[Node]) -> Iterator[Node]:
    """Yield the tensors of others that some operations read, also for sizes of theirs."""
    for node in nodes:
        for read in node.all_input_nodes:
            if is_size(read):
                yield from _tensors_read([read], own)
            elif read not in own:
                yield read


def _readers(node: Node) -> Iterator[Node]:
    """Yield the operations that read a tensor, also those that read a size of it."""
    for user in node.users:
        if is_size(user):
            yield from _readers(user)
        else:
            yield user


def _key(graph: Graph) -> str:
    """Describe a graph's operations and the shapes of its inputs, without names."""
    numbers: dict[Node, int] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append(f"{value.dtype} {value.device} {value.layout} {list(value.shape)}")
            if value.layout == torch.strided:
                lines.append(f"{value.stride()}")
        else:
            arguments = map_arg((node.args, node.kwargs), lambda read: f"%{numbers[read]}")
            lines.append(f"{node.op} {node.target} {arguments}")
    return "\n".join(lines)
