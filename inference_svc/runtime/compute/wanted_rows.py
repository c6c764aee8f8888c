"""Wanted rows: a graph computes the tokens whose logits are wanted, and no others, where it can.

A model's code takes the wanted rows behind its last layer. But behind the last attention nothing
reads the other tokens: of them only keys and values are needed. So the rows are taken before the
operations that handle each token by itself, up to attention's query: a prompt's last layer is then
little more than its keys and values.

Nobody has to list such operations: each is tried with several tokens, and with some of these.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from inference_svc.runtime.compute.graph_pieces import is_size, weight_of
from inference_svc.runtime.compute.traced_forward import ATTEND

TRIED_TOKENS = 5
TRIED_ROWS = (3, 0)  # their order must not matter either
TOLERANCE = 1e-2  # of the length; products of fewer rows may round otherwise


def take_rows_early(whole: GraphModule) -> int:
    """Change a graph so that what only leads to wanted rows is computed for these alone.

    Args:
        whole: `TracedForward.graph`.

    Returns:
        Number of operations that compute fewer rows; 0 if tensors are changed in place that others
        read, before or after.
    """
    whole.graph.eliminate_dead_code()
    if any(_changes_what_others_read(node) for node in whole.graph.nodes):
        return 0
    rows = _WantedRows(whole)
    narrow = rows.find_narrow()
    takers = [node for node in whole.graph.nodes if rows.is_taker(node)]
    for node in list(whole.graph.nodes):
        if node in narrow:
            rows.make_narrow(node, narrow)
    for taker in takers:
        if taker.args[0] in narrow:
            taker.replace_all_uses_with(taker.args[0])
    whole.graph.eliminate_dead_code()
    return len(narrow)


class _WantedRows:
    """The rows of one graph."""

    def __init__(self, whole: GraphModule) -> None:
        """Let the graph read its number of tokens from its first input only."""
        self._whole = whole
        nodes = list(whole.graph.nodes)
        token_ids, _, self._wanted = [node for node in nodes if node.op == "placeholder"]
        self._tokens: Any = token_ids.meta["val"].shape[1].node.expr
        self._taken: dict[Node, Node] = {}  # by node: its wanted rows
        with whole.graph.inserting_after(self._wanted):
            self._num_rows = _size_of(self._wanted, 0)
            self._num_tokens = _size_of(token_ids, 1)
        for node in nodes:
            if is_size(node) and self._is_number_of_tokens(node.meta["val"]):
                node.replace_all_uses_with(self._num_tokens)
                whole.graph.erase_node(node)

    def find_narrow(self) -> set[Node]:
        """Return the operations of whose results nobody reads more than wanted rows."""
        narrow: set[Node] = set()
        for node in reversed(self._whole.graph.nodes):
            is_taken = all(
                self.is_taker(user) or (user in narrow and node in _read_by_row(user))
                for user in node.users
            )
            if node.users and is_taken and self._can_be_narrow(node):
                narrow.add(node)
            else:  # rows can be taken of tensors, and not of lists of them
                narrow -= {user for user in node.users if user.target is operator.getitem}
        return narrow

    def is_taker(self, node: Node) -> bool:
        """Whether an operation takes the wanted rows, and does nothing else."""
        if node.target is not torch.ops.aten.index.Tensor:
            return False
        taken: Any = node.args[0]
        dim = self._token_dim(taken.meta["val"])
        return dim is not None and node.args[1] == [*[None] * dim, self._wanted]

    def make_narrow(self, node: Node, narrow: set[Node]) -> None:
        """Let an operation compute the wanted rows."""

        def rows_of(read: Node) -> Node:
            if read is self._num_tokens:
                return self._num_rows
            is_as_it_is = read in narrow or read.op == "get_attr" or _is_fixed(read.meta["val"])
            return read if is_as_it_is else self._rows_of(read)

        if node.target is ATTEND:
            query: Any = node.args[0]
            node.args = (rows_of(query), *node.args[1:], self._wanted)
        else:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), rows_of)
        node.meta["val"] = self._value(node)

    def _rows_of(self, node: Node) -> Node:
        """Return the wanted rows of an operation's result; they are taken once."""
        if node not in self._taken:
            arguments = (node, self._token_dim(node.meta["val"]), self._wanted)
            take = torch.ops.aten.index_select.default
            with self._whole.graph.inserting_after(node):
                taken = self._taken[node] = self._whole.graph.call_function(take, arguments)
            taken.meta["val"] = self._value(taken)
        return self._taken[node]

    def _can_be_narrow(self, node: Node) -> bool:
        """Whether an operation handles each token by itself."""
        if node.op != "call_function" or is_size(node):
            return False
        reads = [
            value
            for read in node.all_input_nodes
            if read.op != "get_attr" and read is not self._num_tokens
            for value in tree_leaves(read.meta["val"])
        ]
        return (
            all(self._token_dim(value) is not None for value in tree_leaves(node.meta["val"]))
            and all(self._token_dim(value) is not None or _is_fixed(value) for value in reads)
            and (node.target is ATTEND or self._is_row_by_row(node))
        )

    def _is_row_by_row(self, node: Node) -> bool:
        """Try an operation with several tokens, and with some of these."""
        random = torch.Generator().manual_seed(0)

        def make(value: Tensor) -> Tensor:
            sizes = [n if _is_int(n) else TRIED_TOKENS for n in value.shape]
            return (torch.rand(sizes, generator=random) + 0.5).to(value.device, value.dtype)

        def some_of(made: Tensor, value: Tensor) -> Tensor:
            dim = self._token_dim(value)
            rows = torch.tensor(TRIED_ROWS, device=made.device)
            return made if dim is None else made.index_select(dim, rows)

        several: dict[Node, Any] = {self._num_tokens: TRIED_TOKENS}
        some: dict[Node, Any] = {self._num_tokens: len(TRIED_ROWS)}
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                several[read] = some[read] = weight_of(self._whole, read)
            elif read is not self._num_tokens:
                several[read] = tree_map(make, read.meta["val"])
                some[read] = tree_map(some_of, several[read], read.meta["val"])
        expected = tree_map(some_of, _call(node, several), node.meta["val"])
        try:
            found = _call(node, some)
        except RuntimeError:  # the operation is told its number of tokens in another way
            return False
        pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
        return all(_is_close(one, other) for one, other in pairs)

    def _token_dim(self, value: Any) -> int | None:
        """Return the dimension of tokens of a tensor of floats; None: it has not just that one."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        dims = [dim for dim, size in enumerate(value.shape) if not _is_int(size)]
        is_one = len(dims) == 1 and self._is_number_of_tokens(value.shape[dims[0]])
        return dims[0] if is_one else None

    def _is_number_of_tokens(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and bool(size.node.expr == self._tokens)

    def _value(self, node: Node) -> Any:
        """Return an operation's result as a trace has it: without contents."""
        mode: Any = self._wanted.meta["val"].fake_mode
        values = {
            read: mode.from_tensor(weight_of(self._whole, read).detach(), static_shapes=True)
            if read.op == "get_attr"
            else read.meta["val"]
            for read in node.all_input_nodes
        }
        with mode:
            return _call(node, values)


def _size_of(tensor: Node, dim: int) -> Node:
    """Return the size of a tensor, an operation at the place where nodes are inserted."""
    size = tensor.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
    size.meta["val"] = tensor.meta["val"].shape[dim]
    return size


def _read_by_row(node: Node) -> list[Node]:
    """Return the operands of which a narrow operation reads wanted rows only."""
    if node.target is not ATTEND:
        return node.all_input_nodes
    query: Any = node.args[0]
    return [] if query in node.args[1:] else [query]


def _is_fixed(value: Any) -> bool:
    """Whether a value is a tensor whose sizes are the same in every run."""
    return isinstance(value, Tensor) and all(map(_is_int, value.shape))


def _is_int(size: int | torch.SymInt) -> bool:
    return isinstance(size, int)


def _changes_what_others_read(node: Node) -> bool:
    """Whether an operation changes a tensor in place that may not be its own alone."""
    if not node.is_impure() or node.op != "call_function":
        return False
    changed = node.args[0] if node.args else None
    if not isinstance(changed, Node) or not isinstance(changed.target, OpOverload):
        return True
    return changed.target.is_view or changed.is_impure() or len(changed.users) > 1


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    distance = (one.float() - other.float()).norm()
    return bool(distance <= TOLERANCE * other.float().norm())


def _call(node: Node, values: Mapping[Node, Any]) -> Any:
    """Compute an operation of these values."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return target(*args, **kwargs)
