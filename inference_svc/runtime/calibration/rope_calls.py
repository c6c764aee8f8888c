"""Calls seen in a probe that embed positions, and how to repeat them for other keys and positions.

`rope_of` repeats a call whose cosines came out of a rotary module. Some models have none, or use it
otherwise: GPT-J and CodeGen look cosines up in a buffer of each attention. For them `ReplayedRope`
runs the model at the positions asked for, until its first layer calls its apply function; that call
is then repeated with other keys.

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

RUN_TOKENS = 512  # at once; attention masks grow with their square
TOKEN_ID = 0  # any: cosines do not depend on tokens


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
        """Return (taken, made), [1, tokens, heads, dim] as [1, heads, tokens, dim] or back."""
        return self.taken.transpose(1, 2), self.made.transpose(1, 2)


def rope_of(call: ApplyCall, source: KeySource, rotary_calls: Sequence[RotaryCall]) -> Rope:
    """Make a function that sends other keys and positions through a call that was seen.

    Tensors of the call are replaced by where they came from: results of a rotary module by what it
    answers for the new positions, other floating-point tensors (the key, the query) by the new
    keys, integers by the positions.

    Args:
        call: the call that was seen.
        source: which argument of it is a key, and which result the same after RoPE.
        rotary_calls: the rotary modules' calls whose results went into the call.
    """

    def rope(keys: Tensor, positions: Tensor) -> Tensor:
        turning = _with_tokens_at(source.seq_dim, source.part(keys))
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
            return turning if is_number else positions[None]

        args = [replaced(value) for value in call.args]
        options = {name: replaced(value) for name, value in call.options.items()}
        return _turned(call, source, args, options, keys)

    return rope


class RopeOutOfReachError(Exception):
    """The first layer caches something before the call that is looked for."""


class ReplayedRope:
    """As `rotary.Rope`: applies the model's RoPE to keys [1, heads, n, dim] at n positions."""

    def __init__(self, model: Any, source: KeySource) -> None:
        """Store what to look for.

        Args:
            model: the model, with our hooks installed.
            source: where the first layer's key is seen.
        """
        self._model = model
        self._source = source

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Apply it; elements beyond those that the model passes to its function stay.

        Raises:
            RopeOutOfReachError: if the call is not there.
        """
        firsts = range(0, len(positions), RUN_TOKENS)
        pieces = ((keys[:, :, i : i + RUN_TOKENS], positions[i : i + RUN_TOKENS]) for i in firsts)
        return torch.cat([self._apply(*piece) for piece in pieces], dim=2)

    def _apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        call = self._seen_at(positions)
        source, args = self._source, list(call.args)
        args[source.arg_index] = _with_tokens_at(source.seq_dim, source.part(keys))
        return _turned(call, source, args, call.options, keys)

    def _seen_at(self, positions: Tensor) -> ApplyCall:
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
    """Ends the forward; its argument is the call."""


class _Search:
    """A forward that ends at an apply call, by an exception."""

    def __init__(self, call_index: int) -> None:
        self._calls_left = call_index

    def on_rotary(
        self, apply: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """End at the call."""
        if self._calls_left == 0:
            raise _FoundError(ApplyCall(apply, args, options, as_tuple(result)))
        self._calls_left -= 1

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> NoReturn:  # noqa: ARG002
        """Refuse: later layers are not searched."""
        raise RopeOutOfReachError(f"layer {layer_index} is cached before it")

    def update_index(self, layer_index: int, index: Tensor) -> NoReturn:  # noqa: ARG002
        """Refuse: the layer was cached before it."""
        raise RopeOutOfReachError(f"layer {layer_index} is indexed before it")

    def history_positions(self) -> None:
        """Return none: the sequence is before its first token."""

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield nothing: there is one sequence."""
        return iter(())

    def has_states(self) -> bool:
        """Return False: the sequence is before its first token."""
        return False

    def state(self, _place: StatePlace) -> None:
        """Return no state: the sequence is before its first token."""

    def update_state(self, place: StatePlace, state: Tensor) -> None:
        """Drop it: the search is over before anybody could ask."""

    def attend(self, *_args: Any) -> NoReturn:
        """Refuse: the call comes before attention, or not at all."""
        raise RopeOutOfReachError("the model attends before it")

    def make_mask(self, _allowed: Any) -> None:
        """Return no mask: nothing is attended to."""


def _turned(
    call: ApplyCall,
    source: KeySource,
    args: Sequence[Any],
    options: dict[str, Any],
    keys: Tensor,
) -> Tensor:
    """Repeat a call with other arguments; return all elements of `keys`, [1, heads, n, dim]."""
    turned: Tensor = as_tuple(call.apply(*args, **options))[source.arg_index]
    return source.replaced(keys, _with_tokens_at(source.seq_dim, turned))


def _with_tokens_at(seq_dim: int, keys: Tensor) -> Tensor:
    """Transpose keys that count tokens in dimension 2 if `seq_dim` is another one, or back."""
    return keys if seq_dim == 2 else keys.transpose(1, 2)


def used_rotary_calls(call: ApplyCall, rotary_calls: Sequence[RotaryCall]) -> list[RotaryCall]:
    """Return those rotary calls whose results went into this apply call."""
    values = [*call.args, *call.options.values()]
    addresses = {_address(value) for value in values if isinstance(value, Tensor)}
    return [
        rotary_call
        for rotary_call in rotary_calls
        if addresses & {_address(value) for value in rotary_call.results}
    ]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return what a call returned as a tuple, also if it is one thing."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _address(tensor: Tensor) -> int:
    """Return what views of the same bytes share; the probe keeps all tensors alive."""
    return tensor.untyped_storage().data_ptr()
