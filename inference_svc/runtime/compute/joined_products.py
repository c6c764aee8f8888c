"""Joined products: one call for several products of the same rows, as queries, keys and values are.

Weights packed for our kernel are panels of columns (`product_kernel.py`). Where those of several
layers lie side by side in memory, as they do in the order of the model, they are the panels of one
wider layer: no weight is copied, and each result has the same bits.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from inference_svc.runtime.compute.graph_pieces import weight_of


@dataclass(frozen=True)
class _Product:
    """A product in a graph: its node, weights, [panels, pieces, panel, depth], and bias."""

    node: Node
    packed: Tensor
    bias: Tensor | None
    columns: int


class JoinedWeights(NamedTuple):
    """The weights of a joined product, or its bias.

    Attributes:
        joined: what is multiplied with, or added.
        parts: the layers' own.
    """

    joined: Tensor
    parts: tuple[Tensor, ...]


def join_products(whole: GraphModule) -> list[JoinedWeights]:
    """Replace products of the same rows by one; `whole` has one for each layer.

    Returns:
        The weights of the joined products.
    """
    multiply = torch.ops.cachedattention.multiply_packed.default
    by_rows: dict[Any, list[_Product]] = {}
    for node in whole.graph.nodes:
        if node.target is multiply and node.args[1].op == "get_attr":
            rows, packed, bias, columns = node.args
            added = None if bias is None else weight_of(whole, bias)
            product = _Product(node, weight_of(whole, packed), added, columns)
            by_rows.setdefault(rows, []).append(product)
    made: list[JoinedWeights] = []
    for rows, products in by_rows.items():
        for number, neighbours in enumerate(_side_by_side(products)):
            if len(neighbours) > 1:
                made += _join(whole, rows, neighbours, f"joined_{rows.name}_{number}")
    return made


def join_weights(parts: Sequence[Tensor]) -> JoinedWeights:
    """Join packed weights, [panels, pieces, panel, depth], without a copy, or biases, [columns].

    Raises:
        ValueError: packed weights do not lie side by side.
    """
    if parts[0].dim() == 1:
        return JoinedWeights(torch.cat([part.detach() for part in parts]), tuple(parts))
    if not all(_are_adjacent(one, other) for one, other in pairwise(parts)):
        raise ValueError("weights do not lie side by side")
    sizes = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return JoinedWeights(parts[0].detach().as_strided(sizes, parts[0].stride()), tuple(parts))


def _side_by_side(products: Sequence[_Product]) -> Iterator[list[_Product]]:
    """Divide products into those whose weights lie side by side."""
    found = [products[0]]
    for before, after in pairwise(products):
        if not _is_beside(before, after):
            yield found
            found = []
        found.append(after)
    yield found


def _is_beside(before: _Product, after: _Product) -> bool:
    """Whether a product's panels, of which the last one is full, end where another's begin."""
    return (
        _are_adjacent(before.packed, after.packed)
        and before.columns == before.packed.shape[0] * before.packed.shape[2]
        and (before.bias is None) == (after.bias is None)
    )


def _are_adjacent(one: Tensor, other: Tensor) -> bool:
    """Whether packed weights end where others begin."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and (one.dtype, one.shape[1:]) == (other.dtype, other.shape[1:])
    )


def _join(
    whole: GraphModule, rows: Node, products: Sequence[_Product], name: str
) -> list[JoinedWeights]:
    """Replace products by one, whose columns are theirs; return its weights."""
    first = products[0]
    made = [join_weights([product.packed for product in products])]
    biases = [product.bias for product in products if product.bias is not None]
    if biases:
        made.append(join_weights(biases))
    columns = [product.columns for product in products]
    graph = whole.graph
    with graph.inserting_before(first.node):
        weights = _constant(whole, f"{name}_packed", made[0].joined)
        bias = _constant(whole, f"{name}_bias", made[1].joined) if biases else None
        multiply: Any = first.node.target
        joined = graph.call_function(multiply, (rows, weights, bias, sum(columns)))
        split = graph.call_function(torch.ops.aten.split_with_sizes.default, (joined, columns, -1))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(products))]
    value = first.node.meta["val"]
    joined.meta["val"] = value.new_empty(*value.shape[:-1], sum(columns))
    split.meta["val"] = joined.meta["val"].split_with_sizes(columns, -1)
    for product, part, part_value in zip(products, parts, split.meta["val"], strict=True):
        part.meta["val"] = part_value
        product.node.replace_all_uses_with(part)
        graph.erase_node(product.node)
    return made


def _constant(whole: GraphModule, name: str, tensor: Tensor) -> Node:
    """Add a tensor to a graph, at the place where nodes are inserted."""
    whole.register_buffer(name, tensor, persistent=False)
    return whole.graph.get_attr(name)
