"""MixerTap: runs a model's recurrent modules (mixers) sequence by sequence within one forward.

A forward receives the tokens of all sequences as if they were one. That is right for layers that
look at each token on its own, and for attention, which we replace. Recurrent modules (linear
attention, Mamba, short convolutions) would mix the sequences. So a tap replaces their forward: it
calls the original once per sequence, and once for all sequences of a single token, as a batch.

Which modules are mixers, and which of their arguments and results have a token dimension, is found
by a probe with a number of tokens that no other dimension has. Model code is not modified.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from inference_svc.runtime.model.forward import TokenGroup, active_forward
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError


@dataclass(frozen=True)
class MixerCall:
    """Which arguments and results of a mixer have a token dimension, [1, tokens, ...].

    Each is a tensor, or a tuple of tensors.

    Attributes:
        arguments: positions and names of the arguments.
        results: indices into the result, which is a tuple; None: the result is one such tensor.
    """

    arguments: frozenset[int | str]
    results: frozenset[int] | None

    @classmethod
    def observe(
        cls,
        name: str,
        num_tokens: int,
        args: tuple[Any, ...],
        options: dict[str, Any],
        result: Any,
    ) -> "MixerCall":
        """Derive it from a call over one sequence.

        Args:
            name: the mixer's name, for messages.
            num_tokens: number of tokens of the call; no other dimension has this size.
            args: the call's positional arguments.
            options: the call's keyword arguments.
            result: the call's result.

        Raises:
            ModelModeMissingError: a tensor's token dimension is not its second one, or the result
                cannot be concatenated from the results of several calls.
        """
        if not isinstance(result, Tensor | tuple):
            raise ModelModeMissingError(f"{name} returns {type(result).__name__}", REMEDY)
        for tensor in chain(_tensors((*args, *options.values())), _tensors(result)):
            if num_tokens in (*tensor.shape[:1], *tensor.shape[2:]):
                raise ModelModeMissingError(
                    f"{name} does not have tokens in its second dimension", REMEDY
                )

        def has_tokens(value: Any) -> bool:
            return any(len(t.shape) > 1 and t.shape[1] == num_tokens for t in _tensors(value))

        if isinstance(result, Tensor) and not has_tokens(result):
            raise ModelModeMissingError(f"{name} returns no values for each token", REMEDY)
        return cls(
            frozenset(key for key, value in _items(args, options) if has_tokens(value)),
            None
            if isinstance(result, Tensor)
            else frozenset(index for index, value in enumerate(result) if has_tokens(value)),
        )


class MixerTap:
    """Replaces a mixer's forward.

    Attributes:
        forward: the module's original forward.
    """

    def __init__(self, forward: Callable[..., Any], call: MixerCall) -> None:
        """Store the parts.

        Args:
            forward: the module's original forward.
            call: which of its arguments and results have a token dimension.
        """
        self.forward = forward
        self._call = call

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the original forward once for each token group of the active forward."""
        active = active_forward()
        groups = active.token_groups() if active is not None else ()
        results = [(group, self._run(group, args, options)) for group in groups]
        return self._join_results(results) if results else self.forward(*args, **options)

    def _run(self, group: TokenGroup, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the original forward with one group's tokens."""
        cut = self._call.arguments
        return self.forward(
            *(_cut(value, group) if at in cut else value for at, value in enumerate(args)),
            **{at: _cut(value, group) if at in cut else value for at, value in options.items()},
        )

    def _join_results(self, results: Sequence[tuple[TokenGroup, Any]]) -> Any:
        """Join the groups' results into the result of one call."""
        by_token, (_, last) = self._call.results, results[-1]
        if by_token is None:
            return _join(results)
        return tuple(
            _join([(group, result[index]) for group, result in results])
            if index in by_token
            else last[index]
            for index in range(len(last))
        )


def tap_mixers(calls: dict[nn.Module, MixerCall]) -> None:
    """Install taps, or replace those that are installed.

    Args:
        calls: the mixers, and which of their arguments and results have a token dimension.
    """
    for module, call in calls.items():
        inner = module.forward
        module.forward = MixerTap(inner.forward if isinstance(inner, MixerTap) else inner, call)


def _items(args: Sequence[Any], options: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from options.items()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or all tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _cut(value: Any, group: TokenGroup) -> Any:
    """Select a group's tokens of [1, tokens, ...]: [1, n, ...], or as a batch [n, 1, ...]."""
    if isinstance(value, Tensor):
        tokens = value[:, group.tokens]
        return tokens.squeeze(0).unsqueeze(1) if group.is_batch else tokens
    if isinstance(value, tuple | list):
        return type(value)(_cut(part, group) for part in value)
    return value


def _join(results: Sequence[tuple[TokenGroup, Any]]) -> Any:
    """Join the groups' results in the order of all tokens, [1, tokens, ...]."""
    first = results[0][1]
    if not isinstance(first, Tensor):
        return tuple(
            _join([(group, result[index]) for group, result in results])
            for index in range(len(first))
        )
    flat = [
        (group, result.squeeze(1).unsqueeze(0) if group.is_batch else result)
        for group, result in results
    ]
    if len(flat) == 1:
        return flat[0][1]
    num_tokens = sum(result.shape[1] for _, result in flat)
    joined = first.new_empty(1, num_tokens, *first.shape[2:])
    for group, result in flat:
        joined[:, group.tokens] = result
    return joined
