"""How a model is run: it is called as its class wants to be, and reports what it caches.

Three hooks let us see inside a forward, and attend in its place:

1. A registered attention function hands queries to the forward under way.
2. `CaptureCache.update` hands it each layer's keys and values, and gets those to attend to;
   `update_indexer` the keys by which a layer chooses among them, if it does (DSA).
3. A `RotaryTap` in place of each `apply_*rot*` function of the model's own modules hands it keys
   before RoPE.

Each hook looks up the forward of the current context (`under`); without one, taps are transparent.
Model code is not touched; taps are installed once per Python module and process-wide. Knows no
architecture (`ForwardCall` asks a class for its signature), no working KV and no sequences.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from inference_svc.runtime.model.refusals import REMEDY, ModelRecurrentError

ATTENTION_NAME = "cachedattention"  # has no mask function: models then build no mask at all
PROBE_ATTENTION_NAME = "cachedattention_probe"  # has one that reports which keys a query may see
CHOSEN = "indices"  # the option of an attention call that says which keys an index has chosen (DSA)
_ROTARY_NAME = re.compile(r"^apply_\w*rot")


class Forward(Protocol):
    """What happens inside one forward of the model, in the order it happens."""

    def rotated(
        self, tap: "RotaryTap", args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Record a call of an apply function."""

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Receive a layer's new keys and values; return those to attend to.

        All are [1, kv_heads, tokens, dim]; a model may transform what it gets before it attends.
        """

    def indexed(self, layer_index: int, index: Tensor) -> Tensor:
        """Receive a layer's new index keys; return those to choose by, [1, tokens, dim] both."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Return attention's output [1, tokens, heads, dim] for query [1, heads, tokens, dim]."""

    def masked(self, allowed: Callable[..., Tensor]) -> Any:
        """Return the mask that attention calls get, given the predicate (batch, head, q, kv)."""


# Takes what leaves the last layer, [1, rows, hidden]; returns what logits are made of.
TakeStates = Callable[[Tensor], Tensor]

_forward: ContextVar[Forward | None] = ContextVar("forward_under_capture", default=None)
_take: ContextVar[TakeStates | None] = ContextVar("states_are_taken", default=None)


@contextmanager
def under(forward: Forward) -> Iterator[None]:
    """Let the hooks report to `forward` inside the block, in this thread."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


@contextmanager
def taking_states(take: TakeStates) -> Iterator[None]:
    """Let a model whose head is tapped hand over what leaves its last layer, inside the block."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)


def tap_head(model: Any) -> bool:
    """Tap a model's head, once; return whether it has one that is given the rows it is asked for.

    Args:
        model: a model whose layers stay as they are from now on.
    """
    head = model.get_output_embeddings()
    if head is None or not ForwardCall(model).is_sparing:
        return False
    head.register_forward_pre_hook(_take_states)
    return True


def _take_states(_head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    take = _take.get()
    return None if take is None else (take(args[0]), *args[1:])


class RotaryTap:
    """Stands in for one function that applies a rotary embedding, and reports its calls."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function and report it."""
        result = self.apply(*args, **options)
        forward = _forward.get()
        if forward is not None:
            forward.rotated(self, args, options, result)
        return result


class CaptureCache(Cache):
    """The `past_key_values` of our forwards: holds nothing, hands over everything.

    Lengths are what it was made to claim. In a batch of several sequences there is no true one: it
    claims zero, and whoever asks although positions are given cannot be batched; calibration finds
    out.
    """

    def __init__(self, claimed_tokens: int = 0) -> None:
        """Make a cache that claims to hold `claimed_tokens` tokens."""
        super().__init__(layers=[])
        self._claimed_tokens = claimed_tokens
        self._new_tokens: dict[int, int] = {}  # of layers that were updated

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand over new keys and values, [1, kv_heads, tokens, dim]; return those to attend to."""
        self._new_tokens[layer_idx] = key_states.shape[-2]
        return _current().cached(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Hand over new index keys, [1, tokens, dim]; return those to choose by (DSA)."""
        return _current().indexed(layer_idx, indexer_key_states)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the tokens of a layer: from its update on with those of this forward."""
        return self._claimed_tokens + self._new_tokens.get(layer_idx or 0, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Return (key length, key offset)."""
        return self._claimed_tokens + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the position of the first new token."""
        return self._claimed_tokens

    @property
    def is_compileable(self) -> bool:
        """Return False: there is nothing static here."""
        return False

    # What a cache of keys and values does not have. Asking for it is refusing to be served.

    def get_conv_state(self, *_args: Any, **_options: Any) -> Tensor:
        """Refuse the model.

        Raises:
            ModelRecurrentError: always.
        """
        raise ModelRecurrentError("the model keeps a recurrent state beside keys", REMEDY)

    update_conv_state = get_conv_state
    get_recurrent_state = get_conv_state
    update_recurrent_state = get_conv_state


def install(model: nn.Module) -> None:
    """Register the attention functions and install taps; repeating it is harmless."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionInterface.register(PROBE_ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(PROBE_ATTENTION_NAME, _mask)
    for module_name in {type(module).__module__ for module in model.modules()}:
        if module_name.startswith("torch."):
            continue
        namespace = vars(sys.modules[module_name])
        for name, function in list(namespace.items()):
            if (
                _ROTARY_NAME.match(name)
                and callable(function)
                and not isinstance(function, RotaryTap)
            ):
                namespace[name] = RotaryTap(function)


def _current() -> Forward:
    forward = _forward.get()
    if forward is None:
        raise AssertionError("a forward with our attention runs outside capture.under()")
    return forward


def _attention(  # transformers calls it by position for the first five, by name for the rest
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    return _current().attend(query, key, value, attention_mask, options), None


def _mask(*_args: Any, mask_function: Callable[..., Tensor], **_options: Any) -> Any:
    return _current().masked(mask_function)


class ForwardCall:
    """Calls one model's forward over a batch of one."""

    def __init__(self, model: Any) -> None:
        """Read the signature."""
        self._model = model
        self._parameters = frozenset(inspect.signature(type(model).forward).parameters)

    @property
    def takes_cache(self) -> bool:
        """Whether the model has a cache of keys and values at all."""
        return "past_key_values" in self._parameters

    @property
    def takes_positions(self) -> bool:
        """Whether positions can be given; else the model counts them, or has none."""
        return "position_ids" in self._parameters

    @property
    def is_sparing(self) -> bool:
        """Whether logits are made of the rows that are asked for only."""
        return "logits_to_keep" in self._parameters

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_indices: Tensor,
        cache: Cache,
        **options: Any,
    ) -> Tensor:
        """Run a forward; return logits [n, vocab].

        Args:
            token_ids: [1, tokens].
            positions: [1, tokens].
            logit_indices: [n] int64, the tokens whose logits are returned. A tensor even if
                empty: an int makes some models drop queries of layers that share KV.
            cache: receives what layers cache.
            options: the model's own further arguments.
        """
        if self.takes_positions:
            options["position_ids"] = positions
        if self.is_sparing:
            options["logits_to_keep"] = logit_indices
        answer = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, **options)
        logits: Tensor = answer.logits[0]
        return logits if self.is_sparing else logits[logit_indices]
