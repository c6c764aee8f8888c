"""Calibration describes a model's KV, or refuses it with the reason."""

import pytest
import torch

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.model.calibration import calibrate
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.proof import prove, stock_logits
from inference_svc.runtime.model.refusals import CalibrationMismatchError


def calibrated(model):
    return calibrate(describe_model(model, tokenizer=None, name="tiny", fingerprint="f" * 32))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "model_not_rotary"),
        ("opt", "model_not_rotary"),
        ("bloom", "model_mode_missing"),
        ("falcon", "model_mode_missing"),
        ("gptj", "model_mode_missing"),
        ("deepseek-v3", "model_mode_missing"),
        ("mamba", "model_recurrent"),
        ("llama-longrope", "rope_depends_on_length"),
    ],
)
def test_models_that_cannot_be_served_are_refused(build, name, reason):
    """A model of another kind is refused in one line that says why."""
    with pytest.raises(UnsupportedModelError) as refused:
        calibrated(build(name))
    assert refused.value.reason == reason
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


def test_small_context_window_is_refused(build):
    """A config whose context window leaves nothing to probe with is refused."""
    with pytest.raises(UnsupportedModelError, match="context window of 16"):
        calibrated(build("llama", max_position_embeddings=16))


def test_windows_come_from_the_model(tiny):
    """Sliding windows are found per attention call, also where only the mask knows them."""
    windows = {
        name: [call.window for call in tiny(name).calibration.attention_calls]
        for name in ("llama", "mistral", "gemma3", "phimoe")
    }
    assert windows == {
        "llama": [None, None],
        "mistral": [7, 7],
        "gemma3": [7, None],
        "phimoe": [7, 7],
    }


def test_layers_without_position_have_no_rotary(tiny):
    """A NoPE layer's stored key is its key, and the layout says so."""
    calibration = tiny("smollm3").calibration
    assert [layer.rotary is None for layer in calibration.layers] == [False, True]
    assert [bool(layer.components[0].rotary) for layer in calibration.layout.layers] == [
        True,
        False,
    ]


def test_layout_is_the_same_each_time(build):
    """Calibrations of equal models, as around a restart, have one layout fingerprint."""
    layouts = [calibrated(build("llama")).layout for _ in range(2)]
    assert layouts[0].fingerprint == layouts[1].fingerprint
    assert layouts[0].model == "f" * 32
    assert layouts[0].layers[0].components[0].shape == (2, 8)


def test_dtype_changes_the_layout(build):
    """KV of another dtype is other KV."""
    single = calibrated(build("llama")).layout
    half = calibrated(build("llama").to(torch.bfloat16)).layout
    assert single.fingerprint != half.fingerprint
    assert half.layers[0].components[1].dtype == "bfloat16"


def test_calibrating_twice_is_harmless(build):
    """A model may be calibrated again, as by a second service in the same process."""
    loaded = describe_model(build("llama"), tokenizer=None, name="tiny", fingerprint="0")
    assert calibrate(loaded).layout == calibrate(loaded).layout


def test_wrong_logits_are_refused(tiny):
    """If our logits differ from the reference, the path that went wrong is named."""
    model = tiny("llama")
    reference = stock_logits(model.loaded)
    model.loaded.model.set_attn_implementation("cachedattention")
    prove(model.loaded, model.calibration, reference)
    with pytest.raises(CalibrationMismatchError, match="prefill of LlamaForCausalLM"):
        prove(model.loaded, model.calibration, reference.roll(1, dims=0))
