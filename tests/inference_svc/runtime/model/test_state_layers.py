"""Models that read states from their cache's layers get them; other reads are refused."""

from weakref import ref

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.probe import Probe
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.capture import CaptureCache
from inference_svc.runtime.model.forward import forward_context
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError

LAYER = 3
STATES = {
    StatePlace(LAYER, "conv", 1): torch.ones(1, 2, 4),
    StatePlace(LAYER, "recurrent", 0): torch.zeros(1, 2),
}


def cache_over(states):
    """Return a cache, and a block in which it has the states of a sequence."""
    return CaptureCache(), forward_context(Probe(64, torch.device("cpu"), given_states=states))


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


class HistoryOf7(Probe):
    """A forward behind seven tokens."""

    def history_positions(self):
        return torch.arange(7)


@pytest.mark.parametrize("leading", [(1,), (3, 1)], ids=["counted once", "in three dimensions"])
def test_positions_have_the_dimensions_of_later_ones(leading):
    """A layer or the cache is asked for them; assignments to them are ignored."""
    cache, new = CaptureCache(), torch.arange(7, 9).expand(*leading, 2)
    with forward_context(HistoryOf7(64, torch.device("cpu"))):
        cache.layers[LAYER].indexer_position_ids = new
        cache.position_ids = new
        for before in (cache.layers[LAYER].indexer_position_ids, cache.position_ids):
            joined = torch.cat([before, new], dim=-1)
            assert type(joined) is torch.Tensor
            assert torch.equal(joined, torch.arange(9).expand(*leading, 9))
            assert (before + 1).tolist() == list(range(1, 8))


def test_a_layer_is_as_long_as_its_cache():
    """Also if the cache asks its layers, as with Recurrent Gemma in 5.17."""
    cache = CaptureCache(claimed_tokens=7)
    with forward_context(Probe(64, torch.device("cpu"))):
        cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), LAYER)
    cache.get_seq_length = lambda *_: cache.layers[LAYER].get_seq_length()
    cache.get_mask_sizes = lambda length, _: cache.layers[LAYER].get_mask_sizes(length)
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (10, (10, 0))
    assert cache.layers[0].get_seq_length() == 7


def test_a_cache_is_freed_without_the_garbage_collector():
    """There is one per step; its layers become useless with it."""
    cache = CaptureCache()
    layers, gone = cache.layers, ref(cache)
    del cache
    assert gone() is None
    with pytest.raises(AssertionError, match="no more"):
        _ = layers[LAYER]


def test_before_the_first_token_there_is_no_state():
    """A layer has none then, and the cache lacks the attribute."""
    cache, forward = cache_over({})
    with forward:
        assert cache.layers[LAYER].indexer_position_ids is None
        assert not hasattr(cache, "position_ids")


def test_other_attributes_of_a_layer_are_refused():
    """And the layers cannot be counted."""
    cache, _ = cache_over({})
    assert len(cache.layers) == 0
    with pytest.raises(ModelModeMissingError, match="more than keys, values and states"):
        _ = cache.layers[LAYER].keys


@pytest.mark.parametrize("states", [{}, STATES], ids=["first tokens", "over states"])
def test_the_presence_of_states_is_that_before_the_forward(states):
    """Of a layer and of all, even if the layer has stored some by now."""
    cache, forward = cache_over(states)
    with forward:
        cache.update_conv_state(torch.ones(1, 2, 5), LAYER, conv_kernel_size=4)
        for asked in ((), (LAYER,), (LAYER, 1)):
            assert cache.has_previous_state(*asked) == bool(states)


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_a_model_that_reads_layers_is_served_like_one_that_asks(build, tiny, monkeypatch, name):
    """On every proven path: mixed steps, decoding batches, loads."""

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
