"""The number of attention sinks of a model is found by running it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.installation import SHIPPED_MODEL
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.sinks import CANDIDATES, TEXT, find_sinks, sink_distances
from inference_svc.runtime.model.model_loader import load_model


@pytest.fixture(scope="module")
def leaning(sink_model):
    """A model with a sink, loaded and calibrated."""
    loaded = load_model(sink_model)
    return loaded, calibrate(loaded)


def test_a_model_with_a_sink_keeps_it(leaning):
    """Without it the predictions change; more than four do not help."""
    loaded, calibration = leaning
    assert find_sinks(loaded, calibration) == USUAL_SINKS
    token_ids = loaded.tokenizer(TEXT).input_ids[:240]
    far = dict(zip(CANDIDATES, sink_distances(loaded, calibration, token_ids), strict=True))
    assert far[0] > 4 * far[4]
    assert far[16] == pytest.approx(far[4], rel=0.5)


def test_a_sink_is_found_in_its_place(leaning):
    """A text that does not begin with it has none to lose."""
    loaded, calibration = leaning
    token_ids = loaded.tokenizer(TEXT).input_ids[1:240]
    far = sink_distances(loaded, calibration, token_ids)
    assert far[0] == min(far)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_shipped_model_has_no_sink(dtype):
    """No token is kept without need."""
    loaded = load_model(SHIPPED_MODEL, dtype)
    assert find_sinks(loaded, calibrate(loaded)) == 0


def test_a_model_without_a_tokenizer_is_measured_with_ids(tiny):
    """Any ids: random weights have no sinks."""
    model = tiny("llama")
    assert model.loaded.tokenizer is None
    assert find_sinks(model.loaded, model.calibration) == 0


def test_tokens_unknown_to_the_model_are_left_out(tiny):
    """A tokenizer may have more tokens than the model has embeddings."""
    model = tiny("llama")
    size = model.loaded.vocab_size
    encoded = SimpleNamespace(input_ids=[*range(3, size + 3)] * 3)
    loaded = replace(model.loaded, tokenizer=lambda text, **_: encoded)
    assert find_sinks(loaded, model.calibration) == 0


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v32", "falcon", "bloom", "llama4", "gpt2"]
)
def test_every_mode_is_measured(tiny, name):
    """Over gathered rows, under a mask of ours, one sequence at a time; or taken as usual."""
    model = tiny(name)
    found = find_sinks(model.loaded, model.calibration)
    assert found in CANDIDATES
    assert found == USUAL_SINKS or model.calibration.positions == "decoupled"


def test_a_constant_model_needs_no_sinks(tiny_model):
    """Distances are then rounding errors around zero."""
    loaded = load_model(tiny_model)
    calibration = calibrate(loaded)
    token_ids = loaded.tokenizer(TEXT).input_ids[:240]
    least = []
    for seed in range(20):  # rounding depends on the processor and its threads
        torch.manual_seed(seed)
        loaded.model.lm_head.weight.uniform_(-1e-5, 1e-5)
        least.append(min(sink_distances(loaded, calibration, token_ids)))
        assert find_sinks(loaded, calibration) == 0
    assert min(least) < 0


@pytest.mark.parametrize("change", ["coupled", "short window", "no numbers"])
def test_without_a_result_the_usual_number_is_used(leaning, tiny_model, change):
    """Rows that void each other, too few tokens, answers that are NaN."""
    loaded, calibration = leaning
    if change == "coupled":
        assert find_sinks(loaded, replace(calibration, positions="coupled")) == USUAL_SINKS
    elif change == "short window":
        assert find_sinks(replace(loaded, context_window=79), calibration) == USUAL_SINKS
    else:
        broken = load_model(tiny_model)
        found = calibrate(broken)
        assert find_sinks(broken, found) == 0
        broken.model.lm_head.weight.fill_(float("nan"))
        assert find_sinks(broken, found) == USUAL_SINKS
