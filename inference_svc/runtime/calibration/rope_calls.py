"""Calls seen in a probe that embed positions, and how to repeat them for other keys and positions.

Knows no layers and no recipes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.runtime.positions.pairing import Rope


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
        return as_tuple(self.module(*args, **options))


@dataclass(frozen=True, eq=False)
class NormCall:
    """One call of a norm over four-dimensional states, as an attention makes of keys."""

    norm: nn.Module
    taken: Tensor
    made: Tensor

    def swapped(self) -> tuple[Tensor, Tensor]:
        """Return (taken, made) with tokens and heads in the other order."""
        return self.taken.transpose(1, 2), self.made.transpose(1, 2)


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
        turned: Tensor = as_tuple(call.apply(*args, **options))[result_index]
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


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return what a call returned as a tuple, also if it is one thing."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
