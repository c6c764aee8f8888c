"""Slabs: layers of several shapes, in order."""

import torch

from inference_svc.runtime.kv_slab import HUGE_PAGE_BYTES, LayerShape, allocate_slab


def test_layers_of_several_shapes_keep_their_order():
    """Cutting all layers at once gives views of each layer's own rows."""
    shapes = [LayerShape((2, 4), (2, 4)), LayerShape((1, 8), (1, 6)), LayerShape((2, 4), (1, 6))]
    slab = allocate_slab(shapes, 10, device=torch.device("cpu"), dtype=torch.float32, save=True)
    assert [tuple(rows.shape) for rows in slab.keys.cut(3, 5)] == [
        (1, 2, 5, 4),
        (1, 1, 5, 8),
        (1, 2, 5, 4),
    ]
    assert [tuple(rows.shape) for rows in slab.values.cut(0, 2)] == [
        (1, 2, 2, 4),
        (1, 1, 2, 6),
        (1, 1, 2, 6),
    ]
    for layer_index, rows in enumerate(slab.free_keys.cut(4, 2)):
        rows.fill_(layer_index)
        assert (slab.free_keys[layer_index][4:6] == layer_index).all()


def test_large_slabs_are_ordinary_tensors():
    """A slab beyond a huge page is allocated in another way and behaves the same."""
    capacity = HUGE_PAGE_BYTES // (8 * 4)
    shapes = [LayerShape((1, 8), (1, 8))]
    slab = allocate_slab(
        shapes, capacity, device=torch.device("cpu"), dtype=torch.float32, save=False
    )
    slab.keys[0][0, 0, -1] = 3.0
    assert slab.keys.cut(capacity - 1, 1)[0].sum() == 24.0
    assert slab.free_tokens == capacity
