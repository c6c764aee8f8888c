"""What calibration found out: all that running, loading and storing need to know of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.kv.kv_slab import LayerShape
from inference_svc.runtime.model.rotary import RotaryTable
from shared.kv_layout import KVLayout


@dataclass(frozen=True)
class KeySource:
    """Where, among the apply calls of a layer, its keys before RoPE are seen.

    Attributes:
        call_index: which call since the layer before.
        arg_index: which positional argument of it.
        seq_dim: the dimension of that argument that counts tokens.
        width: elements that the apply call gets; the rest of a key is never rotated.
    """

    call_index: int
    arg_index: int
    seq_dim: int
    width: int

    def free_rows(self, calls: Sequence[tuple[tuple[Any, ...], Any]], key: Tensor) -> Tensor:
        """Return keys before RoPE, [tokens, kv_heads, dim]; `key` is the one after it."""
        seen: Tensor = calls[self.call_index][0][self.arg_index][0]
        rows = seen.transpose(0, 1) if self.seq_dim == 2 else seen
        if self.width < key.shape[-1]:
            rows = torch.cat((rows, key[0].transpose(0, 1)[..., self.width :]), dim=-1)
        return rows


@dataclass(frozen=True)
class LayerRecipe:
    """One layer that caches KV.

    Attributes:
        shape: of its rows.
        source: None: its keys have no position (NoPE).
        rotary: None exactly if `source` is None.
    """

    shape: LayerShape
    source: KeySource | None
    rotary: RotaryTable | None


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward, in order: over which layer's rows, and how many of them."""

    layer_index: int
    window: int | None


@dataclass(frozen=True)
class Calibration:
    """The whole of it.

    Attributes:
        mode: "paged": attention reads the slab directly. The other modes do not exist yet.
        layout: of the stored KV, the same in every process that serves this model in this dtype.
        layers: by cache index, as in `layout`.
        attention_calls: of one forward.
    """

    mode: str
    layout: KVLayout
    layers: tuple[LayerRecipe, ...]
    attention_calls: tuple[AttentionCall, ...]
