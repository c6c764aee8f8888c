"""Shapes by name, and models of them."""

import pytest
import torch

from inference_svc.bench.options import ModelChoice
from inference_svc.bench.random_model import (
    PRESETS,
    Shape,
    UnknownPresetError,
    chosen_model,
    preset,
)
from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.calibration.calibration import calibrate
from shared.measuring.workspace import NoRoomError

TINY = ModelChoice(random="4x256", layers=1)


@pytest.mark.parametrize(
    ("name", "billions", "mebibytes"),
    [
        # Weights by their names; KV per token in 16 bits as in the paper.
        ("llama-13b", 13.0, 0.78),
        ("llama-65b", 65.3, 2.5),
        ("llama-70b", 69.0, 0.31),
        ("falcon-40b", 41.5, 0.117),
        ("mistral-7b", 7.2, 0.125),
    ],
)
def test_a_preset_has_the_weights_and_the_kv_of_its_model(name, billions, mebibytes):
    shape = preset(name)
    assert shape.num_weights / 1e9 == pytest.approx(billions, rel=0.02)
    kv_bytes = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert kv_bytes / 2**20 == pytest.approx(mebibytes, rel=0.02)


@pytest.mark.parametrize("shape", PRESETS.values())
def test_heads_divide_the_hidden_size_and_their_groups(shape):
    assert shape.hidden % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0


def test_a_preset_may_have_fewer_layers():
    assert preset("llama-13b", 3).layers == 3
    assert preset("llama-13b").layers == 40


@pytest.mark.parametrize(("name", "layers"), [("llama-1t", 0), ("4x256", 5), ("4x256", -1)])
def test_unknown_presets_are_refused(name, layers):
    with pytest.raises(UnknownPresetError):
        preset(name, layers)


def test_a_random_model_has_the_shape_positions_and_weights_of_its_preset():
    loaded = chosen_model(TINY, window_tokens=5000)
    assert loaded.context_window == 5000
    assert loaded.dtype == torch.float32
    assert not loaded.eos_ids
    num_weights = sum(part.numel() for part in loaded.model.parameters())
    assert num_weights == Shape(1, 256, 4, 4, 704, 8192).num_weights


def test_one_preset_keeps_latents():
    shape = preset("latent-4x512", 1)
    loaded = chosen_model(ModelChoice(random="latent-4x512", layers=1), 10)
    assert sum(part.numel() for part in loaded.model.parameters()) == shape.num_weights
    assert calibrate(loaded).layers[0].shape.parts == ((1, 512), (1, 64))


def test_a_short_run_gets_positions_to_spare():
    assert chosen_model(TINY, window_tokens=10).context_window == 4096


def test_the_same_seed_is_the_same_model_and_another_seed_another():
    first, same = chosen_model(TINY, 10), chosen_model(TINY, 10)
    other = chosen_model(ModelChoice(random="4x256", layers=1, seed=1), 10)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    weights = [next(loaded.model.parameters()) for loaded in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_that_does_not_fit_is_refused_before_it_is_built():
    with pytest.raises(NoRoomError, match="--layers"):
        chosen_model(ModelChoice(random="llama-65b", dtype="float32"), 10)


@pytest.mark.parametrize("choice", [ModelChoice(), ModelChoice(path="x", random="4x256")])
def test_exactly_one_model_is_measured(choice):
    with pytest.raises(UnknownModelError):
        chosen_model(choice, 10)


def test_a_directory_with_too_few_positions_is_refused(tiny_model):
    choice = ModelChoice(path=tiny_model)
    assert chosen_model(choice, 100).vocab_size
    with pytest.raises(UnsupportedModelError, match="positions"):
        chosen_model(choice, 1_000_000)
