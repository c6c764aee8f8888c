"""WindowedKv: contiguous KV of a sequence whose layers with a window hold the last tokens only.

    layer without a window   `capacity_tokens` rows: row = position
    layer with a window      `HeldRows.num_rows` rows: row = position - window_from

All lie in one piece of memory. When the rows of layers with a window are full, the last tokens are
copied to the first rows (`keep_from`), and the tokens before are dropped.

Attention with a window reads no key before the window, and its keys are still adjacent, so results
are the same. This needs attention that reads KV in place (`Calibration.mode` "ragged"). A device's
kernels that load KV are not supported: they expect a token in the same slot in all layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_tensors import ContiguousTokens, TokenRoom
from inference_svc.runtime.kv.sequence_kv import SequenceKv


class WindowedTokens(ContiguousTokens):
    """One component of one sequence's tokens; layers with fewer rows than others have a window.

    Attributes:
        window_from: position of the first token that layers with a window hold.
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
        """View tokens by layer, each [1, kv_heads, tokens, dim]; only those that a layer holds."""
        dim, end = self.token_dim + 1, first + num_tokens
        views = []
        for (stack, _), has_window in zip(self._stacks, self._have_window, strict=True):
            base = self.window_from if has_window else 0
            begin = max(first, base)
            views.append(stack.narrow(dim, begin - base, end - begin).unbind(0))
        return self._in_layer_order(views)

    def first_token(self, layer_index: int) -> int:
        """Return the position of the first token that a layer holds."""
        return self.window_from if layer_index in self._windowed else 0

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """View a layer's tokens, [num_tokens, kv_heads, dim]; the layer has to hold them."""
        row = first - self.first_token(layer_index)
        if row < 0:
            raise AssertionError(f"token {first} of a layer that holds those {-row} behind it")
        return super().read(layer_index, row, num_tokens)

    def room(self, layer_index: int, first: int, _num_tokens: int) -> TokenRoom:
        """Return where a layer's tokens from `first` on lie."""
        row = first - self.first_token(layer_index)
        return TokenRoom(self.layers[layer_index], self.token_dim, row)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield a view of a layer's tokens, [num_tokens, kv_heads, dim], for the caller to fill."""
        yield self.read(layer_index, first, num_tokens)

    def region(self, layer_index: int) -> Tensor:
        """Refuse: kernels that write to a region expect a token in the same slot in all layers."""
        raise AssertionError(f"a kernel was to write to layer {layer_index} of windowed KV")

    def slot_index(self, _layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Refuse; see `region`."""
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
    """One sequence's contiguous KV, in which layers with a window hold the last tokens only."""

    keys: WindowedTokens
    values: WindowedTokens

    @property
    def window_from(self) -> int:
        """Position of the first token that layers with a window hold."""
        return self.keys.window_from

    def begin_at(self, window_from: int) -> None:
        """Let layers with a window begin at a token; their rows are garbage until written."""
        self.keys.window_from = self.values.window_from = window_from

    def keep_from(self, window_from: int) -> None:
        """Drop tokens of layers with a window before a position; no other thread reads the KV."""
        for tokens in (self.keys, self.values):
            tokens.keep_from(window_from, self.num_tokens)
