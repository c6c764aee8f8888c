"""Calibration describes a model's KV, or refuses it with the reason."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.installation import SHIPPED_MODEL
from inference_svc.runtime.calibration.calibration import calibrate, calibration_by
from inference_svc.runtime.model import packing
from inference_svc.runtime.model.capture import ATTENTION_NAME
from inference_svc.runtime.model.model_loader import UNSTATED_WINDOW, describe_model, load_model
from inference_svc.runtime.model.packed_linear import packed_bytes, packing_of
from shared.types.errors import ConfigError


def calibrate_model(model, positions="auto"):
    loaded = describe_model(model, tokenizer=None, name="tiny", fingerprint="f" * 32)
    return calibrate(loaded, positions)


@pytest.mark.parametrize(
    ("name", "mode", "positions"),
    [
        ("llama", "ragged", "decoupled"),
        ("gpt2", "ragged", "coupled"),
        ("opt", "ragged", "coupled"),
        ("deepseek-v3", "latent", "decoupled"),
        ("deepseek-v32", "indexed", "decoupled"),
        ("diffllama", "gather", "decoupled"),
        ("falcon", "masked", "decoupled"),
        ("gptj", "masked", "decoupled"),
        ("codegen", "masked", "decoupled"),
        ("mpt", "masked", "decoupled"),
        ("qwen4-exp", "masked", "coupled"),
        ("bloom", "single", "decoupled"),
        ("falcon-rw", "single", "decoupled"),
        ("gpt-neo", "single", "coupled"),
        ("llama4", "single", "decoupled"),
        ("recurrent-gemma", "ragged", "coupled"),
        ("deepseek-v4", "own", "coupled"),
    ],
)
def test_the_first_proven_mode_is_used(tiny, name, mode, positions):
    """Mode and positions are found by running the model; each skipped mode has its reason."""
    calibration = tiny(name).calibration
    assert (calibration.mode, calibration.positions) == (mode, positions)
    assert calibration.layout.position_mode == positions
    if mode != "masked":  # attention that cannot be replaced leaves nothing to try before
        assert bool(calibration.notes) == ((mode, positions) != ("ragged", "decoupled"))


def test_a_calibrated_model_has_no_probes():
    """Their records would grow with every step."""
    loaded = load_model(SHIPPED_MODEL)
    calibrate(loaded)
    watched = [name for name, module in loaded.model.named_modules() if module._forward_hooks]
    assert watched == []


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_the_shipped_model_uses_the_fast_mode(dtype):
    """Rounding in 16 bits is not taken for an error."""
    calibration = calibrate(load_model(SHIPPED_MODEL, dtype))
    assert (calibration.mode, calibration.positions) == ("ragged", "decoupled")
    assert calibration.notes == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "model_encoder"),
        ("openai-gpt", "model_uncached"),
    ],
)
def test_models_that_cannot_be_served_are_refused(build, name, reason):
    """In one line with the reason."""
    with pytest.raises(UnsupportedModelError) as refused:
        calibrate_model(build(name))
    assert refused.value.reason == reason
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


def test_a_model_that_stores_all_tokens_in_its_modules_is_refused(build):
    """They are no state: their size is not fixed."""

    class Hoarding(RecurrentGemmaRglru):
        def forward(self, *args, **options):
            self.hoard = super().forward(*args, **options)
            return self.hoard

    model = build("recurrent-gemma")
    for module in model.modules():
        if isinstance(module, RecurrentGemmaRglru):
            module.__class__ = Hoarding
    with pytest.raises(UnsupportedModelError, match="grow with the number of tokens") as refused:
        calibrate_model(model)
    assert refused.value.reason == "model_recurrent"


def test_impossible_positions_are_refused(build):
    """A model with absolute positions cannot be decoupled; the error names the possible ones."""
    with pytest.raises(UnsupportedModelError, match=r"ragged decoupled.*absolute") as refused:
        calibrate_model(build("gpt2"), "decoupled")
    assert refused.value.reason == "model_positions_coupled"
    assert "coupled" in refused.value.remedy


def test_a_model_without_a_mode_gets_the_reason_for_each(build):
    """In one line."""

    class Surprising(type(build("llama"))):
        def forward(self, *args, past_key_values=None, **options):
            if past_key_values is not None:
                raise RuntimeError("no cache today")
            return super().forward(*args, **options)

    model = build("llama")
    model.__class__ = Surprising
    with pytest.raises(UnsupportedModelError, match=r"ragged.*single.*no cache today") as refused:
        calibrate_model(model)
    assert refused.value.reason == "model_mode_missing"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("positions", ["coupled", "naive"])
@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_rows_are_stored_as_cached_on_request(build, name, positions):
    """Coupled and naive rows have no recipe, and are other KV than decoupled ones."""
    calibration = calibrate_model(build(name), positions)
    assert calibration.layout.position_mode == positions
    assert all(part.rotary is None for layer in calibration.layers for part in layer.components)
    assert calibration.layout.fingerprint != calibrate_model(build(name)).layout.fingerprint


def test_small_context_window_is_refused(build):
    """There is no room for probes."""
    with pytest.raises(UnsupportedModelError, match="context window of 16"):
        calibrate_model(build("llama", max_position_embeddings=16))


def test_a_model_without_a_stated_window_gets_a_moderate_one(build):
    """A model whose config names no window gets a moderate one."""
    model = build("bloom", seq_length=..., max_position_embeddings=...)
    loaded = describe_model(model, tokenizer=None, name="tiny", fingerprint="f" * 32)
    assert loaded.context_window == UNSTATED_WINDOW


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


def test_chunks_come_from_the_mask(build):
    """Chunked attention is found where nothing else stands in the way of batches."""
    calibration = calibrate_model(build("llama4", attn_temperature_tuning=False))
    assert calibration.mode == "ragged"
    assert [call.chunk for call in calibration.attention_calls] == [16, None]


def test_layers_without_position_have_no_rotary(tiny):
    """A NoPE layer's stored key is its key, and the layout says so."""
    calibration = tiny("smollm3").calibration
    assert [layer.key.rotary is None for layer in calibration.layers] == [False, True]
    assert [bool(layer.components[0].rotary) for layer in calibration.layout.layers] == [
        True,
        False,
    ]


def test_layout_is_the_same_each_time(build):
    """Calibrations of equal models, as around a restart, have one layout fingerprint."""
    layouts = [calibrate_model(build("llama")).layout for _ in range(2)]
    assert layouts[0].fingerprint == layouts[1].fingerprint
    assert layouts[0].model == "f" * 32
    assert layouts[0].layers[0].components[0].shape == (2, 8)


def test_dtype_changes_the_layout(build):
    """KV of another dtype is other KV."""
    single = calibrate_model(build("llama")).layout
    half = calibrate_model(build("llama").to(torch.bfloat16)).layout
    assert single.fingerprint != half.fingerprint
    assert half.layers[0].components[1].dtype == "bfloat16"


def test_calibrating_twice_is_harmless(build):
    """For example by a second service in the same process."""
    loaded = describe_model(build("llama"), tokenizer=None, name="tiny", fingerprint="0")
    assert calibrate(loaded).layout == calibrate(loaded).layout


def test_a_chunk_counts_as_a_window_of_its_length(tiny):
    """Its last token sees all of it, and none sees more."""
    layout = tiny("llama4-ragged", has_windows=True).calibration.layout
    assert [layer.window for layer in layout.layers] == [16, 0]


def test_if_all_layers_have_a_window_some_count_as_without(build):
    """Blocks of tokens must not be empty."""
    loaded = describe_model(
        build("mistral", num_hidden_layers=10), tokenizer=None, name="tiny", fingerprint="0"
    )
    layout = calibrate(loaded).layout
    assert [layer.window for layer in layout.layers] == [0, *[7] * 7, 0, 7]
    assert layout.window == 7


@pytest.mark.parametrize(("choice", "name"), [("auto", "cpp"), ("torch", "torch"), ("off", "")])
def test_packed_weights_are_used_and_proven(choice, name):
    loaded = load_model(SHIPPED_MODEL, "float32")
    assert calibrate(loaded, packing=choice).mode == "ragged"
    assert packing_of(loaded.model) == name
    assert bool(packed_bytes(loaded.model)) == bool(name)


class _ChoosyMlp(LlamaMLP):
    """Wants layers of torch's own class."""

    def forward(self, x):
        return super().forward(x) if isinstance(self.gate_proj, torch.nn.Linear) else x


def test_weights_stay_where_packed_ones_change_the_logits(monkeypatch):
    # this model's layers are small
    monkeypatch.setattr(packing, "MIN_WEIGHTS_ONEDNN_FLOAT32", 2**16)
    loaded = load_model(SHIPPED_MODEL, "float32")
    head = loaded.model.lm_head.weight.clone()
    loaded.model.model.layers[0].mlp.__class__ = _ChoosyMlp
    calibrate(loaded, packing="auto")
    assert not packed_bytes(loaded.model)
    assert torch.equal(loaded.model.lm_head.weight, head)
    with pytest.raises(ConfigError, match=r"packed_weights = cpp .* answers differ"):
        calibrate(loaded, packing="cpp")


def test_a_named_mode_is_used_without_a_proof(build):
    """It was proven before: the calibration is equal, and the model uses its attention."""
    proven = calibrate_model(build("llama"))
    loaded = describe_model(build("llama"), tokenizer=None, name="tiny", fingerprint="f" * 32)
    again = calibration_by(loaded, proven.mode, ATTENTION_NAME, proven.positions, proven.notes)
    assert loaded.model.config._attn_implementation == ATTENTION_NAME
    assert (again.mode, again.positions, again.notes) == (
        proven.mode,
        proven.positions,
        proven.notes,
    )
    assert again.layout == proven.layout
