"""What calibration found out: all that running, loading and storing need of a model.

Tensors are called by their shape: a component's tokens are [tokens, kv_heads, dim] in the model's
dtype, keys before RoPE ("free") or as the layer caches them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inference_svc.runtime.attention.latents import Expansion
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.kv.layer_tensors import NOTHING, LayerShape
from inference_svc.runtime.kv.own_layers import OwnLayer
from inference_svc.runtime.kv.states import StateShape
from inference_svc.runtime.positions.rotary import RotaryTable
from shared.types.kv_layout import KVLayout

Mode = Literal["ragged", "latent", "indexed", "gather", "masked", "single", "own"]
Positions = Literal["decoupled", "coupled", "naive"]
LATENT_MODES = frozenset({"latent", "indexed"})  # in which attention is over latents
MASKED_MODES = frozenset({"masked", "indexed"})  # in which the model is given a mask


@dataclass(frozen=True)
class KeySource:
    """Where, among the apply calls of a layer, what it caches is seen before RoPE.

    Usually that is the layer's key. Models of latent attention (MLA) cache their one rotated part
    in the place of the value.

    Attributes:
        call_index: which call since the layer before.
        arg_index: which positional argument of it, and which of its results after RoPE.
        seq_dim: the dimension of that argument that counts tokens.
        first: the first element of the component that the apply call gets.
        width: how many it gets; those before and after them are never rotated.
    """

    call_index: int
    arg_index: int
    seq_dim: int
    first: int
    width: int

    def before_rope(self, calls: Sequence[tuple[tuple[Any, ...], Any]], cached: Tensor) -> Tensor:
        """Return a component before RoPE, [tokens, kv_heads, dim].

        Args:
            calls: (arguments, result) of the layer's apply calls.
            cached: the component as the layer caches it, [1, kv_heads, tokens, dim].
        """
        seen: Tensor = calls[self.call_index][0][self.arg_index][0]
        free = seen.transpose(0, 1) if self.seq_dim == 2 else seen
        return self.replaced(cached[0].transpose(0, 1), free)

    def part(self, tokens: Tensor) -> Tensor:
        """View what the apply call gets of [..., dim], [..., width]."""
        return tokens.narrow(-1, self.first, self.width)

    def replaced(self, tokens: Tensor, part: Tensor) -> Tensor:
        """Return [..., dim] with another `part`, which may be all of it."""
        if self.width == tokens.shape[-1]:
            return part
        before, after = tokens[..., : self.first], tokens[..., self.first + self.width :]
        return torch.cat((before, part, after), dim=-1)


class ScaledRotary:
    """Moves keys, [n, kv_heads, dim], that a norm has scaled after their rotary embedding.

    A norm by the root mean square (Hunyuan, nanochat, Llama 4) divides a key by its length, which a
    rotation does not change, and multiplies its elements with weights. So a key divided by the
    weights is a rotated one, and can be moved like any other. Has the methods of a `RotaryTable`
    that compacting in place uses.
    """

    def __init__(self, rotary: RotaryTable, scale: Tensor) -> None:
        """Store the parts.

        Args:
            rotary: the embedding before the norm.
            scale: [dim] float32, the norm's weights.
        """
        self._rotary = rotary.wide
        self._scale = scale

    def move_into(self, keys: Tensor, old_start: int, new_start: int, out: Tensor) -> None:
        """Move keys to other positions, as `RotaryTable.move_into`."""
        rotated = keys / self._scale
        self._rotary.move_into(rotated, old_start, new_start, rotated)
        out.copy_(rotated.mul_(self._scale))

    def unrotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Undo the rotation, as `RotaryTable.unrotate_into`; results stay normalised."""
        self._rotary.unrotate_into(keys / self._scale, start, out)

    def rotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Undo `unrotate_into`."""
        rotated = self._rotary.rotate(keys.to(self._scale.dtype), start)
        out.copy_(rotated.mul_(self._scale))


@dataclass(frozen=True, eq=False)
class PostRotary:
    """A norm between a layer's RoPE and its cache; a module of the model, over the last dimension.

    Attributes:
        norm: the norm, a module over the last dimension, [..., dim].
        scale: [dim] its weights if it is a root-mean-square norm; None: it cannot be taken back.
    """

    norm: nn.Module
    scale: Tensor | None = None

    @property
    def signature(self) -> str:
        """What it does to stored bytes; its weights belong to the model's fingerprint."""
        return f"post:{type(self.norm).__name__}"

    def apply_to(self, keys: Tensor) -> None:
        """Normalise keys [tokens, kv_heads, dim], of any strides, in place."""
        keys.copy_(self.norm(keys))


@dataclass(frozen=True)
class ComponentRecipe:
    """One of the tensors that a layer caches.

    Attributes:
        source: where it is seen before RoPE; None: it has no position, as values and the keys of
            NoPE layers.
        rotary: the table that embeds it; None exactly if `source` is None.
        post: the norm after the rotary embedding; None: there is none.
    """

    source: KeySource | None = None
    rotary: RotaryTable | None = None
    post: PostRotary | None = None

    @property
    def can_move(self) -> bool:
        """Whether tokens as they are cached can be re-embedded at other positions."""
        return self.post is None or self.post.scale is not None

    @property
    def mover(self) -> RotaryTable | ScaledRotary | None:
        """What re-embeds tokens as they are cached, if `can_move`; None: they have no position."""
        if self.rotary is None or self.post is None:
            return self.rotary
        if self.post.scale is None:
            raise AssertionError("tokens behind a norm that cannot be taken back are moved")
        return ScaledRotary(self.rotary, self.post.scale)

    @property
    def signature(self) -> str:
        """What loading does to stored bytes; empty: nothing."""
        if self.rotary is None:
            return ""
        return self.rotary.signature + ("" if self.post is None else self.post.signature)

    def before_rope(self, calls: Sequence[tuple[tuple[Any, ...], Any]], cached: Tensor) -> Tensor:
        """Return the component before RoPE, [tokens, kv_heads, dim]; see `KeySource`."""
        if self.source is None:
            return cached[0].transpose(0, 1)
        return self.source.before_rope(calls, cached)

    def embed(self, free: Tensor, start: int) -> Tensor:
        """Return what is cached at positions from `start` on; both [tokens, kv_heads, dim]."""
        if self.rotary is None:
            return free
        embedded = self.rotary.rotate(free, start)
        if self.post is not None:
            self.post.apply_to(embedded)
        return embedded


@dataclass(frozen=True)
class LayerRecipe:
    """One layer that caches KV.

    Attributes:
        shape: shapes of a token's key and value.
        key: recipe of the first tensor that it caches.
        value: recipe of the second.
        index: recipe of its index keys; None: it has none (`LayerShape.index`).
    """

    shape: LayerShape
    key: ComponentRecipe
    value: ComponentRecipe
    index: ComponentRecipe | None = None

    @property
    def components(self) -> tuple[ComponentRecipe, ...]:
        """The recipes, in the order of `shape.parts` and of the layout."""
        recipes = (self.key, self.value, self.index)
        return tuple(part for part in recipes[: len(self.shape.parts)] if part is not None)


# The layer of a model that caches neither keys nor values, but states alone.
EMPTY_LAYER = LayerRecipe(NOTHING, ComponentRecipe(), ComponentRecipe())


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward, in order.

    Attributes:
        layer_index: the layer over whose KV it is.
        window: number of latest keys a query sees, itself included; None: all.
        chunk: a query sees keys from the last multiple of this position on; None: all.
    """

    layer_index: int
    window: int | None = None
    chunk: int | None = None

    def options(self, given: Mapping[str, Any]) -> AttentionOptions:
        """Return the call's options, given those by Transformers' names."""
        return AttentionOptions(
            given.get("scaling"), given.get("softcap"), given.get("s_aux"), self.window, self.chunk
        )


@dataclass(frozen=True)
class Calibration:
    """All that calibration found out about a model in one dtype.

    Attributes:
        mode: how attention is computed. "ragged": over each sequence's KV where it lies; "latent":
            over its latents where they lie; "indexed": over those of them that the model's index
            chooses; "gather": over what the model makes of gathered KV; "masked": by the model's
            own attention, under a mask that keeps the sequences of a batch apart; "single": by the
            model's own, one sequence at a time; "own": likewise, over its own cache.
        positions: how KV is stored. "decoupled": keys without their position, embedded when loaded;
            "coupled", "naive": as they were cached, see `KVLayout.position_mode`.
        layout: layout of the stored KV, the same in every process that serves this model in this
            dtype.
        layers: each layer's recipe, in the order in which they cache, as in `layout`; one without
            components if none does.
        attention_calls: the attention calls of one forward; none where the model's own attention
            runs.
        expansions: what keys and values are made by, of each of these calls over latents.
        notes: each attempt that failed before, and why.
        state_shapes: what recurrent layers keep of a sequence; empty: the model has none. If it
            has some, positions are coupled.
        is_one_by_one: whether tokens that follow a state are computed one by one: what the model
            has for several begins without a state (Mamba's first scan).
        rounding: relative distance of logits that are equally right, as the stock model has it.
        is_new_last: whether a masked forward hands over the new tokens of all sequences behind all
            histories: the model asks for positions of what stands before the new tokens. Else each
            sequence's behind its own history, as models expect that count keys (ALiBi).
        own_layers: in mode "own", what the layers of the model's cache keep.
    """

    mode: Mode
    positions: Positions
    layout: KVLayout
    layers: tuple[LayerRecipe, ...]
    attention_calls: tuple[AttentionCall, ...] = ()
    expansions: tuple[Expansion, ...] = ()
    notes: tuple[str, ...] = ()
    state_shapes: tuple[StateShape, ...] = ()
    is_one_by_one: bool = False
    rounding: float = 0.0
    is_new_last: bool = False
    own_layers: tuple[OwnLayer, ...] = ()
