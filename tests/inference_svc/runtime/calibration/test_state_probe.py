"""Recurrent layers' states are found by running them; unbounded ones are refused."""

from types import SimpleNamespace

import pytest
import torch

from inference_svc.runtime.calibration.mode_probe import probe_mode
from inference_svc.runtime.calibration.state_probe import find_states
from inference_svc.runtime.kv.states import packed_bytes
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelRecurrentError


def describe_and_probe(model):
    """Return a model's description, and its probe in mode single."""
    loaded = describe_model(model, tokenizer=None, name="probed", fingerprint="0" * 32)
    capture.install(model)
    return loaded, probe_mode(loaded, "single", "eager")


def test_a_hybrid_keeps_states_beside_the_kv_of_its_attention(tiny):
    """Layers that cache KV are numbered consecutively, states have the model's own numbers."""
    calibration = tiny("qwen3-next").calibration
    assert (calibration.mode, calibration.positions) == ("ragged", "coupled")
    assert len(calibration.layers) == len(calibration.layout.layers) == 1  # of two
    shapes = calibration.state_shapes
    assert [(shape.layer_index, shape.kind) for shape in shapes] == [(0, "conv"), (0, "recurrent")]
    assert calibration.layout.state_bytes == packed_bytes(shapes) > 0
    assert not calibration.is_one_by_one


def test_tokens_may_be_a_state(tiny):
    """An n-gram embedding keeps ids of the last tokens, as integers."""
    shapes = tiny("qwen4-exp").calibration.state_shapes
    kept = [shape for shape in shapes if shape.dtype == torch.int64]
    assert [(shape.layer_index, shape.index, shape.shape) for shape in kept] == [
        (0, 2, (1, 2)),
        (2, 2, (1, 2)),
    ]


def test_a_purely_recurrent_model_has_one_layer_without_components(tiny):
    """A slot has room for a state."""
    calibration = tiny("mamba").calibration
    assert calibration.mode == "ragged"
    assert [layer.components for layer in calibration.layout.layers] == [()]
    assert {shape.layer_index for shape in calibration.state_shapes} == {0, 1}
    assert calibration.layout.block_bytes >= calibration.layout.state_bytes
    assert calibration.is_one_by_one  # its scan begins with zeros, whatever its state is


def test_an_attention_model_has_no_states(tiny):
    """Its layout does not change."""
    calibration = tiny("llama").calibration
    assert (calibration.state_shapes, calibration.layout.state_bytes) == ((), 0)


def test_changes_in_place_are_found(build):
    """Convolutions always count as changed in place; Mamba's sum is by its decoding."""
    shapes = find_states(*describe_and_probe(build("mamba")))
    assert all(shape.is_overwritten for shape in shapes)
    hybrid = find_states(*describe_and_probe(build("qwen3-next")))
    assert [shape.is_overwritten for shape in hybrid] == [True, False]


def test_states_that_grow_with_the_tokens_are_refused(build):
    """They cannot be stored in slots."""
    loaded, probe = describe_and_probe(build("qwen3-next"))
    place = next(iter(probe.states))
    grown = torch.cat((probe.states[place],) * 2, -1)
    longer = SimpleNamespace(states={**probe.states, place: grown})
    with pytest.raises(ModelRecurrentError, match="grow with"):
        find_states(loaded, longer)
