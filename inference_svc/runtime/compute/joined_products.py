"""Joined products: one call for several products of the same rows, as queries, keys and values are.

Weights packed for our kernel are panels of columns (`product_kernel.py`). Where those of several
layers lie side by side in memory, as they do in the order of the model, they are the panels of one
wider layer: no weight is copied, and each result has the same bits.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from inference_svc.runtime.compute.graph_pieces import tensor_of


@dataclass(frozen=True)
class _Product:
    """A product in a graph: its node, weights, [panels, pieces, panel, depth], and bias."""

    node: Node
    packed: Tensor
    bias: Tensor | None
    columns: int


def join_products(whole: GraphModule) -> None:
    """Replace products of the same rows by one; `whole` has one for each layer."""
    multiply = torch.ops.cachedattention.multiply_packed.default
    by_rows: dict[Any, list[_Product]] = {}
    for node in whole.graph.nodes:
        if node.target is multiply and node.args[1].op == "get_attr":
            rows, packed, bias, columns = node.args
            added = None if bias is None else tensor_of(whole, bias)
            product = _Product(node, tensor_of(whole, packed), added, columns)
            by_rows.setdefault(rows, []).append(product)
    for rows, products in by_rows.items():
        for number, neighbours in enumerate(_side_by_side(products)):
            if len(neighbours) > 1:
                _join(whole, rows, neighbours, f"joined_{rows.name}_{number}")


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
    one, other = before.packed, after.packed
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and (one.dtype, one.shape[1:]) == (other.dtype, other.shape[1:])
        and before.columns == one.shape[0] * one.shape[2]
        and (before.bias is None) == (after.bias is None)
    )


def _join(whole: GraphModule, rows: Node, products: Sequence[_Product], name: str) -> None:
    """Replace products by one, whose columns are theirs."""
    first = products[0]
    num_panels = sum(product.packed.shape[0] for product in products)
    sizes = (num_panels, *first.packed.shape[1:])
    packed = first.packed.as_strided(sizes, first.packed.stride())
    columns = [product.columns for product in products]
    biases = [product.bias for product in products if product.bias is not None]
    graph = whole.graph
    with graph.inserting_before(first.node):
        weights = _constant(whole, f"{name}_packed", packed)
        bias = _constant(whole, f"{name}_bias", torch.cat(biases)) if biases else None
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


def _constant(whole: GraphModule, name: str, tensor: Tensor) -> Node:
    """Add a tensor to a graph, at the place where nodes are inserted."""
    whole.register_buffer(name, tensor, persistent=False)
    return whole.graph.get_attr(name)
