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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import pad

from inference_svc.runtime.compute.graph_pieces import Part, Run, divide, tensor_of
from inference_svc.runtime.compute.graph_program import GraphProgram
from inference_svc.runtime.compute.joined_products import JoinedWeights, join_products
from inference_svc.runtime.compute.piece_compiler import PieceCompiler
from inference_svc.runtime.compute.traced_forward import ATTEND, TracedForward, UntraceableError
from inference_svc.runtime.compute.wanted_rows import take_rows_early
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration

MOST_GRAPHS = 6  # each takes some seconds to trace, for a model of thirty layers


class CompiledGraph(NamedTuple):
    """A compiled graph, and the numbers of tokens and of rows of logits for which it holds."""

    tokens: range
    rows: range
    program: GraphProgram


class CompiledForward:
    """The compiled graphs of one model; used by the thread that has compiled them.

    Attributes:
        graphs: those that hold for fewer tokens come first.
        pieces: what the graphs' pieces run, each once.
        joined: weights that are not the model's, but made of them.
        num_run: number of forwards that a graph has computed.
    """

    def __init__(
        self,
        graphs: Sequence[CompiledGraph],
        pieces: Sequence[Run],
        joined: Sequence[JoinedWeights],
    ) -> None:
        """Store the parts."""
        self.graphs, self.pieces, self.joined = graphs, pieces, joined
        self.num_run = 0

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
        for tokens, rows, program in self.graphs:
            if num_tokens in tokens and num_rows < rows.stop:
                # A graph for many rows also serves steps with fewer: it computes the first token's
                # logits, too, and they are dropped.
                wanted = pad(row_indices, (0, max(0, rows.start - num_rows)))
                self.num_run += 1
                return program.run(token_ids, positions, wanted)[:num_rows]
        return None


def compile_forward(
    loaded: LoadedModel, calibration: Calibration, compiler: PieceCompiler
) -> CompiledForward:
    """Trace graphs for all numbers of tokens that a step may have, and compile their pieces.

    Raises:
        UntraceableError: there are no such graphs; the message is the reason.
        Exception: from the model or the compiler.
    """
    graphs: list[CompiledGraph] = []
    joined: list[JoinedWeights] = []
    compiled: dict[tuple[str, bool], Run] = {}  # by key, and whether for a lone token

    def compiled_part(part: Part, *, is_lone: bool) -> Part:
        if not isinstance(part.run, GraphModule):
            return part
        kind = (part.key, is_lone)
        if kind not in compiled:
            compiled[kind] = compiler.compile(part.run, _inputs_of(part.run, is_lone=is_lone))
        return replace(part, run=compiled[kind])

    next_tokens = 2
    while next_tokens <= loaded.context_window:
        if len(graphs) == MOST_GRAPHS:
            raise UntraceableError(f"it would take more than {MOST_GRAPHS} graphs")
        traced = TracedForward(loaded, calibration, next_tokens)
        take_rows_early(traced.graph)
        joined += join_products(traced.graph)
        parts = divide(traced.graph, _stands_alone)
        # The same graph computes a lone token, unless the model treats one in another way: then
        # its results differ, which `compile_choice.py` finds out.
        if next_tokens == 2:
            lone = [compiled_part(part, is_lone=True) for part in parts]
            program = GraphProgram.of(traced.graph, lone)
            graphs.append(CompiledGraph(range(1, 2), range(1, 2), program))
        several = [compiled_part(part, is_lone=False) for part in parts]
        traced.check()
        program = GraphProgram.of(traced.graph, several)
        graphs.append(CompiledGraph(traced.tokens, traced.rows, program))
        next_tokens = traced.tokens.stop
    return CompiledForward(graphs, list(compiled.values()), joined)


def _stands_alone(node: Node) -> bool:
    """Whether an operation is no part of a piece: attention, and all that takes opaque weights."""
    if node.target is ATTEND:
        return True
    weights = [read for read in node.all_input_nodes if read.op == "get_attr"]
    module: Any = node.graph.owning_module
    return any(tensor_of(module, weight).layout != torch.strided for weight in weights)


def _inputs_of(piece: GraphModule, *, is_lone: bool) -> list[Tensor]:
    """Return a piece's inputs as a trace has them, for a lone token or for several."""
    inputs = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
    return [_of_one_token(value) for value in inputs] if is_lone else inputs


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
