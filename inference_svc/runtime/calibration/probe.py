"""Probe: a small captured forward, and the record of everything its hooks reported.

Records facts only; `calibration.py` judges them. Errors of a model's forward are passed on.

Which keys a query may see is read from the model's own mask predicate, and described as a window or
as chunks. This also finds windows that appear nowhere but in the mask. The description is checked
against the predicate at the positions where windows and chunks differ.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.runtime.attention.softmax_attention import AttentionOptions, attend
from inference_svc.runtime.calibration.rope_calls import ApplyCall, NormCall, RotaryCall, as_tuple
from inference_svc.runtime.kv.own_layers import OwnLayer
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.capture import CHOSEN, ForwardCall
from inference_svc.runtime.model.forward import TokenGroup, forward_context
from inference_svc.runtime.model.mixers import MixerCall
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError
from inference_svc.runtime.positions.recipes import AttentionCall

Allowed = Callable[..., Tensor]  # (batch, head, query position, key positions) -> bool


@dataclass(frozen=True)
class Mask:
    """The description of a mask, which attention calls receive in place of a tensor in a probe.

    Attributes:
        window: number of latest keys that a query sees, its own included; None: all.
        chunk: a query sees keys from the last multiple of this number on; None: all.
        is_understood: whether window and chunk describe the mask; False: it hides other keys.
    """

    window: int | None = None
    chunk: int | None = None
    is_understood: bool = True

    def __getitem__(self, _index: Any) -> "Mask":
        return self  # models slice masks to the number of keys


def describe_mask(allowed: Allowed, horizon: int, device: torch.device) -> Mask:
    """Describe a mask predicate by a window or by chunks, which our attention supports.

    Args:
        allowed: the model's own predicate.
        horizon: number of tokens of the longest sequence for which the description has to hold.
        device: the device that the predicate computes on.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(horizon, device=device)

    def visible(query: int) -> Tensor:
        return allowed(zero, zero, zero + query, keys).expand(horizon)

    def first_visible(query: int) -> int:
        return int(visible(query).int().argmax())

    def is_right(mask: Mask, queries: Iterable[int]) -> bool:
        options = AttentionOptions(window=mask.window, chunk=mask.chunk)
        return all(
            torch.equal(visible(query), (keys >= options.first_visible(query)) & (keys <= query))
            for query in queries
            if 0 <= query < horizon
        )

    last = horizon - 1
    first = first_visible(last)
    candidates = [Mask()] if first == 0 else [Mask(window=last - first + 1)]
    if first > 0:
        candidates.append(Mask(chunk=first - first_visible(first - 1)))
    edges = (last, last - 1, first, first - 1, last // 2, last // 3, 0)
    for mask in candidates:
        if is_right(mask, edges):
            return mask
    return Mask(is_understood=False)


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """A layer's cached key and value, [1, heads, tokens, dim], and the calls that made them."""

    key: Tensor
    value: Tensor
    calls: tuple[ApplyCall, ...]
    norms: tuple[NormCall, ...]


@dataclass(frozen=True, eq=False)
class SeenIndex:
    """A layer's cached index keys, [1, 1, tokens, dim], and the calls that made them."""

    key: Tensor
    calls: tuple[ApplyCall, ...]
    norms: tuple[NormCall, ...]


@dataclass(frozen=True)
class SeenAttention:
    """One attention call.

    Attributes:
        layer_index: the layer whose KV it reads; if that is unclear, the layer cached last.
        is_cached: whether its tensors are the same objects that this layer cached.
        is_chosen: whether it receives the keys that an index has chosen.
        mask: the keys that a query sees.
    """

    layer_index: int
    is_cached: bool
    is_chosen: bool
    mask: Mask


@dataclass(eq=False)
class SeenMixer:
    """A module that read or wrote states.

    Attributes:
        around: the modules that it ran within, the outermost first.
        args: the positional arguments of its call.
        options: the keyword arguments of its call.
        result: the result of its call.
    """

    around: tuple[nn.Module, ...]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    result: Any = None


@dataclass(eq=False)
class Probe:
    """The forward of a probe, and everything that its hooks reported."""

    horizon: int  # tokens of the longest sequence; masks are described up to its last position
    device: torch.device
    layers: dict[int, SeenLayer] = field(default_factory=dict)
    indexes: dict[int, SeenIndex] = field(default_factory=dict)  # by layer, of those that have one
    attended: list[SeenAttention] = field(default_factory=list)
    rotary_calls: list[RotaryCall] = field(default_factory=list)
    num_repeated: int = 0
    num_misplaced: int = 0  # index keys that were not cached next to their layer's keys
    states: dict[StatePlace, Tensor] = field(default_factory=dict)  # after the forward
    given_states: Mapping[StatePlace, Tensor] = field(default_factory=dict)  # before it
    asks_positions: bool = False  # whether the model reads the positions of the history
    # The innermost modules that accessed states; None: code outside of all modules.
    mixers: dict[nn.Module | None, SeenMixer] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))  # [tokens, vocab]
    own_layers: tuple[OwnLayer, ...] = ()  # in mode "own", the layers of the model's cache
    running: list[nn.Module] = field(default_factory=list)  # modules, the outermost first
    norm_calls: list[NormCall] = field(default_factory=list)  # since a layer was cached last
    _calls: list[ApplyCall] = field(default_factory=list)  # since a layer was cached last

    def on_rotary(
        self, apply: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Record a call of a rotary function."""
        self._calls.append(ApplyCall(apply, args, options, as_tuple(result)))

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Record a layer's key and value, [1, kv_heads, tokens, dim] both; return them."""
        self.num_repeated += layer_index in self.layers
        self.layers[layer_index] = SeenLayer(key, value, *self._take_calls())
        return key, value

    def update_index(self, layer_index: int, index: Tensor) -> Tensor:
        """Record a layer's index keys, [1, tokens, dim]; return them."""
        is_beside = layer_index in (len(self.layers) - 1, len(self.layers))
        self.num_misplaced += not is_beside or layer_index in self.indexes
        self.indexes[layer_index] = SeenIndex(index.unsqueeze(1), *self._take_calls())
        return index

    def history_positions(self) -> None:
        """Return None, and record the request: the probe has no tokens before the new ones."""
        self.asks_positions = True

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield nothing: there is one sequence."""
        return iter(())

    def has_states(self) -> bool:
        """Whether the probe begins with states."""
        return bool(self.given_states)

    def state(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the state: the new one, else the given one, else None."""
        self._record_mixer()
        return self.states.get(place, self.given_states.get(place))

    def update_state(self, place: StatePlace, state: Tensor) -> None:
        """Record a new tensor of the state."""
        self._record_mixer()
        self.states[place] = state

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Record the call and attend over the tokens of this forward.

        Args:
            query: [1, heads, tokens, head_dim].
            key: [1, kv_heads, tokens, head_dim].
            value: [1, kv_heads, tokens, value_dim].
            mask: the mask that `make_mask` returned, or that the model made itself.
            options: the call's options, by Transformers' names.

        Returns:
            [1, tokens, heads, value_dim]
        """
        matches = [i for i, seen in self.layers.items() if key is seen.key and value is seen.value]
        layer_index = matches[0] if matches else max(self.layers, default=0)
        mask = self._effective_mask(mask, options.get("sliding_window"))
        is_chosen = options.get(CHOSEN) is not None
        self.attended.append(SeenAttention(layer_index, bool(matches), is_chosen, mask))
        call_options = AttentionCall(layer_index, mask.window, mask.chunk).options(options)
        return attend(query, key, value, call_options, masks={}).transpose(1, 2).contiguous()

    def make_mask(self, allowed: Allowed) -> Mask:
        """Describe the model's mask."""
        return describe_mask(allowed, self.horizon, self.device)

    def on_module_start(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Record that a module begins to run."""
        self.running.append(module)

    def on_module_end(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Record that a module has run, and its call if it accessed states."""
        self.running.pop()
        if module in self.mixers:
            seen = self.mixers[module]
            seen.args, seen.options, seen.result = args, options, result

    def mixer_calls(self, num_tokens: int) -> dict[nn.Module, MixerCall]:
        """Return the recurrent modules, and which of their arguments and results have tokens.

        Of nested modules only the outermost.

        Args:
            num_tokens: number of tokens of the forward; no other dimension has this size.

        Raises:
            ModelModeMissingError: their calls cannot be divided between several sequences.
        """
        if None in self.mixers:
            raise ModelModeMissingError("the model returns all its states at once", REMEDY)
        return {
            module: MixerCall.observe(
                type(module).__name__, num_tokens, seen.args, seen.options, seen.result
            )
            for module, seen in self.mixers.items()
            if module is not None and not any(outer in self.mixers for outer in seen.around)
        }

    def _record_mixer(self) -> None:
        innermost = self.running[-1] if self.running else None
        self.mixers.setdefault(innermost, SeenMixer(tuple(self.running[:-1])))

    def _take_calls(self) -> tuple[tuple[ApplyCall, ...], tuple[NormCall, ...]]:
        """Return the calls since a layer was cached last, and clear them."""
        calls = tuple(self._calls), tuple(self.norm_calls)
        self._calls.clear()
        self.norm_calls.clear()
        return calls

    def _effective_mask(self, mask: Any, call_window: int | None) -> Mask:
        """Return the keys that a query sees, by the mask and the window of an attention call."""
        if isinstance(mask, Tensor):  # made by the model, not by our mask function
            return Mask(is_understood=False)
        found = mask if isinstance(mask, Mask) else Mask()
        windows = [w for w in (found.window, call_window) if w is not None and w < self.horizon]
        return replace(found, window=min(windows, default=None))


@torch.inference_mode()
def run_probe(
    model: Any,
    token_ids: Sequence[int],
    horizon: int,
    *,
    claimed_tokens: int = 0,
    attention_mask: Tensor | None = None,
    states: Mapping[StatePlace, Tensor] | None = None,
) -> Probe:
    """Run a probe of `model` with the attention it is set to, at positions from 0 on.

    Args:
        model: the model, with our hooks installed.
        token_ids: the tokens of the forward.
        horizon: number of tokens of the longest sequence that will be served.
        claimed_tokens: number of tokens that the cache claims to hold already.
        attention_mask: [1, 1, tokens, tokens] for the model; None: it makes its own.
        states: the sequence's states before the forward; None: it has none.
    """
    device = model.device
    probe = Probe(horizon, device, given_states=states or {})
    num_tokens = len(token_ids)
    with _module_hooks(model, probe), forward_context(probe):
        call = ForwardCall(model)
        probe.logits = call(
            torch.tensor([list(token_ids)], device=device),
            torch.arange(num_tokens, device=device)[None],
            torch.arange(num_tokens, device=device),
            call.cache(claimed_tokens),
            **({} if attention_mask is None else {"attention_mask": attention_mask}),
        )
    return probe


@contextmanager
def _module_hooks(model: nn.Module, probe: Probe) -> Iterator[None]:
    """Record inside the block which modules run, and every call of a rotary module or a norm."""

    def on_rotary_module(
        module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        probe.rotary_calls.append(RotaryCall(module, args, options, as_tuple(result)))

    def on_norm(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        states = args[0] if args else None
        if isinstance(states, Tensor) and states.dim() == 4 and isinstance(result, Tensor):
            probe.norm_calls.append(NormCall(module, states, result))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(probe.on_module_start))
        handles.append(module.register_forward_hook(probe.on_module_end, with_kwargs=True))
        name = type(module).__name__.lower()
        if "rotary" in name:
            handles.append(module.register_forward_hook(on_rotary_module, with_kwargs=True))
        elif "norm" in name:
            handles.append(module.register_forward_hook(on_norm))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
