"""New tokens reach their slots of write buffers, wherever these lie."""

import pytest
import torch

from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.compute.step_places import BufferedTokens
from inference_svc.runtime.kv.layer_tensors import LayerShape, Places
from inference_svc.runtime.kv.write_ring import WriteRing

CPU = torch.device("cpu")
SHAPES = [LayerShape((2, 4), (1, 6), (1, 3)), LayerShape((3, 4), (2, 4), (1, 3))]
LAYER = 1


@pytest.mark.parametrize("chosen", [None, [0, 2, 3]], ids=["all", "some"])
@pytest.mark.parametrize("slots", [[3, 4, 5], [5, 3, 8]], ids=["adjacent", "scattered"])
def test_tokens_of_a_step_are_written_to_their_slots(slots, chosen):
    """Each component of one layer; no other slot and no other layer changes."""
    ring = WriteRing(SHAPES, WriteSlots(12), device=CPU, dtype=torch.float32)
    buffer = ring.spare_buffer()
    for tensors in buffer.components:
        for layer in tensors.layers:
            layer.zero_()
    num_tokens = 3 if chosen is None else 4
    new = [torch.rand(num_tokens, *part) + 1 for part in SHAPES[LAYER].parts]
    index = None if chosen is None else torch.tensor(chosen)
    written = BufferedTokens.of(buffer, index, Places(slots, CPU))
    written.write(LAYER, *new[:2])
    written.write(LAYER, new[2], first=2)
    for tensors, rows in zip(buffer.components, new, strict=True):
        expected = torch.zeros_like(tensors[LAYER])
        expected[slots] = rows if chosen is None else rows[chosen]
        assert torch.equal(tensors[LAYER], expected)
        assert not tensors[1 - LAYER].any()
