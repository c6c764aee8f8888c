"""CompiledForward: the model's forward as compiled graphs, one for each range of token counts.

torch's compiler (inductor) fuses norms, rotary embedding, activations and copies into few kernels,
and calls them and the matrix products from generated code: a step then spends little time between
them. What a graph is, and what stays out of it, `traced_forward.py` describes.

A model whose layers are multiplied in one way for few tokens and in another for many, as some are
with oneDNN (`packing.py`), has a graph for each way. Weights are not copied: graphs refer to the
model's.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference_svc.runtime.compute.traced_forward import TracedForward, UntraceableError
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration

BackendName = Literal["inductor", "eager"]  # "eager": graphs run operation by operation
MOST_GRAPHS = 6  # each takes some thirty CPU seconds, for a model of thirty layers

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Graph(NamedTuple):
    """A compiled graph, and the numbers of tokens and of rows of logits for which it holds."""

    tokens: range
    rows: range
    run: Run


class CompiledForward:
    """The compiled graphs of one model; used by the thread that has compiled them.

    Attributes:
        num_graphs: number of graphs.
        num_run: number of forwards that a graph has computed.
    """

    def __init__(
        self, loaded: LoadedModel, calibration: Calibration, backend: BackendName = "inductor"
    ) -> None:
        """Trace and compile graphs for all numbers of tokens that a step may have.

        Raises:
            UntraceableError: there are no such graphs; the message is the reason.
            Exception: from the model or the compiler.
        """
        self.num_run = 0
        self._graphs: list[_Graph] = []
        next_tokens = 1
        while next_tokens <= loaded.context_window:
            if len(self._graphs) == MOST_GRAPHS:
                raise UntraceableError(f"it would take more than {MOST_GRAPHS} graphs")
            traced = TracedForward(loaded, calibration, next_tokens)
            run = traced.graph if backend == "eager" else _compile(traced)
            traced.check()
            self._graphs.append(_Graph(traced.tokens, traced.rows, run))
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
        for tokens, rows, run in self._graphs:
            if num_tokens in tokens and num_rows < rows.stop:
                # A graph for many rows also serves steps with fewer: it computes the first token's
                # logits, too, and they are dropped.
                wanted = pad(row_indices, (0, max(0, rows.start - num_rows)))
                self.num_run += 1
                return run(token_ids, positions, wanted)[:num_rows]
        return None


def _compile(traced: TracedForward) -> Any:
    """Make kernels of a graph; return a function like it."""
    import torch._inductor as compiler  # takes seconds
    from torch._inductor import config

    options = {
        # As constants, weights can be packed ones, which the compiler refuses as arguments. On a
        # GPU none are packed, and it would join weights that have the same input: a copy of them.
        "freezing": traced.inputs[0].device.type == "cpu",
        # It would pack the layers that are not: a copy of their weights, and no faster.
        "cpp.weight_prepack": False,
        # A part of the key under which kernels are cached on disk, unlike torch's own number.
        "cpp.threads": torch.get_num_threads(),
    }
    with config.patch(options), torch.inference_mode(mode=False), torch.no_grad():
        return compiler.compile(traced.graph, list(traced.inputs))
