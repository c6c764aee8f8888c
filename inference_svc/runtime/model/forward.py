"""Forward: who hears what happens inside a forward of a model, and which one is under way.

Each hook of `capture.py` and `mixers.py` looks up the forward of the current context (`under`);
without one, taps are transparent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from inference_svc.runtime.kv.states import StatePlace


class TokenGroup(NamedTuple):
    """Tokens of a forward that a module which goes on from states is called with at once.

    Attributes:
        tokens: which they are, of all tokens of the forward: a slice, or [n] int64.
        is_batch: whether each is of another sequence, so that they are a batch of n; else all are
            one sequence's.
    """

    tokens: slice | Tensor
    is_batch: bool


class Forward(Protocol):
    """What happens inside one forward of the model, in the order it happens."""

    def rotated(
        self, apply: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Record a call of an apply function."""

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Receive a layer's new keys and values; return those to attend to.

        All are [1, kv_heads, tokens, dim]; a model may transform what it gets before it attends.
        Layers are numbered in the order in which they cache: a hybrid has others between them.
        """

    def indexed(self, layer_index: int, index: Tensor) -> Tensor:
        """Receive a layer's new index keys; return those to choose by, [1, tokens, dim] both.

        They come right before the layer's keys and values, or right behind them.
        """

    def positions_before(self) -> Tensor | None:
        """Return the positions of the tokens that stand before the new ones, [tokens] int64.

        That is in what `cached` and `indexed` return; None: no others stand there.
        """

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield how a module that goes on from states is given tokens; nothing: all at once.

        States are those of the sequences of the group that was yielded last.
        """

    def has_states(self) -> bool:
        """Whether the sequences of that group have had tokens before this forward."""

    def state(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the state, [sequences, ...]; None before their first tokens."""

    def new_state(self, place: StatePlace, state: Tensor) -> None:
        """Receive what this tensor of the state is behind the tokens, [sequences, ...]."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Return attention's output [1, tokens, heads, dim] for query [1, heads, tokens, dim]."""

    def masked(self, allowed: Callable[..., Tensor]) -> Any:
        """Return the mask that attention calls get, given the predicate (batch, head, q, kv)."""


_forward: ContextVar[Forward | None] = ContextVar("forward_under_way", default=None)


@contextmanager
def under(forward: Forward) -> Iterator[None]:
    """Let the hooks report to `forward` inside the block, in this thread."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


def forward_under_way() -> Forward | None:
    """Return the forward of the current context, if there is one."""
    return _forward.get()


def current_forward() -> Forward:
    """Return the forward of the current context.

    Raises:
        AssertionError: there is none.
    """
    forward = _forward.get()
    if forward is None:
        raise AssertionError("a forward with our hooks runs outside under()")
    return forward
