"""Attention back-ends: the interface between a forward and whatever attends over sequences' KV.

A back-end is called twice: once per step with all parts (`prepare`), where it may plan, cut views
and allocate, and then once per attention call of the model (`attend`). It reads KV and writes
nothing. The portable one is `TorchAttention`; a library for one device is another class of this
shape, as `paged_attention.PagedAttention`.

A part's result must not depend on the parts beside it: else a session's answer would change with
the load of the server.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_svc.runtime.attention.softmax_attention import (
    AttentionOptions,
    Masks,
    attend,
    attend_one,
    attends_one,
)
from inference_svc.runtime.kv.sequence_kv import SequenceKv

_ALL = AttentionOptions()  # every token is seen
VisibleKv = list[tuple[Sequence[Tensor], Sequence[Tensor]]]  # keys, values of each part, by layer


class Part(NamedTuple):
    """One sequence's tokens in a step.

    Attributes:
        kv: the sequence's KV; its `num_tokens` does not change while the step runs.
        num_tokens: number of new tokens: the first is in slot `kv.num_tokens`, written before it
        is attended to.
    """

    kv: SequenceKv
    num_tokens: int

    @property
    def length(self) -> int:
        """Number of tokens that the last new one sees, itself included."""
        return self.kv.num_tokens + self.num_tokens


class StepAttention(Protocol):
    """Attention of one step."""

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Let each part's tokens see their sequence up to themselves.

        Args:
            query: [1, heads, tokens, head_dim], the parts one after another.
            layer_index: the layer over whose KV; that of the new tokens is written by now.
            options: scale, softcap, sinks and window of this call.

        Returns:
            [1, tokens, heads, value_dim]
        """


class AttentionBackend(Protocol):
    """Attends over sequences' KV; used by one thread."""

    def prepare(self, parts: Sequence[Part]) -> StepAttention:
        """Plan the attention calls of a step over these parts."""


class TorchAttention:
    """The portable back-end, with what torch has for every device.

    One call per sequence, on the very tokens of its KV: gathering tokens of several sequences for
    one call costs more than the calls do on a CPU, and if they lay side by side already, a call
    over eight of 256 tokens would take 0.9 of the time.
    Written for few Python and torch calls: at decode they cost as much as the arithmetic. Hence
    views of all layers are cut at once, and a step in which every part is one token has a path of
    its own, with the arithmetic of the other.
    """

    def prepare(self, parts: Sequence[Part]) -> "TorchStepAttention":
        """Plan a step; cheap."""
        return TorchStepAttention(parts)


class TorchStepAttention:
    """Attention of one step; see the protocol for shapes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._sizes = [part.num_tokens for part in parts]
        self._is_decode = max(self._sizes) == 1
        self._visible: dict[tuple[int | None, int | None], VisibleKv] = {}
        self._masks: Masks = {}

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Attend each part to its own KV, [1, tokens, heads, value_dim]; see the protocol."""
        if self._is_decode:
            visible = self._visible_kv(options)
            if attends_one(query, visible[0][1][layer_index], options):
                return self._attend_decode(query, layer_index, options, visible)
        attended = [
            attend(
                piece,
                keys[layer_index],
                values[layer_index],
                options,
                self._masks,
                part.kv.keys.first_token(layer_index),
            ).transpose(1, 2)
            for part, piece, (keys, values) in zip(
                self._parts,
                query.split_with_sizes(self._sizes, 2),
                self._visible_kv(_ALL),
                strict=True,
            )
        ]
        return torch.cat(attended, dim=1)  # contiguous, as some models count on

    def _attend_decode(
        self, query: Tensor, layer_index: int, options: AttentionOptions, visible: VisibleKv
    ) -> Tensor:
        """Attend when every part is one token."""
        _, num_heads, num_parts, dim = query.shape
        kv_heads = visible[0][0][layer_index].shape[1]
        grouped = query[0].transpose(0, 1).reshape(num_parts, kv_heads, -1, dim)
        attended = [
            attend_one(row, keys[layer_index], values[layer_index], options)
            for row, (keys, values) in zip(
                grouped.split_with_sizes(self._sizes), visible, strict=True
            )
        ]
        return torch.cat(attended).view(1, num_parts, num_heads, -1)

    def _visible_kv(self, options: AttentionOptions) -> VisibleKv:
        """Return what each part's last token sees; cut once for all layers that see as much."""
        kind = (options.window, options.chunk)
        if kind not in self._visible:
            cuts = []
            for part in self._parts:
                first = options.first_visible(part.length - 1)
                num_tokens, kv = part.length - first, part.kv
                cuts.append((kv.keys.cut(first, num_tokens), kv.values.cut(first, num_tokens)))
            self._visible[kind] = cuts
        return self._visible[kind]
