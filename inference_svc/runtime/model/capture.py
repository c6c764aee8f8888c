"""How a model is run: it is called as its class wants to be, and reports what it caches.

Hooks let us see inside a forward (`forward.py`), and attend in its place:

1. A registered attention function hands queries to the forward under way.
2. `CaptureCache.update` hands it each layer's keys and values, and gets those to attend to;
   `update_indexer` the keys by which a layer chooses among them, if it does (DSA), before or after
   these; and what recurrent layers ask of a cache, the states of its sequence.
3. A `RotaryTap` in place of each `apply_*rot*` function of the model's own modules hands it keys
   before RoPE.
4. A `MixerTap` in place of the forward of each module that goes on from states (`mixers.py`).
5. A `KeptStatesTap` in place of that of each module which keeps some itself (`kept_states.py`).

Model code is not touched; taps are installed once per Python module and process-wide. Knows no
architecture (`ForwardCall` asks a class for its signature), no working KV and no sequences.
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
from inference_svc.runtime.model.forward import current_forward, forward_under_way
from inference_svc.runtime.model.mixers import MixerTap
from inference_svc.runtime.model.state_layers import StateLayers, positions_before

ATTENTION_NAME = "cachedattention"  # has no mask function: models then build no mask at all
PROBE_ATTENTION_NAME = "cachedattention_probe"  # has one that reports which keys a query may see
STATE_LIST = "state"  # the argument of a forward that takes all states in a list, and returns them
CACHE_NAMES = ("past_key_values", "cache_params", STATE_LIST)  # of a forward's argument
CHOSEN = "indices"  # the option of an attention call that says which keys an index has chosen (DSA)
_ROTARY_NAME = re.compile(r"^apply_\w*rot")


# Takes what leaves the last layer, [1, rows, hidden]; returns what logits are made of.
TakeStates = Callable[[Tensor], Tensor]

_take: ContextVar[TakeStates | None] = ContextVar("states_are_taken", default=None)


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
        self.report(self, args, options, result)
        return result

    @staticmethod
    def report(
        tap: "RotaryTap", args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Report a call to the forward that is under capture, if there is one."""
        forward = forward_under_way()
        if forward is not None:
            forward.rotated(tap.apply, args, options, result)


class CaptureCache(Cache):
    """The `past_key_values` of our forwards: holds nothing, hands over everything.

    Lengths are what it was made to claim. In a batch of several sequences there is no true one: it
    claims zero, and whoever asks although positions are given cannot be batched; calibration finds
    out.
    """

    def __init__(self, claimed_tokens: int = 0) -> None:
        """Make a cache that claims to hold `claimed_tokens` tokens."""
        Cache.__init__(self, layers=[])  # not what a model's own class makes of it
        self.layers = StateLayers(self)
        self._claimed_tokens = claimed_tokens
        self._new_tokens: dict[int, int] = {}  # of layers that were updated, as the model has them
        self._numbers: dict[int, int] = {}  # of these layers, as we have them

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand over new keys and values, [1, kv_heads, tokens, dim]; return those to attend to."""
        self._new_tokens[layer_idx] = key_states.shape[-2]
        number = self._numbers.setdefault(layer_idx, len(self._numbers))
        return current_forward().cached(number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Hand over new index keys, [1, tokens, dim]; return those to choose by (DSA)."""
        number = self._numbers.get(layer_idx, len(self._numbers))
        return current_forward().indexed(number, indexer_key_states)

    @property
    def position_ids(self) -> Tensor:
        """The positions of the tokens before the new ones, as a layer has them.

        Raises:
            AttributeError: there are none. Models ask whether there is such an attribute.
        """
        before = positions_before()
        if before is None:
            raise AttributeError("no tokens stand before the new ones")
        return before

    @position_ids.setter
    def position_ids(self, _positions: Tensor) -> None:
        """Drop them: they are known without."""

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the tokens of a layer: from its update on with those of this forward."""
        return self._claimed_tokens + self._new_tokens.get(layer_idx or 0, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Return (key length, key offset)."""
        return self._claimed_tokens + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the position of the first new token."""
        return self._claimed_tokens

    @staticmethod
    def attend(  # Transformers calls it by position for four; the mask it names now and then
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Hand over what attends; return what `Forward.attend` does. No model asks for it here."""
        return current_forward().attend(query, key, value, attention_mask, options), None

    @property
    def is_compileable(self) -> bool:
        """Return False: there is nothing static here."""
        return False

    def has_previous_state(
        self,
        layer_idx: int | None = None,  # noqa: ARG002 - a sequence has all of its states, or none
        state_idx: int | None = None,  # noqa: ARG002
    ) -> bool:
        """Return whether there are states from before this forward; else it is of first tokens."""
        return current_forward().has_states()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a convolution's last inputs, which the model may change in place."""
        return current_forward().state(StatePlace(layer_idx, "conv", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> Tensor:
        """Hand over new inputs, [1, channels, tokens]; return them behind those before.

        Before the first token these are as many zeros as the kernel lacks inputs.
        """
        forward, place = current_forward(), StatePlace(layer_idx, "conv", state_idx)
        before = forward.state(place)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            whole = torch.cat((before, conv_states), dim=-1)
        forward.new_state(place, whole[..., -width:])
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return what a layer has summed up before this forward."""
        return current_forward().state(StatePlace(layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> Tensor:
        """Hand over what a layer has summed up with this forward; return it."""
        current_forward().new_state(StatePlace(layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return what a layer has summed up: as `get_recurrent_state`, in MiniMax's words."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Hand over what a layer has summed up: as `update_recurrent_state`, likewise."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Return False: nothing is ever taken back."""
        return False


def install(model: nn.Module) -> None:
    """Register the attention functions and install taps; repeating it is harmless."""
    AttentionInterface.register(ATTENTION_NAME, CaptureCache.attend)
    AttentionInterface.register(PROBE_ATTENTION_NAME, CaptureCache.attend)
    AttentionMaskInterface.register(PROBE_ATTENTION_NAME, _mask)
    for module_name in {type(module).__module__ for module in model.modules()}:
        if module_name.startswith("torch."):
            continue
        namespace = vars(sys.modules[module_name])
        for name, function in list(namespace.items()):
            is_ours = isinstance(function, RotaryTap)
            if _ROTARY_NAME.match(name) and callable(function) and not is_ours:
                namespace[name] = RotaryTap(function)


def leave_out_of_compiling(leave_out: Callable[[Any], Any]) -> None:
    """Have the hooks run as they are in layers that are compiled; repeating it is harmless.

    `leave_out` wraps a function so that the compiler's graph ends before it, and another begins.
    """
    for owner, name in ((RotaryTap, "report"), (CaptureCache, "attend"), (MixerTap, "run")):
        setattr(owner, name, staticmethod(leave_out(getattr(owner, name))))
    AttentionInterface.register(ATTENTION_NAME, CaptureCache.attend)
    for name in ("update", "update_indexer"):
        setattr(CaptureCache, name, leave_out(getattr(CaptureCache, name)))


def _mask(*_args: Any, mask_function: Callable[..., Tensor], **_options: Any) -> Any:
    return current_forward().masked(mask_function)


class ForwardCall:
    """Calls one model's forward over a batch of one."""

    def __init__(self, model: Any) -> None:
        """Read the signature."""
        self._model = model
        self._parameters = frozenset(inspect.signature(type(model).forward).parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in self._parameters), "")
        self._cache_class = _cache_class(model)
        self._returns_states = _returns_states(model, self._cache_name)

    @property
    def takes_cache(self) -> bool:
        """Whether the model has a cache at all."""
        return bool(self._cache_name)

    @property
    def takes_positions(self) -> bool:
        """Whether positions can be given; else the model counts them, or has none."""
        return "position_ids" in self._parameters

    @property
    def is_sparing(self) -> bool:
        """Whether logits are made of the rows that are asked for only."""
        return "logits_to_keep" in self._parameters

    def _given_states(self) -> Any:
        """Return what a forward before would have returned of the sequence's states; None: none."""
        if self._cache_name == STATE_LIST:
            return _states_of(0) or None
        by_layer: dict[int, list[Tensor]] = {}
        while states := _states_of(len(by_layer)):
            by_layer[len(by_layer)] = states
        return SimpleNamespace(rnn_state=by_layer, seqlen_offset=0) if by_layer else None

    def cache(self, claimed_tokens: int = 0) -> CaptureCache:
        """Make the cache of a forward over a sequence that has `claimed_tokens` tokens."""
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
            cache: receives what layers cache.
            options: the model's own further arguments.
        """
        if self.takes_positions:
            options["position_ids"] = positions
        if self.is_sparing:
            options["logits_to_keep"] = logit_indices
        options[self._cache_name] = self._given_states() if self._returns_states else cache
        answer = self._model(input_ids=token_ids, use_cache=True, **options)
        if self._returns_states:
            returned = answer[self._cache_name]
            by_layer = {0: returned} if isinstance(returned, list) else returned.rnn_state
            for layer_index, states in by_layer.items():
                for index, state in enumerate(states):
                    current_forward().new_state(StatePlace(layer_index, "recurrent", index), state)
        logits: Tensor = answer.logits[0]
        return logits if self.is_sparing else logits[logit_indices]


def _cache_class(model: Any) -> type[CaptureCache]:
    """Return the class of a model's caches: also of the class that it insists on, if it has one."""
    module = type(model).__module__
    for owned in vars(sys.modules[module]).values():
        if isinstance(owned, type) and issubclass(owned, Cache) and owned.__module__ == module:
            return type(f"Capture{owned.__name__}", (CaptureCache, owned), {})
    return CaptureCache


def _returns_states(model: Any, cache_name: str) -> bool:
    """Whether a forward takes what the one before has returned, which is no cache of Transformers.

    That is a list of all states (RWKV), or an object that has them by layer (xLSTM).
    """
    if cache_name != "cache_params":
        return cache_name == STATE_LIST
    annotation = inspect.signature(type(model).forward).parameters[cache_name].annotation
    named = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return not any(issubclass(kind, Cache) for kind in named)


def _states_of(layer_index: int) -> list[Tensor]:
    """Return the states of a layer whose model returns them; none before the first token."""
    forward, found = current_forward(), list[Tensor]()
    while (state := forward.state(StatePlace(layer_index, "recurrent", len(found)))) is not None:
        found.append(state)
    return found
