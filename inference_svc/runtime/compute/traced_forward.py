"""TracedForward: the model's whole forward as one graph of tensor operations.

The graph has none of the model's Python left, so that a compiler can make kernels of all that lies
between two attention calls. Attention itself and all working KV stay out of it: per layer there is
one call of the operator `cachedattention::attend`, which the compiler cannot look into. It calls
the active forward (`RaggedForward.write_and_attend`), and so one graph serves all steps, whatever
their sequences, pages and buffers.

The numbers of tokens and of rows of logits are symbols. Where a model's code depends on them, as
`PackedLinear` does, the graph holds for a range of these numbers only (`TracedForward.tokens`,
`rows`). Where it depends on what tensors hold, there is no graph: the trace computes without data.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import NewKv
from inference_svc.runtime.compute.step_forward import RaggedForward, StepForward
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.forward import current_forward, forward_context
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration

ANY_NUMBER = 2**31  # stands for a range without an end

_library: Any = torch.library  # has no types
_OPERATORS = _library.Library("cachedattention", "DEF")
_OPERATORS.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor unrotated_key, Tensor unrotated_value,"
    " int layer_index, float? scale, float? softcap, Tensor? sinks, Tensor? wanted=None) -> Tensor"
)
ATTEND = torch.ops.cachedattention.attend.default


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    unrotated_key: Tensor,
    unrotated_value: Tensor,
    layer_index: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    wanted: Tensor | None = None,
) -> Tensor:
    """Let the active forward write a layer's new tokens and attend; the operator on all devices.

    The query is that of all new tokens, or only of those in `wanted`, [rows] int64.
    """
    forward = current_forward()
    if not isinstance(forward, RaggedForward):
        raise AssertionError("a traced forward runs outside of a step")  # noqa: TRY004
    options = {"scaling": scale, "softcap": softcap, "s_aux": sinks}
    new = NewKv(key, value, unrotated_key, unrotated_value)
    return forward.write_and_attend(query, new, layer_index, options, is_whole=wanted is None)


def _attended_shape(query: Tensor, _key: Tensor, value: Tensor, *_others: Any) -> Tensor:
    """Return what the operator returns, without its contents."""
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


_OPERATORS.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("cachedattention::attend", _attended_shape, lib=_OPERATORS)


class UntraceableError(Exception):
    """The model's forward has no graph that serves all steps; the message is the reason."""


class _TracingForward(StepForward):
    """The forward under which the graph is recorded: attention becomes calls of the operator."""

    def __init__(self, calibration: Calibration) -> None:
        """Begin a trace, which writes nothing."""
        super().__init__(calibration, (), StepPlaces.of(()), None)
        self._new: tuple[Tensor, ...] = ()  # of the layer cached last: as cached, before RoPE

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new tokens for its attention call."""
        self._new = (key, value, *self._unrotated(layer_index, key, value))
        self._calls.clear()
        return key, value

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Call the operator; see the protocol."""
        call, given = self._next_call(options)
        attended: Tensor = ATTEND(
            query, *self._new, call.layer_index, given.scale, given.softcap, given.sinks
        )
        return attended


class TracedForward:
    """A graph of the forward, and the numbers of tokens and rows for which it holds.

    Attributes:
        graph: takes token ids and positions, [1, tokens] int64 both, and the indices of the rows
            whose logits are wanted, [rows] int64; returns logits, [rows, vocab].
        inputs: these three without contents; their sizes are the graph's symbols.
    """

    def __init__(self, loaded: LoadedModel, calibration: Calibration, num_tokens: int) -> None:
        """Trace the forward for this number of tokens (two or more), and for all that it allows.

        Raises:
            UntraceableError: there is no such graph.
            Exception: from the model, which may need what tensors hold.
        """
        # The import takes a second, which services that do not compile are spared.
        from torch.fx.experimental.proxy_tensor import make_fx

        reason = why_untraceable(calibration)
        if reason:
            raise UntraceableError(reason)
        call = ForwardCall(loaded.model)

        def run(token_ids: Tensor, positions: Tensor, row_indices: Tensor) -> Tensor:
            with forward_context(_TracingForward(calibration)):
                return call(token_ids, positions, row_indices, call.cache())

        # Equal sizes would get the same symbol, and sizes of one none. There are rows beyond the
        # tokens, so that a step may want those of all its tokens.
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=loaded.device)
        rows = torch.zeros(num_tokens + 1, dtype=torch.long, device=loaded.device)
        # Tensors of inference mode would be refused by the tracer.
        with torch.inference_mode(mode=False), torch.no_grad(), _without_tracebacks():
            trace = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)
            self.graph = trace(tokens.clone(), tokens.clone(), rows.clone())
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        self.inputs: list[Tensor] = [node.meta["val"] for node in nodes]

    @property
    def tokens(self) -> range:
        """The numbers of tokens for which the graph holds; a compiler may narrow them."""
        return self._range(self.inputs[0].shape[1])

    @property
    def rows(self) -> range:
        """The numbers of rows for which the graph holds."""
        return self._range(self.inputs[2].shape[0])

    def check(self) -> None:
        """Check that `tokens` and `rows` are all that the graph depends on.

        Raises:
            UntraceableError: it depends on more, as on whether a number is even.
        """
        from torch.utils._sympy.value_ranges import bound_sympy

        shapes: Any = self.graph.shape_env
        for guard in shapes.guards:
            if not bound_sympy(guard.expr, shapes.var_to_range).is_singleton():
                raise UntraceableError(f"its forward depends on whether {guard.expr}")

    def _range(self, size: int | torch.SymInt) -> range:
        if isinstance(size, int):
            return range(size, size + 1)
        shapes: Any = self.graph.shape_env
        found = shapes.var_to_range[size.node.expr]
        return range(int(found.lower), int(min(found.upper, ANY_NUMBER)) + 1)


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep the tracer from logging the traceback of an error that it also raises, in the block."""
    tracer = logging.getLogger("torch._subclasses.fake_tensor")
    tracer.disabled = True
    try:
        yield
    finally:
        tracer.disabled = False


def why_untraceable(calibration: Calibration) -> str:
    """Return why a model's forward cannot be one graph with an operator per layer; "": it may."""
    if calibration.mode != "ragged":
        return f"the model runs in mode {calibration.mode}, which is not traced"
    if calibration.state_shapes:
        return "the model has recurrent states, which are computed sequence by sequence"
    calls = [call.layer_index for call in calibration.attention_calls]
    if calls != list(range(len(calibration.layers))):
        return "layers attend to keys and values of others"
    return ""
