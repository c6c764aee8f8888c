"""Attention back-ends: the interface between a forward and the code that attends over KV.

A back-end is called once per step with all parts (`prepare`), where it may plan, cut views and
allocate, and then once per attention call of the model (`attend`). It reads KV and writes nothing,
unless it offers to write a step's new tokens itself (`WritingAttention`).
`TorchAttention` is the portable one; `paged_attention.PagedAttention` is for devices with a kernel
that reads pages.

A part's result must not depend on the other parts: otherwise a session's answer would change with
the load of the server.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_svc.runtime.attention.softmax_attention import (
    AttentionOptions,
    Masks,
    attend,
    attend_one,
    can_attend_one,
)
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer

_ALL = AttentionOptions()  # no window: all tokens are visible
VisibleKv = list[tuple[Sequence[Tensor], Sequence[Tensor]]]  # by part: (keys, values), by layer


class Part(NamedTuple):
    """One sequence's tokens in a step that attend.

    Attributes:
        kv: the sequence's KV; its `num_tokens` does not change while the step runs.
        num_tokens: number of new tokens that attend; their KV is written before `attend` is called.
        num_before: number of new tokens before them, which do not. The first of all is in slot
            `kv.num_tokens`.
        write_buffer: also has to receive the tokens, of which it has none yet; None: none has.
    """

    kv: SequenceKv
    num_tokens: int
    num_before: int = 0
    write_buffer: WriteBuffer | None = None

    @property
    def length(self) -> int:
        """Number of tokens that the last new token sees, itself included."""
        return self.kv.num_tokens + self.num_before + self.num_tokens


class NewKv(NamedTuple):
    """A layer's keys and values of a step's new tokens, the parts one after another.

    Attributes:
        key: [1, kv_heads, tokens, head_dim], after RoPE, as attention reads it.
        value: [1, kv_heads, tokens, value_dim].
        unrotated_key: [tokens, kv_heads, head_dim], before RoPE, as it is stored.
        unrotated_value: [tokens, kv_heads, value_dim].
    """

    key: Tensor
    value: Tensor
    unrotated_key: Tensor
    unrotated_value: Tensor


class StepAttention(Protocol):
    """The attention of one step."""

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Attend each part's new tokens to their own sequence up to themselves.

        Args:
            query: [1, heads, tokens, head_dim], the parts one after another.
            layer_index: the layer whose KV is read; the new tokens' KV is already written.
            options: scale, softcap, sinks and window of this call.

        Returns:
            [1, tokens, heads, value_dim]
        """


class WritingAttention(ABC):
    """The attention of a step in which every part is one token; it can write them, too."""

    @abstractmethod
    def write_and_attend(
        self, query: Tensor, new: NewKv, layer_index: int, options: AttentionOptions
    ) -> Tensor:
        """Write a layer's new tokens to KV and to write buffers, then attend.

        Args:
            query: as `StepAttention.attend` takes it.
            new: the tokens, all of the query's dtype.
            layer_index: the layer.
            options: scale, softcap, sinks and window of this call.

        Returns:
            [1, tokens, heads, value_dim]
        """


class AttentionBackend(Protocol):
    """Attends over sequences' KV; used by one thread."""

    def prepare(self, parts: Sequence[Part]) -> StepAttention:
        """Plan the attention calls of a step over these parts."""


class TorchAttention:
    """The portable back-end, by torch's functions for every device.

    It makes one call per sequence, on its KV in place. On a CPU, gathering tokens of several
    sequences for one call costs more than the separate calls; even if they were adjacent already, a
    call over eight sequences of 256 tokens would only save a tenth of the time.

    The code makes few Python and torch calls: at decode they cost as much as the arithmetic. So
    views of all layers are cut at once, and a step in which every part is one token has a path of
    its own, with the same arithmetic.
    """

    def prepare(self, parts: Sequence[Part]) -> "TorchStepAttention":
        """Plan a step; cheap, as views are cut when they are needed."""
        return TorchStepAttention(parts)


class TorchStepAttention:
    """The attention of one step in torch; see `StepAttention` for shapes."""

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
            if can_attend_one(query, visible[0][1][layer_index], options):
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
        return torch.cat(attended, dim=1)  # contiguous, which some models rely on

    def _attend_decode(
        self, query: Tensor, layer_index: int, options: AttentionOptions, visible: VisibleKv
    ) -> Tensor:
        """Attend in a step in which every part is one token."""
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
        """Return the KV that each part's last token sees; cut once per window and chunk."""
        kind = (options.window, options.chunk)
        if kind not in self._visible:
            cuts = []
            for part in self._parts:
                first = options.first_visible(part.length - 1)
                num_tokens, kv = part.length - first, part.kv
                cuts.append((kv.keys.cut(first, num_tokens), kv.values.cut(first, num_tokens)))
            self._visible[kind] = cuts
        return self._visible[kind]
