"""Attention back-ends: the interface between a forward and whatever attends over sequences' KV.

A back-end is called twice: once per step with all parts (`prepare`), where it may plan, cut views
and allocate, and then once per attention call of the model (`attend`). It reads KV and writes
nothing. The portable one is `torch_attention.TorchAttention`; a library for one device is
another class of this shape, entered beside it.

A part's result must not depend on the parts beside it: else a session's answer would change with
the load of the server.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.kv.sequence_kv import SequenceKv


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
