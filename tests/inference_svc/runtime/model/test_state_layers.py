"""Models that look into their cache's layers for states are answered; for anything else refused."""

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.probe import Probe
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.capture import CaptureCache
from inference_svc.runtime.model.forward import under
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError

LAYER = 3
STATES = {
    StatePlace(LAYER, "conv", 1): torch.ones(1, 2, 4),
    StatePlace(LAYER, "recurrent", 0): torch.zeros(1, 2),
}


def cache_over(states):
    """Return a cache, and the block in which it is that of a sequence which has these states."""
    return CaptureCache(), under(Probe(64, torch.device("cpu"), given_states=states))


def test_states_are_found_in_a_layer():
    """Those of the sequence, by kind and number; a layer without one has none."""
    cache, forward = cache_over(STATES)
    with forward:
        layer = cache.layers[LAYER]
        assert layer.conv_states[1] is STATES[StatePlace(LAYER, "conv", 1)]
        assert layer.recurrent_states[0] is STATES[StatePlace(LAYER, "recurrent", 0)]
        assert layer.conv_states[0] is None
        assert cache.layers[0].conv_states[1] is None
        assert not layer.record_past


def test_anything_else_of_a_layer_is_refused():
    """And there are no layers to be counted."""
    cache, _ = cache_over({})
    assert len(cache.layers) == 0
    with pytest.raises(ModelModeMissingError, match="more in its cache's layers"):
        _ = cache.layers[LAYER].keys


@pytest.mark.parametrize("states", [{}, STATES], ids=["first tokens", "over states"])
def test_whether_there_are_states_is_told_as_it_was_before_the_forward(states):
    """Of a layer and of all, also when the layer has left some by now."""
    cache, forward = cache_over(states)
    with forward:
        cache.update_conv_state(torch.ones(1, 2, 5), LAYER, conv_kernel_size=4)
        for asked in ((), (LAYER,), (LAYER, 1)):
            assert cache.has_previous_state(*asked) == bool(states)


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_a_model_that_looks_there_is_served_as_one_that_asks(build, tiny, monkeypatch, name):
    """On every path that calibration proves: mixed steps, batches that decode, loads."""

    def conv_state(cache, layer_idx, state_idx=0):
        has_states = cache.has_previous_state(layer_idx, state_idx)
        return cache.layers[layer_idx].conv_states[state_idx] if has_states else None

    def recurrent_state(cache, layer_idx, state_idx=0):
        has_states = cache.has_previous_state()
        return cache.layers[layer_idx].recurrent_states[state_idx] if has_states else None

    expected = tiny(name).calibration
    monkeypatch.setattr(CaptureCache, "get_conv_state", conv_state)
    monkeypatch.setattr(CaptureCache, "get_recurrent_state", recurrent_state)
    loaded = describe_model(build(name), tokenizer=None, name=name, fingerprint="0" * 32)
    found = calibrate(loaded)
    assert (found.mode, found.state_shapes) == (expected.mode, expected.state_shapes)
