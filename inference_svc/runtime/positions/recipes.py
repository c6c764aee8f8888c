"""Calibration results: everything about a model that running, loading and storing need.

A component's tokens are [tokens, kv_heads, dim] in the model's dtype: either before RoPE
("unrotated"), or as the layer caches them.
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
LATENT_MODES = frozenset({"latent", "indexed"})  # modes with attention over latents
MASKED_MODES = frozenset({"masked", "indexed"})  # modes in which the model receives a mask


@dataclass(frozen=True)
class KeySource:
    """The argument of a layer's rotary call that is a cached component before RoPE.

    Usually that component is the layer's key. Models with latent attention (MLA) cache their single
    rotated part in place of the value.

    Attributes:
        call_index: index of the call, counted since the layer before has cached.
        arg_index: index of the positional argument before RoPE, and of the result after it.
        seq_dim: index of that argument's token dimension.
        first: index of the component's first element that the call rotates.
        width: number of elements that it rotates; elements before and behind are never rotated.
    """

    call_index: int
    arg_index: int
    seq_dim: int
    first: int
    width: int

    def before_rope(self, calls: Sequence[tuple[tuple[Any, ...], Any]], cached: Tensor) -> Tensor:
        """Return a component before RoPE, [tokens, kv_heads, dim].

        Args:
            calls: (arguments, result) of the layer's rotary calls.
            cached: the component as the layer caches it, [1, kv_heads, tokens, dim].
        """
        argument: Tensor = calls[self.call_index][0][self.arg_index][0]
        unrotated = argument.transpose(0, 1) if self.seq_dim == 2 else argument
        if self.width == cached.shape[-1]:
            return unrotated
        return self.with_part(cached[0].transpose(0, 1), unrotated)

    def part(self, tokens: Tensor) -> Tensor:
        """View the elements that the call rotates, [..., width], of [..., dim]."""
        return tokens.narrow(-1, self.first, self.width)

    def with_part(self, tokens: Tensor, part: Tensor) -> Tensor:
        """Return tokens, [..., dim], with the rotated elements replaced by [..., width]."""
        if self.width == tokens.shape[-1]:
            return part
        before, after = tokens[..., : self.first], tokens[..., self.first + self.width :]
        return torch.cat((before, part, after), dim=-1)


class ScaledRotary:
    """Moves keys, [n, kv_heads, dim], that a norm has scaled after their rotary embedding.

    A root-mean-square norm (Hunyuan, nanochat, Llama 4) divides a key by its length, which a
    rotation does not change, and multiplies its elements by weights. So a key divided by the
    weights is a rotated key, and can be moved like any other. Has those methods of a `RotaryTable`
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
        """Move keys to other positions, like `RotaryTable.move_into`."""
        rotated = keys / self._scale
        self._rotary.move_into(rotated, old_start, new_start, rotated)
        out.copy_(rotated.mul_(self._scale))

    def unrotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Undo the rotation, like `RotaryTable.unrotate_into`; results stay normalised."""
        self._rotary.unrotate_into(keys / self._scale, start, out)

    def rotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Undo `unrotate_into`."""
        rotated = self._rotary.rotate(keys.to(self._scale.dtype), start)
        out.copy_(rotated.mul_(self._scale))


@dataclass(frozen=True, eq=False)
class PostRotary:
    """A norm between a layer's RoPE and its cache.

    Attributes:
        norm: the model's module, over the last dimension, [..., dim].
        scale: [dim], its weights if it is a root-mean-square norm; None: it cannot be undone.
    """

    norm: nn.Module
    scale: Tensor | None = None

    @property
    def signature(self) -> str:
        """A description of what it does to stored bytes; its weights are in the fingerprint."""
        return f"post:{type(self.norm).__name__}"

    def apply_to(self, keys: Tensor) -> None:
        """Normalise keys [tokens, kv_heads, dim], of any strides, in place."""
        keys.copy_(self.norm(keys))


@dataclass(frozen=True)
class ComponentRecipe:
    """How one of the tensors that a layer caches is stored and embedded.

    Attributes:
        source: where it is captured before RoPE; None: it has no position, like values, and keys
            of NoPE layers.
        rotary: the table that embeds it; None if and only if `source` is None.
        post: the norm after the rotary embedding; None: there is none.
    """

    source: KeySource | None = None
    rotary: RotaryTable | None = None
    post: PostRotary | None = None

    @property
    def can_move(self) -> bool:
        """Whether cached tokens can be re-embedded at other positions."""
        return self.post is None or self.post.scale is not None

    @property
    def mover(self) -> RotaryTable | ScaledRotary | None:
        """The table that re-embeds cached tokens, if `can_move`; None: they have no position."""
        if self.rotary is None or self.post is None:
            return self.rotary
        if self.post.scale is None:
            raise AssertionError("tokens behind a norm that cannot be taken back are moved")
        return ScaledRotary(self.rotary, self.post.scale)

    @property
    def signature(self) -> str:
        """A description of what loading does to stored bytes; "": nothing."""
        if self.rotary is None:
            return ""
        return self.rotary.signature + ("" if self.post is None else self.post.signature)

    def before_rope(self, calls: Sequence[tuple[tuple[Any, ...], Any]], cached: Tensor) -> Tensor:
        """Return the component before RoPE, [tokens, kv_heads, dim]; see `KeySource`."""
        if self.source is None:
            return cached[0].transpose(0, 1)
        return self.source.before_rope(calls, cached)

    def embed(self, unrotated: Tensor, start: int) -> Tensor:
        """Embed tokens at positions from `start` on, as the layer caches them.

        Args:
            unrotated: [tokens, kv_heads, dim], before RoPE.
            start: position of the first token.

        Returns:
            [tokens, kv_heads, dim]; `unrotated` itself if the component has no position.
        """
        if self.rotary is None:
            return unrotated
        embedded = self.rotary.rotate(unrotated, start)
        if self.post is not None:
            self.post.apply_to(embedded)
        return embedded


@dataclass(frozen=True)
class LayerRecipe:
    """How the KV of one layer is stored and embedded.

    Attributes:
        shape: the per-token shapes of its components.
        key: recipe of the first tensor that it caches.
        value: recipe of the second tensor that it caches.
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


# The only layer of a model that caches states, but neither keys nor values.
EMPTY_LAYER = LayerRecipe(NOTHING, ComponentRecipe(), ComponentRecipe())


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward.

    Attributes:
        layer_index: the layer whose KV it reads.
        window: number of latest keys that a query sees, its own included; None: all.
        chunk: a query sees keys from the last multiple of this number on; None: all.
    """

    layer_index: int
    window: int | None = None
    chunk: int | None = None

    def options(self, arguments: Mapping[str, Any]) -> AttentionOptions:
        """Return the call's options.

        Args:
            arguments: the model's keyword arguments of the call, by Transformers' names.
        """
        return AttentionOptions(
            arguments.get("scaling"),
            arguments.get("softcap"),
            arguments.get("s_aux"),
            self.window,
            self.chunk,
        )


@dataclass(frozen=True)
class Calibration:
    """Everything that calibration has found out about a model in one dtype.

    Attributes:
        mode: how attention is computed. "ragged": over each sequence's KV in place; "latent": over
            its latents in place; "indexed": over the latents that the model's index chooses;
            "gather": over keys and values that the model makes of gathered KV; "masked": by the
            model's own attention, under a mask that separates the sequences of a batch; "single":
            by the model's own attention, one sequence at a time; "own": like single, over the
            model's own cache.
        positions: how KV is stored. "decoupled": keys before RoPE, embedded when loaded; "coupled",
            "naive": keys as they were cached, see `KVLayout.position_mode`.
        layout: layout of the stored KV, the same in every process that serves this model in this
            dtype.
        layers: the layers' recipes, in the order in which they cache, as in `layout`; a single one
            without components if no layer caches.
        attention_calls: the attention calls of one forward, in order; empty where the model's own
            attention runs.
        expansions: for each attention call over latents, how keys and values are made of them.
        notes: the attempts that failed before, each with its reason.
        state_shapes: the tensors of a sequence's recurrent state; empty: the model has none. A
            model with states has coupled positions.
        is_one_by_one: whether tokens behind a state are computed one by one, because the model's
            code for several tokens starts without a state (Mamba's first scan).
        rounding: relative distance between logits of the stock model that are equally correct.
        is_new_last: whether a masked forward passes the new tokens of all sequences behind all
            histories, for models that ask for the positions before the new tokens. Otherwise each
            sequence's follow its own history, for models that count keys (ALiBi).
        own_layers: in mode "own", the layers of the model's cache.
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
