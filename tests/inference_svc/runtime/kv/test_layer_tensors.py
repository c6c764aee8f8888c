"""The division of memory among components, and which of them are adjacent."""

import pytest
import torch

from inference_svc.runtime.kv.layer_tensors import (
    ContiguousTokens,
    LayerShape,
    SlotTensors,
    divide_memory,
    side_by_side,
    token_items_of,
)

SLOTS = 6
LATENT = LayerShape((1, 5), (1, 3), is_latent=True)
INDEXED = LayerShape((1, 5), (1, 3), (1, 2), is_latent=True)
OTHER = LayerShape((1, 4), (1, 4), is_latent=True)
PLAIN = LayerShape((1, 5), (1, 3))


@pytest.mark.parametrize("kind", [ContiguousTokens, SlotTensors])
@pytest.mark.parametrize(
    ("shapes", "is_joint"),
    [
        ([LATENT, LATENT], True),
        ([INDEXED, LATENT], True),
        ([PLAIN, PLAIN], False),
        ([LATENT, OTHER], False),  # as wide together, but divided otherwise
    ],
)
def test_latents_and_their_rotated_part_are_adjacent(kind, shapes, is_joint):
    """A reader of both gets a view; nothing overlaps, and all of the memory is used."""
    flat = torch.full((SLOTS * token_items_of(shapes),), -1.0)
    components = [part for part in divide_memory(flat, shapes, SLOTS, kind) if part is not None]
    tensors = [tensor for part in components for tensor in part.layers]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert flat.min() == 0
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
    keys, values = components[:2]
    for layer, shape in enumerate(shapes):
        first, second = keys.cut(1, 4)[layer], values.cut(1, 4)[layer]
        joint = side_by_side(first, second)
        assert torch.equal(joint, torch.cat((first, second), dim=-1))
        assert joint.shape[-1] == shape.key[1] + shape.value[1]
        assert (joint.data_ptr() == first.data_ptr()) == is_joint
