"""Load: arena slots -> slab, with keys embedded at the positions of this turn.

Pure copying: it may run on a copy thread while `step` runs other sequences, since nobody else
touches a slab whose sequence is not running yet. Source: CachedAttention, section 3.4 (positions
decoupled from stored keys).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.kv_slab import KVSlab
from inference_svc.runtime.recipes import Calibration
from shared.kv_layout import KVLayout


class Arena(Protocol):
    """Where slots are mapped."""

    def slot(self, slot_id: int) -> memoryview:
        """Return the writable bytes of one slot."""


class Span(Protocol):
    """Rows [start, start + num_tokens) of a slot, for positions from token_offset on."""

    @property
    def slot_id(self) -> int:
        """Which slot."""

    @property
    def start(self) -> int:
        """First row in the slot."""

    @property
    def num_tokens(self) -> int:
        """Number of rows."""

    @property
    def token_offset(self) -> int:
        """Position in the sequence of the first row."""


def no_wait(_layer_index: int) -> None:
    """Every layer is there."""


def load_spans(
    slab: KVSlab,
    arena: Arena,
    spans: Sequence[Span],
    calibration: Calibration,
    wait_layer: Callable[[int], None] = no_wait,
) -> None:
    """Append spans to the slab.

    Where the last span does not fill its block, its keys before RoPE are kept too: the next store
    replaces that block by a longer one, which holds these tokens again.

    Args:
        slab: `num_tokens` moves to the end of the spans; on failure it stays, and so do the rows
            before it.
        arena: that the slots are in; the caller holds their lease.
        spans: in order, without gaps, the first at `slab.num_tokens`.
        calibration: of the model that the slab and the stored bytes belong to.
        wait_layer: called before each layer is read; returns once its bytes are in the slots, and
            may raise.

    Raises:
        ValueError: if the spans leave a gap, leave the slot or the slab.
    """
    layout = calibration.layout
    end = slab.num_tokens
    for span in spans:
        is_inside = span.start >= 0 and 0 < span.num_tokens <= layout.block_tokens - span.start
        if (
            span.token_offset != end
            or not is_inside
            or end + span.num_tokens > slab.capacity_tokens
        ):
            raise ValueError(
                f"rows {span.start}+{span.num_tokens} of a slot cannot be loaded at "
                f"{span.token_offset}; the slab has {end} of {slab.capacity_tokens} tokens"
            )
        end += span.num_tokens
    if not spans:
        return
    is_open = spans[-1].num_tokens < layout.block_tokens
    save_from = spans[-1].token_offset if is_open else end
    slots = [arena.slot(span.slot_id) for span in spans]
    for layer_index in range(len(calibration.layers)):
        wait_layer(layer_index)
        _load_layer(slab, slots, spans, calibration, layer_index, save_from)
    slab.save_from = save_from
    slab.num_tokens = end


def slot_rows(
    slot: memoryview,
    layout: KVLayout,
    layer_index: int,
    component_index: int,
    start: int,
    num_tokens: int,
) -> Tensor:
    """View rows of a component as [num_tokens, *shape]; valid while the arena is mapped."""
    component = layout.layers[layer_index].components[component_index]
    offset = layout.component_offset(layer_index, component_index) + start * component.token_bytes
    dtype: torch.dtype = getattr(torch, component.dtype)
    count = num_tokens * component.token_bytes // dtype.itemsize
    flat = torch.frombuffer(slot, dtype=dtype, count=count, offset=offset)
    return flat.view(num_tokens, *component.shape)


def _load_layer(
    slab: KVSlab,
    slots: Sequence[memoryview],
    spans: Sequence[Span],
    calibration: Calibration,
    layer_index: int,
    save_from: int,
) -> None:
    """Load one layer of all spans: values straight to their place, keys turned all at once.

    Turning takes several passes over the keys anyway, and one call over many rows costs less than
    many calls over few.
    """

    def rows(component_index: int) -> list[Tensor]:
        return [
            slot_rows(slot, layout, layer_index, component_index, span.start, span.num_tokens)
            for slot, span in zip(slots, spans, strict=True)
        ]

    layout, recipe = calibration.layout, calibration.layers[layer_index]
    layer_keys, layer_values = slab.keys[layer_index][0], slab.values[layer_index][0]
    first = spans[0].token_offset
    keys = torch.cat(rows(0)).to(layer_keys.device)  # [tokens, kv_heads, head_dim]
    end = first + keys.shape[0]
    turned = keys if recipe.rotary is None else recipe.rotary.rotate(keys, first)
    layer_keys[:, first:end] = turned.transpose(0, 1)
    for span, values in zip(spans, rows(1), strict=True):
        layer_values[:, span.token_offset : span.token_offset + span.num_tokens] = values.transpose(
            0, 1
        )
    if recipe.rotary is not None and slab.free_keys is not None:
        slab.free_keys[layer_index][save_from:end] = keys[save_from - first :]
