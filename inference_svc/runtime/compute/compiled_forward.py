"""CompiledForward: the model's forward as compiled pieces, which run one after the other.

torch's compiler (inductor) fuses norms, rotary embedding, activations and copies into few kernels,
and calls them and the matrix products from generated code: a step then spends little time between
them. What the graph of a forward is, `traced_forward.py` describes; `graph_pieces.py` how it is
divided. Equal pieces, as those of a model's layers, are compiled once: for a lone token, and for
any other number of tokens.

A model whose layers are multiplied in one way for few tokens and in another for many, as some are
with oneDNN (`packing.py`), has a graph for each way. Weights are not copied: pieces take the
model's. Weights that oneDNN has packed are opaque to the compiler, so that their products stand
alone.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import pad

from inference_svc.runtime.compute.graph_pieces import Part, Run, divide, tensor_of
from inference_svc.runtime.compute.graph_program import GraphProgram
from inference_svc.runtime.compute.joined_products import join_products
from inference_svc.runtime.compute.traced_forward import TracedForward, UntraceableError
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration

BackendName = Literal["inductor", "eager"]  # "eager": pieces run operation by operation
MOST_GRAPHS = 6  # each takes some seconds to trace, for a model of thirty layers


class _Graph(NamedTuple):
    """A compiled graph, and the numbers of tokens and of rows of logits for which it holds."""

    tokens: range
    rows: range
    program: GraphProgram


class CompiledForward:
    """The compiled graphs of one model; used by the thread that has compiled them.

    Attributes:
        num_run: number of forwards that a graph has computed.
    """

    def __init__(
        self, loaded: LoadedModel, calibration: Calibration, backend: BackendName = "inductor"
    ) -> None:
        """Trace graphs for all numbers of tokens that a step may have, and compile their pieces.

        Raises:
            UntraceableError: there are no such graphs; the message is the reason.
            Exception: from the model or the compiler.
        """
        self.num_run = 0
        self._graphs: list[_Graph] = []
        self._backend = backend
        self._compiled: dict[tuple[str, bool], Run] = {}  # by key, and whether for a lone token
        next_tokens = 2
        while next_tokens <= loaded.context_window:
            if len(self._graphs) == MOST_GRAPHS:
                raise UntraceableError(f"it would take more than {MOST_GRAPHS} graphs")
            traced = TracedForward(loaded, calibration, next_tokens)
            join_products(traced.graph)
            parts = divide(traced.graph, _stands_alone)
            # The same graph computes a lone token, unless the model treats one in another way: then
            # its results differ, which `compile_choice.py` finds out.
            if next_tokens == 2:
                lone = [self._compiled_part(part, is_lone=True) for part in parts]
                program = GraphProgram(traced.graph, lone)
                self._graphs.append(_Graph(range(1, 2), range(1, 2), program))
            several = [self._compiled_part(part, is_lone=False) for part in parts]
            traced.check()
            program = GraphProgram(traced.graph, several)
            self._graphs.append(_Graph(traced.tokens, traced.rows, program))
            next_tokens = traced.tokens.stop

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def __call__(self, token_ids: Tensor, positions: Tensor, row_indices: Tensor) -> Tensor | None:
        """Run a forward like `ForwardCall`, under a `StepForward` that is active.

        Args:
            token_ids: [1, tokens].
            positions: [1, tokens].
            row_indices: [n] int64, the tokens whose logits are returned.

        Returns:
            [n, vocab] logits; None: no graph fits, and nothing was done.
        """
        num_tokens, num_rows = token_ids.shape[1], row_indices.shape[0]
        for tokens, rows, program in self._graphs:
            if num_tokens in tokens and num_rows < rows.stop:
                # A graph for many rows also serves steps with fewer: it computes the first token's
                # logits, too, and they are dropped.
                wanted = pad(row_indices, (0, max(0, rows.start - num_rows)))
                self.num_run += 1
                return program.run(token_ids, positions, wanted)[:num_rows]
        return None

    def _compiled_part(self, part: Part, *, is_lone: bool) -> Part:
        """Return a part of a graph that computes the same by kernels, if it is a piece."""
        if self._backend == "eager" or not isinstance(part.run, GraphModule):
            return part
        kind = (part.key, is_lone)
        if kind not in self._compiled:
            self._compiled[kind] = _compile(part.run, is_lone=is_lone)
        return replace(part, run=self._compiled[kind])


def _stands_alone(node: Node) -> bool:
    """Whether an operation is no part of a piece: attention, and all that takes opaque weights."""
    if node.target is torch.ops.cachedattention.attend.default:
        return True
    weights = [read for read in node.all_input_nodes if read.op == "get_attr"]
    module: Any = node.graph.owning_module
    return any(tensor_of(module, weight).layout != torch.strided for weight in weights)


def _compile(piece: GraphModule, *, is_lone: bool) -> Run:
    """Make kernels of a piece; return a function like it, for a lone token or for several."""
    import torch._inductor as compiler  # takes a second
    from torch._inductor import config

    options = {
        "size_asserts": False,  # each call would check the shape of every argument
        # A part of the key under which kernels are cached on disk, unlike torch's own number.
        "cpp.threads": torch.get_num_threads(),
    }
    inputs = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
    if is_lone:
        inputs = [_of_one_token(value) for value in inputs]
    with config.patch(options), torch.inference_mode(mode=False), torch.no_grad():
        run: Run = compiler.standalone_compile(piece, inputs, dynamic_shapes="from_example_inputs")
    return run


def _of_one_token(value: Tensor) -> Tensor:
    """Return a tensor for one token and one row like one of a trace; weights as they are."""
    if type(value) is Tensor:
        return value
    sizes, strides = ([_at_one(size) for size in each] for each in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _at_one(size: int | torch.SymInt) -> int:
    """Return a size, if all numbers of tokens and rows that it is made of are one."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
