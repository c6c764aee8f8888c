"""Forward: the interface that a model's hooks call during a forward, and the active forward.

Each hook of `capture.py` and `mixers.py` looks up the active forward of the current context
(`forward_context`); without one, taps are transparent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from inference_svc.runtime.kv.states import StatePlace


class TokenGroup(NamedTuple):
    """Tokens of a forward with which a recurrent module is called at once.

    Attributes:
        tokens: index of the tokens among all tokens of the forward: a slice, or [n] int64.
        is_batch: whether each token is of a different sequence, so that they are a batch of n;
            otherwise all are of one sequence.
    """

    tokens: slice | Tensor
    is_batch: bool


class Forward(Protocol):
    """The receiver of everything that happens inside one forward of the model, in order."""

    def on_rotary(
        self, apply: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """Receive a call of a function that applies rotary embedding.

        Args:
            apply: the function, such as `apply_rotary_pos_emb`.
            args: its positional arguments.
            options: its keyword arguments.
            result: what it returned.
        """

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Receive a layer's new keys and values; return the ones to attend to.

        All are [1, kv_heads, tokens, dim]; a model may transform the returned ones before it
        attends. Layers are numbered in the order in which they cache: in a hybrid model layers
        without KV are not counted.
        """

    def update_index(self, layer_index: int, index: Tensor) -> Tensor:
        """Receive a layer's new index keys; return the ones to choose by, [1, tokens, dim] both.

        Called right before or right after `update_cache` for the same layer.
        """

    def history_positions(self) -> Tensor | None:
        """Return the positions of the tokens before the new ones, [tokens] int64; None: no tokens.

        Before the new ones in the tensors that `update_cache` and `update_index` return.
        """

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield the token groups with which a recurrent module is called; nothing: all at once.

        The methods below refer to the sequences of the group that was yielded last.
        """

    def has_states(self) -> bool:
        """Whether the group's sequences had tokens before this forward."""

    def state(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the states, [sequences, ...]; None before their first tokens."""

    def update_state(self, place: StatePlace, state: Tensor) -> None:
        """Receive a tensor of the states after the group's tokens, [sequences, ...]."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Compute attention in the model's place.

        Args:
            query: [1, heads, tokens, head_dim].
            key: [1, kv_heads, keys, head_dim], as the model made them of `update_cache`'s.
            value: [1, kv_heads, keys, value_dim].
            mask: the mask that the model made, or None.
            options: the model's arguments of the call (scale, softcap, sinks).

        Returns:
            [1, tokens, heads, value_dim]
        """

    def make_mask(self, allowed: Callable[..., Tensor]) -> Any:
        """Return the mask for attention calls.

        Args:
            allowed: a predicate of (batch, head, query index, key index): whether a query may see
                a key.
        """


_forward: ContextVar[Forward | None] = ContextVar("forward_under_way", default=None)


@contextmanager
def forward_context(forward: Forward) -> Iterator[None]:
    """Make `forward` the active one, which hooks call, inside the block and in this thread."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


def active_forward() -> Forward | None:
    """Return the active forward of the current context; None: there is none."""
    return _forward.get()


def current_forward() -> Forward:
    """Return the active forward of the current context.

    Raises:
        AssertionError: there is none.
    """
    forward = _forward.get()
    if forward is None:
        raise AssertionError("a forward with our hooks runs outside forward_context()")
    return forward
