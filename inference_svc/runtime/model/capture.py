"""Capture: calls a model's forward, with hooks that report what it caches and attend in its place.

The hooks call the active forward (`forward.py`):

1. A registered attention function passes queries to it.
2. `CaptureCache.update` passes each layer's keys and values, and receives the ones to attend to.
   `update_indexer` passes the keys by which a layer chooses among them, if it does (DSA), before or
   after these. Other methods serve recurrent layers, which ask a cache for their sequence's states.
3. A `RotaryTap` in place of each `apply_*rot*` function of the model's own modules passes keys
   before RoPE.
4. A `MixerTap` replaces the forward of each recurrent module (`mixers.py`).
5. A `KeptStatesTap` replaces the forward of each module that keeps states itself
   (`kept_states.py`).

Model code is not modified; taps are installed once per Python module and process-wide. Knows no
architecture (`ForwardCall` inspects a class's signature), no working KV and no sequences.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.forward import active_forward, current_forward
from inference_svc.runtime.model.state_layers import StateLayers, history_positions

ATTENTION_NAME = "cachedattention"  # has no mask function: models then build no mask at all
PROBE_ATTENTION_NAME = "cachedattention_probe"  # its mask function reports the keys a query sees
STATE_LIST = "state"  # the argument of forwards that take and return a list of all states (RWKV)
CACHE_NAMES = ("past_key_values", "cache_params", STATE_LIST)  # argument names for the cache
CHOSEN = "indices"  # the option of an attention call with the keys that an index has chosen (DSA)
_ROTARY_NAME = re.compile(r"^apply_\w*rot")


# Receives the last layer's hidden states, [1, rows, hidden]; returns those to make logits of.
TakeStates = Callable[[Tensor], Tensor]

_take: ContextVar[TakeStates | None] = ContextVar("states_are_taken", default=None)


@contextmanager
def taking_states(take: TakeStates) -> Iterator[None]:
    """Pass the last layer's hidden states of a model with a tapped head to `take`, in the block."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)


def tap_head(model: Any) -> bool:
    """Tap a model's head for `taking_states`.

    Args:
        model: a model whose layers are not replaced any more; to be called once.

    Returns:
        Whether the model has a head that receives only the rows whose logits are wanted.
    """
    head = model.get_output_embeddings()
    if head is None or not ForwardCall(model).can_choose_logits:
        return False
    head.register_forward_pre_hook(_take_states)
    return True


def _take_states(_head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    take = _take.get()
    return None if take is None else (take(args[0]), *args[1:])


class RotaryTap:
    """Replaces a function that applies rotary embedding, and reports its calls."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function and report it."""
        result = self.apply(*args, **options)
        forward = active_forward()
        if forward is not None:
            forward.on_rotary(self.apply, args, options, result)
        return result


class CaptureCache(Cache):
    """The `past_key_values` of our forwards: holds nothing, passes everything to the forward.

    It claims a given length. A batch of several sequences has no single length, so the cache claims
    zero. A model that asks for the length although it receives positions cannot be batched;
    calibration finds that out.
    """

    def __init__(self, claimed_tokens: int = 0) -> None:
        """Make a cache that claims to hold `claimed_tokens` tokens."""
        Cache.__init__(self, layers=[])  # not `super()`: a model's own class takes other arguments
        self.layers = StateLayers(self)
        self._claimed_tokens = claimed_tokens
        self._new_tokens: dict[int, int] = {}  # of updated layers, by the model's index
        self._numbers: dict[int, int] = {}  # our index of these layers, by the model's index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass on new keys and values, [1, kv_heads, tokens, dim]; return those to attend to."""
        self._new_tokens[layer_idx] = key_states.shape[-2]
        number = self._numbers.setdefault(layer_idx, len(self._numbers))
        return current_forward().update_cache(number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Pass on new index keys, [1, tokens, dim]; return those to choose by (DSA)."""
        number = self._numbers.get(layer_idx, len(self._numbers))
        return current_forward().update_index(number, indexer_key_states)

    @property
    def position_ids(self) -> Tensor:
        """The positions of the tokens before the new ones, [tokens].

        Raises:
            AttributeError: there are none. Models test for the attribute with hasattr.
        """
        before = history_positions()
        if before is None:
            raise AttributeError("no tokens stand before the new ones")
        return before

    @position_ids.setter
    def position_ids(self, _positions: Tensor) -> None:
        """Ignore them: the forward knows the positions."""

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of a layer's tokens; this forward's count once the layer has cached."""
        return self._claimed_tokens + self._new_tokens.get(layer_idx or 0, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Return (key length, key offset)."""
        return self._claimed_tokens + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the position of the first new token."""
        return self._claimed_tokens

    @property
    def is_compileable(self) -> bool:
        """Return False: this is not a static cache."""
        return False

    def has_previous_state(
        self,
        layer_idx: int | None = None,  # noqa: ARG002 - a sequence has all its states, or none
        state_idx: int | None = None,  # noqa: ARG002
    ) -> bool:
        """Return whether the sequences had tokens before this forward."""
        return current_forward().has_states()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, which the model may change in place."""
        return current_forward().state(StatePlace(layer_idx, "conv", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> Tensor:
        """Pass on new inputs of a convolution, and return them behind the earlier ones.

        Args:
            conv_states: [1, channels, tokens].
            layer_idx: the layer.
            state_idx: index of the layer's convolution.
            conv_kernel_size: inputs that the kernel spans; None: as many as are given.

        Returns:
            [1, channels, earlier inputs + tokens]; before the first token the earlier inputs are
            the zeros that the kernel needs.
        """
        forward, place = current_forward(), StatePlace(layer_idx, "conv", state_idx)
        before = forward.state(place)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            whole = torch.cat((before, conv_states), dim=-1)
        forward.update_state(place, whole[..., -width:])
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state before this forward."""
        return current_forward().state(StatePlace(layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> Tensor:
        """Pass on a layer's recurrent state after this forward; return it."""
        current_forward().update_state(
            StatePlace(layer_idx, "recurrent", state_idx), recurrent_states
        )
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's recurrent state; MiniMax's name for `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Pass on a layer's recurrent state; MiniMax's name for `update_recurrent_state`."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Return False: tokens are never taken back from this cache."""
        return False


def install(model: nn.Module) -> None:
    """Register the attention functions and install rotary taps; repeated calls are harmless."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionInterface.register(PROBE_ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(PROBE_ATTENTION_NAME, _mask)
    for module_name in {type(module).__module__ for module in model.modules()}:
        if module_name.startswith("torch."):
            continue
        namespace = vars(sys.modules[module_name])
        for name, function in list(namespace.items()):
            is_ours = isinstance(function, RotaryTap)
            if _ROTARY_NAME.match(name) and callable(function) and not is_ours:
                namespace[name] = RotaryTap(function)


def _attend(  # models pass the first four by position, and the mask sometimes by name
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    return current_forward().attend(query, key, value, attention_mask, options), None


def _mask(*_args: Any, mask_function: Callable[..., Tensor], **_options: Any) -> Any:
    return current_forward().make_mask(mask_function)


class ForwardCall:
    """Calls one model's forward over a batch of one, according to its signature."""

    def __init__(self, model: Any) -> None:
        """Inspect the signature of the model's forward."""
        self._model = model
        self._parameters = frozenset(inspect.signature(type(model).forward).parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in self._parameters), "")
        self._cache_class = _cache_class(model)
        self._returns_states = _returns_states(model, self._cache_name)

    @property
    def takes_cache(self) -> bool:
        """Whether the forward takes a cache."""
        return bool(self._cache_name)

    @property
    def takes_positions(self) -> bool:
        """Whether the forward takes positions; otherwise the model counts them, or uses none."""
        return "position_ids" in self._parameters

    @property
    def can_choose_logits(self) -> bool:
        """Whether the forward can compute logits for chosen rows only."""
        return "logits_to_keep" in self._parameters

    def _state_argument(self) -> Any:
        """Return the sequence's states as the model's previous forward returned them, or None."""
        if self._cache_name == STATE_LIST:
            return _states_of(0) or None
        by_layer: dict[int, list[Tensor]] = {}
        while states := _states_of(len(by_layer)):
            by_layer[len(by_layer)] = states
        return SimpleNamespace(rnn_state=by_layer, seqlen_offset=0) if by_layer else None

    def cache(self, claimed_tokens: int = 0) -> CaptureCache:
        """Make the cache for a forward, which claims to hold `claimed_tokens` tokens."""
        return self._cache_class(claimed_tokens)

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
            cache: the cache that layers update.
            options: further arguments of the model's forward.
        """
        if self.takes_positions:
            options["position_ids"] = positions
        if self.can_choose_logits:
            options["logits_to_keep"] = logit_indices
        options[self._cache_name] = self._state_argument() if self._returns_states else cache
        answer = self._model(input_ids=token_ids, use_cache=True, **options)
        if self._returns_states:
            returned = answer[self._cache_name]
            by_layer = {0: returned} if isinstance(returned, list) else returned.rnn_state
            for layer_index, states in by_layer.items():
                for index, state in enumerate(states):
                    current_forward().update_state(
                        StatePlace(layer_index, "recurrent", index), state
                    )
        logits: Tensor = answer.logits[0]
        return logits if self.can_choose_logits else logits[logit_indices]


def _cache_class(model: Any) -> type[CaptureCache]:
    """Return the class of a model's caches.

    Some models check that a cache is of a class in their own module: then it derives from both.
    """
    module = type(model).__module__
    for owned in vars(sys.modules[module]).values():
        if isinstance(owned, type) and issubclass(owned, Cache) and owned.__module__ == module:
            return type(f"Capture{owned.__name__}", (CaptureCache, owned), {})
    return CaptureCache


def _returns_states(model: Any, cache_name: str) -> bool:
    """Whether a forward returns its states, to be passed to the next one, and uses no Cache.

    They are a list of all states (RWKV), or an object that has them by layer (xLSTM).
    """
    if cache_name != "cache_params":
        return cache_name == STATE_LIST
    annotation = inspect.signature(type(model).forward).parameters[cache_name].annotation
    named = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return not any(issubclass(kind, Cache) for kind in named)


def _states_of(layer_index: int) -> list[Tensor]:
    """Return the states of a layer whose model returns them; empty before the first token."""
    forward, found = current_forward(), list[Tensor]()
    while (state := forward.state(StatePlace(layer_index, "recurrent", len(found)))) is not None:
        found.append(state)
    return found
