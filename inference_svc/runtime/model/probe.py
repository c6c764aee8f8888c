"""Probe: one small forward under capture, and what was seen in it.

Records facts only; `calibration.py` judges them. A model whose forward does something unforeseen
raises whatever it raises.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.runtime.compute.attention import AttentionOptions
from inference_svc.runtime.compute.softmax_attention import attend
from inference_svc.runtime.model.capture import CaptureCache, RotaryTap, under
from inference_svc.runtime.model.rotary import Rope


@dataclass(frozen=True, eq=False)
class ApplyCall:
    """One call of an `apply_*rot*` function."""

    apply: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class RotaryCall:
    """One call of a rotary embedding module: what made the cosines."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Any, ...]

    def at(self, positions: Tensor) -> tuple[Any, ...]:
        """Call the module again, in float32, for other positions [n]."""

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return torch.zeros((1, 1, 1), dtype=torch.float32, device=value.device)
            return positions[None]

        args = [replaced(value) for value in self.args]
        options = {name: replaced(value) for name, value in self.options.items()}
        return _as_tuple(self.module(*args, **options))


@dataclass(frozen=True, eq=False)
class SeenLayer:
    """What one layer cached, [1, heads, tokens, dim], and the apply calls that led to it."""

    key: Tensor
    value: Tensor
    calls: tuple[ApplyCall, ...]


@dataclass(frozen=True)
class SeenAttention:
    """One attention call; layer_index is None if its tensors are not ones a layer cached."""

    layer_index: int | None
    window: int | None
    is_windowed: bool  # False: what the mask lets through is not a window of latest keys


@dataclass(frozen=True)
class Mask:
    """What the model's mask lets a query see, in place of a mask tensor; may be sliced."""

    window: int | None
    is_windowed: bool

    def __getitem__(self, _index: Any) -> "Mask":
        return self


@dataclass(eq=False)
class Probe:
    """The forward of a probe, and all it saw."""

    horizon: int  # tokens; masks are asked what the last position of such a sequence sees
    device: torch.device
    layers: dict[int, SeenLayer] = field(default_factory=dict)
    attended: list[SeenAttention] = field(default_factory=list)
    rotary_calls: list[RotaryCall] = field(default_factory=list)
    num_repeated: int = 0
    _calls: list[ApplyCall] = field(default_factory=list)

    def rotated(
        self, tap: RotaryTap, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Note a call of an apply function."""
        self._calls.append(ApplyCall(tap.apply, args, options, _as_tuple(result)))

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Note a layer."""
        self.num_repeated += layer_index in self.layers
        self.layers[layer_index] = SeenLayer(key, value, tuple(self._calls))
        self._calls.clear()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Note the call and attend over the tokens of this forward."""
        owners = [i for i, seen in self.layers.items() if key is seen.key and value is seen.value]
        windows = {options.get("sliding_window")}
        is_windowed = True
        if isinstance(mask, Mask):
            windows.add(mask.window)
            is_windowed = mask.is_windowed
        window = min((w for w in windows if w is not None and w < self.horizon), default=None)
        self.attended.append(SeenAttention(owners[0] if owners else None, window, is_windowed))
        asked = AttentionOptions(
            options.get("scaling"), options.get("softcap"), options.get("s_aux"), window
        )
        return attend(query, key, value, asked, masks={}).transpose(1, 2)

    def masked(self, allowed: Callable[..., Tensor]) -> Mask:
        """Ask the model's predicate what the last two positions of a full window may see."""
        zero = torch.zeros((), dtype=torch.long, device=self.device)
        keys = torch.arange(self.horizon, device=self.device)
        counts = set()
        is_windowed = True
        for query in (self.horizon - 1, self.horizon - 2):
            seen = allowed(zero, zero, zero + query, keys).expand(self.horizon)
            count = int(seen.sum())
            is_windowed &= bool(seen[query - count + 1 : query + 1].all())
            counts.add(count if count <= query else None)
        return Mask(counts.pop(), is_windowed and not counts)


@torch.inference_mode()
def run_probe(model: Any, token_ids: Sequence[int], first_position: int, horizon: int) -> Probe:
    """Run `model`, set to the probe attention, at positions from `first_position` on."""
    device = model.device
    probe = Probe(horizon, device)
    positions = torch.arange(first_position, first_position + len(token_ids), device=device)
    with _rotary_hooks(model, probe.rotary_calls), under(probe):
        model(
            input_ids=torch.tensor([list(token_ids)], device=device),
            position_ids=positions[None],
            past_key_values=CaptureCache(),
            use_cache=True,
            logits_to_keep=torch.tensor([len(token_ids) - 1], device=device),
        )
    return probe


def rope_of(
    call: ApplyCall,
    *,
    result_index: int,
    seq_dim: int,
    width: int,
    rotary_calls: Sequence[RotaryCall],
) -> Rope:
    """Make a function that sends other keys and positions through a call that was seen.

    Tensors of the call are replaced by where they came from: results of a rotary module by what it
    answers for the new positions, other floating-point tensors (the key, the query) by the new
    keys, integers by the positions.
    """

    def rope(keys: Tensor, positions: Tensor) -> Tensor:
        turning = keys[..., :width]
        probe = turning if seq_dim == 2 else turning.transpose(1, 2)
        made: dict[int, Any] = {}
        for rotary_call in rotary_calls:
            answers = rotary_call.at(positions)
            made.update(
                (_address(old), new) for old, new in zip(rotary_call.results, answers, strict=True)
            )

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if _address(value) in made:
                return made[_address(value)]
            is_number = value.is_floating_point() or value.is_complex()
            return probe if is_number else positions[None]

        args = [replaced(value) for value in call.args]
        options = {name: replaced(value) for name, value in call.options.items()}
        turned: Tensor = _as_tuple(call.apply(*args, **options))[result_index]
        turned = turned if seq_dim == 2 else turned.transpose(1, 2)
        return torch.cat((turned, keys[..., width:]), dim=-1)

    return rope


def used_rotary_calls(call: ApplyCall, rotary_calls: Sequence[RotaryCall]) -> list[RotaryCall]:
    """Return those rotary calls whose results went into this apply call."""
    values = [*call.args, *call.options.values()]
    addresses = {_address(value) for value in values if isinstance(value, Tensor)}
    return [
        rotary_call
        for rotary_call in rotary_calls
        if addresses & {_address(value) for value in rotary_call.results}
    ]


def _address(tensor: Tensor) -> int:
    """Return what views of the same bytes share; the probe keeps all tensors alive."""
    return tensor.untyped_storage().data_ptr()


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@contextmanager
def _rotary_hooks(model: nn.Module, seen: list[RotaryCall]) -> Iterator[None]:
    """Record every call of a rotary embedding module inside the block."""

    def note(
        module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        seen.append(RotaryCall(module, args, options, _as_tuple(result)))

    handles = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in model.modules()
        if "rotary" in type(module).__name__.lower()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
