"""Rotary calls that a probe recorded, repeated for other keys and positions.

`rope_of` repeats a call whose cosines came from a rotary module. Some models have no such module,
or use it differently: GPT-J and CodeGen look cosines up in a buffer of each attention. For them
`ReplayedRope` runs the model at the wanted positions until its first layer calls its rotary
function, and then repeats that call with other keys.

Knows no layers and no recipes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.capture import CaptureCache, ForwardCall
from inference_svc.runtime.model.forward import TokenGroup, forward_context
from inference_svc.runtime.positions.recipes import KeySource
from inference_svc.runtime.positions.rotary import Rope

RUN_TOKENS = 512  # per forward; attention masks grow with its square
TOKEN_ID = 0  # arbitrary: cosines do not depend on tokens


@dataclass(frozen=True, eq=False)
class ApplyCall:
    """One call of an `apply_*rot*` function."""

    apply: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class RotaryCall:
    """One call of a rotary embedding module, which makes the cosines."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Any, ...]

    def at(self, positions: Tensor) -> tuple[Any, ...]:
        """Call the module again, in float32, for other positions, [n]; return its results."""

        def replace(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():  # only its dtype and device are used
                return torch.zeros((1, 1, 1), dtype=torch.float32, device=value.device)
            return positions[None]

        args = [replace(value) for value in self.args]
        options = {name: replace(value) for name, value in self.options.items()}
        return as_tuple(self.module(*args, **options))


@dataclass(frozen=True, eq=False)
class NormCall:
    """One call of a norm over a four-dimensional tensor, such as the keys of an attention."""

    norm: nn.Module
    argument: Tensor
    result: Tensor

    def transposed(self) -> tuple[Tensor, Tensor]:
        """Return (argument, result), [1, tokens, heads, dim] as [1, heads, tokens, dim] or back."""
        return self.argument.transpose(1, 2), self.result.transpose(1, 2)


def rope_of(call: ApplyCall, source: KeySource, rotary_calls: Sequence[RotaryCall]) -> Rope:
    """Return a function that repeats a recorded call for other keys and positions.

    It replaces the tensors of the call by their origin: results of a rotary module by its results
    for the new positions, other floating-point tensors (the key, the query) by the new keys, and
    integers by the positions.

    Args:
        call: the recorded call.
        source: which argument of it is a key, and which result is that key after RoPE.
        rotary_calls: the calls of rotary modules whose results the call has received.
    """

    def rope(keys: Tensor, positions: Tensor) -> Tensor:
        part = _with_tokens_at(source.seq_dim, source.part(keys))
        new_results: dict[int, Any] = {}  # by the address of the recorded result
        for rotary_call in rotary_calls:
            answers = rotary_call.at(positions)
            new_results.update(
                (_address(old), new) for old, new in zip(rotary_call.results, answers, strict=True)
            )

        def replace(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if _address(value) in new_results:
                return new_results[_address(value)]
            is_number = value.is_floating_point() or value.is_complex()
            return part if is_number else positions[None]

        args = [replace(value) for value in call.args]
        options = {name: replace(value) for name, value in call.options.items()}
        return _rotate(call, source, args, options, keys)

    return rope


class RopeOutOfReachError(Exception):
    """The first layer caches or attends before the rotary call that is searched for."""


class ReplayedRope:
    """A `rotary.Rope` that applies RoPE by running the model up to its first rotary call."""

    def __init__(self, model: Any, source: KeySource) -> None:
        """Store the parts.

        Args:
            model: the model, with our hooks installed.
            source: the argument and result of the call that are the first layer's key.
        """
        self._model = model
        self._source = source

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE; elements that the model does not pass to its rotary function stay.

        Args:
            keys: [1, heads, n, dim], before RoPE.
            positions: [n].

        Returns:
            [1, heads, n, dim], after RoPE.

        Raises:
            RopeOutOfReachError: the model does not make the call.
        """
        firsts = range(0, len(positions), RUN_TOKENS)
        pieces = ((keys[:, :, i : i + RUN_TOKENS], positions[i : i + RUN_TOKENS]) for i in firsts)
        return torch.cat([self._apply(*piece) for piece in pieces], dim=2)

    def _apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        call = self._find_call(positions)
        source, args = self._source, list(call.args)
        args[source.arg_index] = _with_tokens_at(source.seq_dim, source.part(keys))
        return _rotate(call, source, args, call.options, keys)

    def _find_call(self, positions: Tensor) -> ApplyCall:
        """Run the model at these positions until it makes the call."""
        search = _Search(self._source.call_index)
        try:
            with forward_context(search):
                ForwardCall(self._model)(
                    torch.full_like(positions, TOKEN_ID)[None],
                    positions[None],
                    torch.zeros(1, dtype=torch.long, device=positions.device),
                    CaptureCache(),
                )
        except _FoundError as found:
            call: ApplyCall = found.args[0]
            return call
        raise RopeOutOfReachError("the model ran to its end without it")


class _FoundError(Exception):
    """Ends the forward; its argument is the call that was searched for."""


class _Search:
    """A forward that an exception ends at a rotary call, counted from 0."""

    def __init__(self, call_index: int) -> None:
        self._calls_left = call_index

    def on_rotary(
        self, apply: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """End the forward at the call."""
        if self._calls_left == 0:
            raise _FoundError(ApplyCall(apply, args, options, as_tuple(result)))
        self._calls_left -= 1

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> NoReturn:  # noqa: ARG002
        """Refuse: later layers are not searched."""
        raise RopeOutOfReachError(f"layer {layer_index} is cached before it")

    def update_index(self, layer_index: int, index: Tensor) -> NoReturn:  # noqa: ARG002
        """Refuse: index keys are cached before the call."""
        raise RopeOutOfReachError(f"layer {layer_index} is indexed before it")

    def history_positions(self) -> None:
        """Return None: the sequence is before its first token."""

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield nothing: there is one sequence."""
        return iter(())

    def has_states(self) -> bool:
        """Return False: the sequence is before its first token."""
        return False

    def state(self, _place: StatePlace) -> None:
        """Return None: the sequence is before its first token."""

    def update_state(self, place: StatePlace, state: Tensor) -> None:
        """Ignore it: the search ends before a state could be read."""

    def attend(self, *_args: Any) -> NoReturn:
        """Refuse: the call comes before attention, or not at all."""
        raise RopeOutOfReachError("the model attends before it")

    def make_mask(self, _allowed: Any) -> None:
        """Return no mask: the forward ends before attention."""


def _rotate(
    call: ApplyCall,
    source: KeySource,
    args: Sequence[Any],
    options: dict[str, Any],
    keys: Tensor,
) -> Tensor:
    """Repeat a call with other arguments; return `keys` with its results, [1, heads, n, dim]."""
    rotated: Tensor = as_tuple(call.apply(*args, **options))[source.arg_index]
    return source.with_part(keys, _with_tokens_at(source.seq_dim, rotated))


def _with_tokens_at(seq_dim: int, keys: Tensor) -> Tensor:
    """Convert keys between tokens in dimension 2 and tokens in dimension `seq_dim` (1 or 2)."""
    return keys if seq_dim == 2 else keys.transpose(1, 2)


def used_rotary_calls(call: ApplyCall, rotary_calls: Sequence[RotaryCall]) -> list[RotaryCall]:
    """Return the rotary module calls whose results this call has received."""
    values = [*call.args, *call.options.values()]
    addresses = {_address(value) for value in values if isinstance(value, Tensor)}
    return [
        rotary_call
        for rotary_call in rotary_calls
        if addresses & {_address(value) for value in rotary_call.results}
    ]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the result of a call as a tuple, also if it is a single value."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share.

    Addresses are unique only while the tensors live; the probe keeps all of them alive.
    """
    return tensor.untyped_storage().data_ptr()
