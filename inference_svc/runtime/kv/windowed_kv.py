"""WindowedKv: KV of a sequence that holds the last tokens only in layers with a window.

    layer without a window   a row for each token that there is room for: row = position
    layer with a window      `HeldRows.num_rows` rows: row = position - window_from

Both lie side by side, in one piece of memory. When the rows of layers with a window are full, the
last tokens are copied to the first ones (`keep_from`), and those before are there no more.

Attention with a window reads no key before it, and what it reads lies side by side as ever: so the
numbers are the same. That takes attention which reads KV where it lies (`Calibration.mode`
"ragged"); loads by kernels know one place for all layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_tensors import ContiguousTokens
from inference_svc.runtime.kv.sequence_kv import SequenceKv


class WindowedTokens(ContiguousTokens):
    """One component of one sequence's tokens; layers with fewer rows than others have a window.

    Attributes:
        window_from: first token that layers with a window hold.
    """

    def __init__(self, stacks: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Store the stacks; see `LayerTensors`."""
        super().__init__(stacks)
        self.window_from = 0
        sizes = [stack.shape[self.token_dim + 1] for stack, _ in stacks]
        self._have_window = [size < max(sizes) for size in sizes]
        self._windowed = frozenset(
            index
            for (_, indices), has_window in zip(stacks, self._have_window, strict=True)
            for index in indices
            if has_window
        )

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """View tokens of every layer; of those with a window the ones that they hold."""
        dim, end = self.token_dim + 1, first + num_tokens
        views = []
        for (stack, _), has_window in zip(self._stacks, self._have_window, strict=True):
            base = self.window_from if has_window else 0
            begin = max(first, base)
            views.append(stack.narrow(dim, begin - base, end - begin).unbind(0))
        return self._spread(views)

    def first_token(self, layer_index: int) -> int:
        """Return the first token that a layer holds."""
        return self.window_from if layer_index in self._windowed else 0

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """View a layer's tokens, [num_tokens, kv_heads, dim]; it has to hold them."""
        row = first - self.first_token(layer_index)
        if row < 0:
            raise AssertionError(f"token {first} of a layer that holds those {-row} behind it")
        return super().read(layer_index, row, num_tokens)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield a view of a layer's tokens, [num_tokens, kv_heads, dim]."""
        yield self.read(layer_index, first, num_tokens)

    def region(self, layer_index: int) -> Tensor:
        """Refuse: kernels that write to a region know one place for all layers."""
        raise AssertionError(f"a kernel was to write to layer {layer_index} of windowed KV")

    def slot_index(self, _layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Refuse, as `region` does."""
        raise AssertionError(f"a kernel was to write {num_tokens} tokens from {first} on")

    @torch.inference_mode()
    def keep_from(self, window_from: int, end_token: int) -> None:
        """Move tokens [window_from, end_token) of layers with a window to their first rows."""
        stride, num_kept = window_from - self.window_from, end_token - window_from
        for index in self._windowed if stride else ():
            layer = self.layers[index]
            kept = layer.narrow(self.token_dim, stride, num_kept).clone()  # they may overlap
            layer.narrow(self.token_dim, 0, num_kept).copy_(kept)
        self.window_from = window_from


@dataclass(eq=False)
class WindowedKv(SequenceKv):
    """See the module docstring."""

    keys: WindowedTokens
    values: WindowedTokens

    @property
    def window_from(self) -> int:
        """First token that layers with a window hold."""
        return self.keys.window_from

    def begin_at(self, window_from: int) -> None:
        """Have layers with a window begin at a token, whatever is in their rows."""
        self.keys.window_from = self.values.window_from = window_from

    def keep_from(self, window_from: int) -> None:
        """Give back what layers with a window hold before a token; nobody else reads the KV."""
        for tokens in (self.keys, self.values):
            tokens.keep_from(window_from, self.num_tokens)
