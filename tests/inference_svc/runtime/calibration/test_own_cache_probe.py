"""The contents of a model's own cache are found by running it; unbounded ones are refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from inference_svc.runtime.calibration import own_cache_probe
from inference_svc.runtime.calibration.own_cache_probe import find_own_layers, own_recipes
from inference_svc.runtime.kv.own_layers import state_shapes
from inference_svc.runtime.kv.states import packed_bytes
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError


def describe(model):
    return describe_model(model, tokenizer=None, name="probed", fingerprint="0" * 32)


def test_entries_and_states_are_found(build):
    """Entries by their strides; windows, buffers and overlaps by their maximal size."""
    sliding, sparse, heavy = find_own_layers(describe(build("deepseek-v4")))
    assert [layer.row_width for layer in (sliding, sparse, heavy)] == [0, 16 // 4 + 8 // 4, 3]
    sizes = {tensor.part: (tensor.stride, tensor.shape) for tensor in sparse.tensors}
    assert sizes["keys", None] == (0, (1, 1, 9, 16))
    assert sizes["compressed_kv", "compressor"] == (4, (1, 1, 16))
    assert sizes["compressed_kv", "indexer"] == (4, (1, 1, 8))
    assert sizes["buffer_kv", "compressor"] == (0, (1, 3, 32))
    assert sizes["overlap_gate", "indexer"] == (0, (1, 4, 8))
    assert sparse.twins == ((("values", None), ("keys", None)),)
    assert set(heavy.numbers) == {("cumulative_length", None), ("entry_count", "compressor")}


def test_rows_of_all_layers_form_one_layer_of_the_layout(tiny):
    """With two components; the rest is the state."""
    calibration = tiny("deepseek-v4").calibration
    (layer,) = calibration.layout.layers
    assert [component.shape for component in layer.components] == [(1, 5), (1, 4)]
    shapes = state_shapes(calibration.own_layers)
    assert calibration.layout.state_bytes == packed_bytes(shapes) > 0
    assert calibration.state_shapes == shapes


def test_keys_and_values_are_entries_of_one_token(build):
    """A model supported by the hooks could be served this way, too."""
    layers = find_own_layers(describe(build("llama")))
    assert {tensor.stride for layer in layers for tensor in layer.tensors} == {1}
    (recipe,) = own_recipes(layers)
    assert recipe.shape.parts == ((1, 32), (1, 32))  # two layers, two heads, eight values, both


class _Growing:
    """A layer with a tensor that grows in an unusual way."""

    def __init__(self, size_of):
        self.kept, self._size_of, self.rate = None, size_of, 8

    def hold(self, num_tokens):
        self.kept = torch.ones(1, self._size_of(num_tokens), 2)


@pytest.mark.parametrize(
    ("size_of", "is_found"),
    [
        (lambda n: n // 8, True),
        (lambda n: n % 8, True),
        (lambda n: min(n, 7), True),
        (lambda n: n * 2, False),
        (lambda n: n // 5, False),
        (lambda n: n // 8 + 1, False),
    ],
)
def test_unusual_growth_is_refused(build, monkeypatch, size_of, is_found):
    """The tensor is neither an entry of some tokens nor bounded."""
    layer = _Growing(size_of)
    monkeypatch.setattr(
        own_cache_probe, "DynamicCache", lambda **_: SimpleNamespace(layers=[layer])
    )
    monkeypatch.setattr(
        own_cache_probe,
        "ForwardCall",
        lambda _model: lambda _ids, positions, *_: layer.hold(int(positions[0, -1]) + 1),
    )
    loaded = describe(build("llama"))
    if is_found:
        assert [tensor.part for tensor in find_own_layers(loaded)[0].tensors] == [("kept", None)]
    else:
        with pytest.raises(ModelModeMissingError, match="keeps kept, which"):
            find_own_layers(loaded)


def test_entries_that_change_later_are_refused(build, monkeypatch):
    """Rows of tokens are written once."""

    class Changing(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **options):
            found = super().update(keys, values, layer_idx, *args, **options)
            self.layers[layer_idx].keys = self.layers[layer_idx].keys + 1.0
            return found

    monkeypatch.setattr(own_cache_probe, "DynamicCache", Changing)
    with pytest.raises(ModelModeMissingError, match="keeps keys, which"):
        find_own_layers(describe(build("llama")))


def test_a_window_that_takes_too_long_to_fill_is_refused(build, monkeypatch):
    """Its behaviour afterwards cannot be observed."""
    monkeypatch.setattr(own_cache_probe, "MOST_TOKENS", 12)
    with pytest.raises(ModelModeMissingError, match="after 12 tokens"):
        find_own_layers(describe(build("deepseek-v4")))
