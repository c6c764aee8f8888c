"""Packed layers compute like the layers that they replace, which can be restored."""

import copy
import weakref

import pytest
import torch
from torch import nn

from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model import packed_linear
from inference_svc.runtime.model.packed_linear import (
    PackedLinear,
    pack_weights,
    packed_bytes,
    packing_of,
    unpack_weights,
)
from inference_svc.runtime.model.packing import (
    FEW_ROWS,
    MIN_WEIGHTS,
    MIN_WEIGHTS_ONEDNN_FLOAT32,
    OneDnnPacking,
)

CPU = torch.device("cpu")
WIDTH = 768  # of a packed layer with as many inputs as outputs
WIDE = 2 * MIN_WEIGHTS_ONEDNN_FLOAT32 // WIDTH
ONEDNN = OneDnnPacking()
REGIONS = RegionTensors()


class _Model(nn.Module):
    """Large and small layers, one of another class, one in two places, one with tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WIDE, WIDTH)
        self.inner = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)]
        )
        self.again = self.inner[0]
        self.projection = _Projection(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, token_ids):
        states = self.projection(self.again(self.embedding(token_ids)))
        for layer in self.inner:
            states = layer(states)
        return self.head(states)


class _Projection(nn.Linear):
    """A layer of another class, which may compute something else."""


@pytest.fixture
def model():
    return _Model().eval().requires_grad_(requires_grad=False)


@pytest.fixture(params=["cpp", "torch"])
def packing(request):
    """Each packing: ours and oneDNN's."""
    return ProductKernel.load() if request.param == "cpp" else ONEDNN


def test_packed_weights_are_not_part_of_the_state_dict(packing):
    """Torch could not save them."""
    assert list(PackedLinear(nn.Linear(256, 256), packing, REGIONS).state_dict()) == ["bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_products_equal_those_of_the_layer_up_to_rounding(packing, dtype, rows):
    if packing.why_unusable(CPU, dtype):
        pytest.skip(packing.why_unusable(CPU, dtype))
    torch.manual_seed(rows)
    linear = nn.Linear(300, 257).to(dtype)
    states = torch.randn(1, 300, rows, dtype=dtype).transpose(1, 2)
    with torch.inference_mode():
        products, expected = PackedLinear(linear, packing, REGIONS)(states), linear(states)
    assert products.shape == expected.shape == (1, rows, 257)
    torch.testing.assert_close(
        products, expected, rtol=2e-2, atol=2e-2 if dtype.itemsize < 4 else 1e-5
    )


def test_a_rows_product_does_not_depend_on_other_rows():
    """With oneDNN if its kernel is the same; ours has a stricter test."""
    torch.manual_seed(0)
    layer, states = (
        PackedLinear(nn.Linear(576, 192), ONEDNN, REGIONS),
        torch.randn(300, 576),
    )
    with torch.inference_mode():
        whole = layer(states)
        assert all(torch.equal(layer(states[:rows]), whole[:rows]) for rows in (1, 2, 8, 17, 128))


def test_only_large_layers_are_packed(model, packing):
    token_ids, before = torch.tensor([[1, 2, 3]]), copy.deepcopy(model)
    assert packing_of(model) == ""
    num_bytes = pack_weights(model, packing)
    assert num_bytes == packed_bytes(model) == 4 * WIDTH * (WIDTH + packed_outputs(packing))
    kinds = [type(part) for part in (*model.inner, model.projection, model.head)]
    assert kinds == [PackedLinear, nn.Linear, nn.Linear, _Projection, PackedLinear]
    assert model.again is model.inner[0]
    assert packing_of(model) == packing.name
    torch.testing.assert_close(model(token_ids), before(token_ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(model.embedding.weight, before.embedding.weight)


def packed_outputs(packing):
    """Return the outputs of the head, with those that fill its last panel."""
    return packing.pack(torch.zeros(WIDE, 1), REGIONS).numel()


def test_small_layers_are_packed_unless_one_row_takes_longer(packing):
    """As it does with oneDNN in float32; our kernel takes bfloat16 on some processors only."""
    is_slow = packing.name == "torch"
    least = MIN_WEIGHTS_ONEDNN_FLOAT32 if is_slow else MIN_WEIGHTS
    assert packing.least_weights(torch.float32) == least
    is_taken = is_slow or not packing.why_unusable(CPU, torch.bfloat16)
    assert packing.least_weights(torch.bfloat16) == (MIN_WEIGHTS if is_taken else None)
    assert MIN_WEIGHTS < MIN_WEIGHTS_ONEDNN_FLOAT32


def test_unpacked_weights_equal_the_original_ones(model, packing):
    before = copy.deepcopy(model)
    pack_weights(model, packing)
    assert torch.equal(model.head.weight, before.head.weight)
    unpack_weights(model)
    assert packed_bytes(model) == 0
    assert model.again is model.inner[0]
    assert not model.head.weight.requires_grad, "as in a model that is served"
    found = model.state_dict()
    assert all(torch.equal(found[name], weights) for name, weights in before.state_dict().items())


@pytest.mark.parametrize(
    ("most_kept", "is_kept"), [(0, False), (packed_linear.MOST_KEPT_BYTES, True)]
)
def test_few_rows_are_multiplied_with_kept_weights(model, monkeypatch, most_kept, is_kept):
    """Those of a small model, and of an embedding, which exist anyway."""
    monkeypatch.setattr(packed_linear, "MOST_KEPT_BYTES", most_kept)
    before = copy.deepcopy(model)
    pack_weights(model, ONEDNN)
    assert (model.again.stored is not None) == is_kept
    assert model.head.stored.data_ptr() == model.embedding.weight.data_ptr()
    torch.manual_seed(1)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        states = torch.randn(1, rows, WIDTH)
        is_as_stored = torch.equal(model.head(states), before.head(states))
        assert is_as_stored == (rows <= FEW_ROWS)
        torch.testing.assert_close(model.head(states), before.head(states), rtol=1e-4, atol=1e-4)
    unpack_weights(model)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_no_weights_are_kept_where_packed_ones_are_faster(model):
    """With our kernel, and with oneDNN in narrower dtypes."""
    pack_weights(model, ProductKernel.load())
    assert model.again.stored is model.head.stored is None
    unpack_weights(model)
    if ONEDNN.why_unusable(CPU, torch.bfloat16):
        pytest.skip("this processor has no packed product of bfloat16")
    pack_weights(model.bfloat16(), ONEDNN)
    assert model.again.stored is model.head.stored is None


def test_weights_are_freed_before_the_next_layer_is_packed(model, monkeypatch, packing):
    monkeypatch.setattr(packed_linear, "MOST_KEPT_BYTES", 0)
    model.head = nn.Linear(WIDTH, WIDE, bias=False)  # no longer the embedding
    left = [weakref.ref(layer) for layer in (model.again, model.head)]
    alive = []

    class Counted(PackedLinear):
        def __init__(self, *args, **options):
            alive.append(sum(reference() is not None for reference in left))
            super().__init__(*args, **options)

    monkeypatch.setattr(packed_linear, "PackedLinear", Counted)
    pack_weights(model, packing)
    assert alive == [2, 1]


def test_layers_of_other_dtypes_are_left_as_they_are(model, packing):
    """As a router in another precision than the rest of its model."""
    model.head = nn.Linear(WIDTH, WIDE, dtype=torch.float64)
    pack_weights(model, packing)
    assert type(model.head) is nn.Linear
    assert type(model.again) is PackedLinear


def test_a_layer_with_hooks_is_not_packed(model, packing):
    model.head.register_forward_hook(lambda *_: None)
    pack_weights(model, packing)
    assert type(model.head) is nn.Linear
