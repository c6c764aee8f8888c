"""Mixers: a model's modules that go on from a state, in a forward over several sequences.

A forward takes the tokens of all sequences as if they were of one, which is right for layers that
look at each token on its own, and for attention, which is ours. What goes on from a state (linear
attention, Mamba, short convolutions) would mix the sequences. So its forward has a tap: it calls it
sequence by sequence; those of a single token, which decode, at once as a batch.

Which modules these are, and which of their arguments and results count tokens, is seen in a probe
of a length that no other dimension has. Model code is not touched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from inference_svc.runtime.model.forward import TokenGroup, forward_under_way
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError


@dataclass(frozen=True)
class MixerCall:
    """What of a mixer's call counts tokens, [1, tokens, ...]: as a tensor, or several in a tuple.

    Attributes:
        arguments: by position or by name.
        results: which results; None: it has one only, and that does.
    """

    arguments: frozenset[int | str]
    results: frozenset[int] | None

    @classmethod
    def seen(
        cls,
        name: str,
        num_tokens: int,
        args: tuple[Any, ...],
        options: dict[str, Any],
        result: Any,
    ) -> "MixerCall":
        """Read it from a call over one sequence.

        Args:
            name: the mixer's, for messages.
            num_tokens: of the call; no other dimension has as many.
            args: by position.
            options: by name.
            result: what it returned.

        Raises:
            ModelModeMissingError: a tensor counts tokens elsewhere than in its second dimension, or
                the result is nothing that could be put together of several.
        """
        if not isinstance(result, Tensor | tuple):
            raise ModelModeMissingError(f"{name} returns {type(result).__name__}", REMEDY)
        for tensor in chain(_tensors((*args, *options.values())), _tensors(result)):
            if num_tokens in (*tensor.shape[:1], *tensor.shape[2:]):
                raise ModelModeMissingError(
                    f"{name} counts tokens in another than the second dimension", REMEDY
                )

        def counts(value: Any) -> bool:
            return any(len(t.shape) > 1 and t.shape[1] == num_tokens for t in _tensors(value))

        if isinstance(result, Tensor) and not counts(result):
            raise ModelModeMissingError(f"{name} returns nothing of each token", REMEDY)
        return cls(
            frozenset(key for key, value in _named(args, options) if counts(value)),
            None
            if isinstance(result, Tensor)
            else frozenset(index for index, value in enumerate(result) if counts(value)),
        )


class MixerTap:
    """Stands in for a mixer's forward.

    Attributes:
        forward: the module's own.
    """

    def __init__(self, forward: Callable[..., Any], call: MixerCall) -> None:
        """Store the parts.

        Args:
            forward: the module's own.
            call: what of a call counts tokens.
        """
        self.forward = forward
        self._call = call

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module's forward, as often as the forward under way has groups of tokens."""
        return self.run(self, args, options)

    @staticmethod
    def run(tap: "MixerTap", args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call it; by itself, so that it can be left out of what is compiled."""
        under_way = forward_under_way()
        groups = under_way.token_groups() if under_way is not None else ()
        results = [(group, tap.call(group, args, options)) for group in groups]
        return tap.joined(results) if results else tap.forward(*args, **options)

    def call(self, group: TokenGroup, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the module's forward with one group's tokens."""
        counted = self._call.arguments
        return self.forward(
            *(_cut(value, group) if at in counted else value for at, value in enumerate(args)),
            **{at: _cut(value, group) if at in counted else value for at, value in options.items()},
        )

    def joined(self, results: Sequence[tuple[TokenGroup, Any]]) -> Any:
        """Return what all groups' results are together, as those of one call."""
        counted, (_, last) = self._call.results, results[-1]
        if counted is None:
            return _joined(results)
        return tuple(
            _joined([(group, result[index]) for group, result in results])
            if index in counted
            else last[index]
            for index in range(len(last))
        )


def tap_mixers(calls: dict[nn.Module, MixerCall]) -> None:
    """Install taps, or renew them."""
    for module, call in calls.items():
        inner = module.forward
        module.forward = MixerTap(inner.forward if isinstance(inner, MixerTap) else inner, call)


def _named(args: Sequence[Any], options: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from options.items()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield what is, or lies in, a tensor or tuples of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _cut(value: Any, group: TokenGroup) -> Any:
    """Return a group's tokens of [1, tokens, ...]: [1, n, ...], or as a batch [n, 1, ...]."""
    if isinstance(value, Tensor):
        tokens = value[:, group.tokens]
        return tokens.squeeze(0).unsqueeze(1) if group.is_batch else tokens
    if isinstance(value, tuple | list):
        return type(value)(_cut(part, group) for part in value)
    return value


def _joined(results: Sequence[tuple[TokenGroup, Any]]) -> Any:
    """Put the results of all groups where their tokens are, [1, tokens, ...]."""
    first = results[0][1]
    if not isinstance(first, Tensor):
        return tuple(
            _joined([(group, result[index]) for group, result in results])
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
