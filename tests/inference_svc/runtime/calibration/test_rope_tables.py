"""Frequencies that depend on the length are frozen for the window, in any order of requests."""

import copy

import pytest
import torch

from inference_svc.runtime.calibration.layer_recipes import layer_recipes
from inference_svc.runtime.calibration.probe import run_probe
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import RopeVariesError

WINDOW = 192
ORIGINAL = 48
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"longrope": LONGROPE, "dynamic": DYNAMIC}


def describe(model, window=WINDOW):
    loaded = describe_model(model, tokenizer=None, name="tiny", fingerprint="0" * 32)
    return type(loaded)(**{**vars(loaded), "context_window": window})


def varying(build, name):
    """Build a model whose frequencies vary within WINDOW tokens."""
    trained = ORIGINAL if name == "dynamic" else WINDOW
    return build("llama", rope_parameters=ROPES[name], max_position_embeddings=trained)


def logits(model, length, first=3):
    token_ids = torch.tensor([[(first + 7 * i) % 97 for i in range(length)]])
    with torch.inference_mode():
        return model(input_ids=token_ids, use_cache=False).logits[0]


@pytest.mark.parametrize("name", ROPES)
def test_frozen_models_do_not_depend_on_earlier_requests(build, name):
    """A short prompt has the same logits before and after a long one, and within one."""
    model = varying(build, name)
    stock = copy.deepcopy(model).eval()
    assert freeze_rotary(describe(model)) == (name,)
    before = logits(model, 20)
    long = logits(model, WINDOW)
    assert torch.equal(logits(model, 20), before)
    torch.testing.assert_close(long[:20], before, rtol=1e-5, atol=1e-5)
    assert (logits(stock, WINDOW)[:20] - logits(stock, 20)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_the_longest_sequence(build, name):
    """A frozen model computes a sequence that fills the window as the stock one does."""
    model = varying(build, name)
    expected = logits(copy.deepcopy(model).eval(), WINDOW)
    freeze_rotary(describe(model))
    assert torch.equal(logits(model, WINDOW), expected)


def test_short_windows_keep_the_short_factors(build):
    """Longrope within its original length has the original frequencies."""
    model = varying(build, "longrope")
    expected = logits(copy.deepcopy(model).eval(), ORIGINAL)
    freeze_rotary(describe(model, window=ORIGINAL))
    assert torch.equal(logits(model, ORIGINAL), expected)


@pytest.mark.parametrize("name", ROPES)
def test_tables_agree_with_frozen_modules(build, name):
    """Recipes need frozen frequencies."""
    model = varying(build, name)
    capture.install(model)
    loaded = describe(model)
    model.set_attn_implementation(capture.PROBE_ATTENTION_NAME)
    token_ids = list(range(5, 22))
    with pytest.raises(RopeVariesError):
        layer_recipes(loaded, run_probe(model, token_ids, WINDOW))
    freeze_rotary(loaded)
    recipes = layer_recipes(loaded, run_probe(model, token_ids, WINDOW))
    assert all(recipe.key.rotary is not None for recipe in recipes)


def test_only_varying_layer_types_are_frozen(build):
    """For models with a rotary embedding per kind of layer."""
    by_type = {"sliding_attention": PLAIN, "full_attention": LONGROPE}
    model = build("gemma3", rope_parameters=by_type)
    expected = logits(copy.deepcopy(model).eval(), WINDOW)
    assert freeze_rotary(describe(model)) == ("longrope",)
    short = logits(model, 20)
    assert torch.equal(logits(model, WINDOW), expected)
    assert torch.equal(logits(model, 20), short)


def test_other_models_are_not_changed(build):
    """Fixed frequencies stay, and freezing again does nothing."""
    assert freeze_rotary(describe(build("llama-yarn"))) == ()
    frozen = describe(varying(build, "longrope"))
    freeze_rotary(frozen)
    assert freeze_rotary(frozen) == ()
