"""The size of a state and of a token's KV, from a config, as Transformers caches them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache

from kvd.plan.hardware import MODELS
from kvd.plan.model_config import (
    STATE_ALIGNMENT,
    ModelConfig,
    UnknownModelError,
    state_bytes,
    token_bytes,
)
from shared.types.units import align_up
from tests.sampled import sampled
from tests.zoo.architectures import Architecture
from tests.zoo.models import build_model

NUM_TOKENS = 9
MIXED = ["linear_attention", "full_attention"] * 2
# Mixtures of types whose tiny config has layers of one kind only.
CHANGED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid"),
    *("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "mamba2"),
    *("jamba", "zamba", "mamba", "falcon_mamba"),
    *("lfm2", "lfm2_moe"),
)
ALWAYS = ("qwen3_next", "nemotron_h", "jamba", "lfm2")  # one of each rule
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "dtype": "bfloat16",
    "max_position_embeddings": 262_144,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Compute on one thread; keep Transformers' advice about random models out of the report."""
    torch.set_num_threads(1)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def _config(fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(Path("config.json"), fields)


def _bytes_of(cache: Cache) -> tuple[int, int]:
    """Return the cached bytes per token, and in total, packed: a header, each tensor aligned."""
    of_token, of_state = 0, STATE_ALIGNMENT
    for layer in cache.layers:
        for name in ("keys", "values"):
            rows = getattr(layer, name, None)
            if rows is not None and rows.numel():
                of_token += rows.nbytes // rows.shape[-2]
        for name in ("conv_states", "recurrent_states"):
            for tensor in getattr(layer, name, {}).values():
                if tensor is not None:
                    of_state += align_up(tensor.nbytes, STATE_ALIGNMENT)
    return of_token, of_state


@pytest.mark.parametrize("name", sampled(HYBRIDS, 7, seed=2, always=ALWAYS))
def test_a_config_gives_the_size_of_the_cache(name, tmp_path: Path):
    """The bytes equal those of a real model's cache in bfloat16."""
    model = build_model(Architecture(name, name, CHANGED.get(name, {}))).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    cache = DynamicCache(config=model.config)
    argument = "cache_params" if name in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
    with torch.inference_mode():
        model(torch.arange(1, 1 + NUM_TOKENS)[None], use_cache=True, **{argument: cache})
    model.config.save_pretrained(tmp_path)
    config = _config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    of_token, of_state = _bytes_of(cache)
    assert of_state > STATE_ALIGNMENT
    assert (token_bytes(config).kept, state_bytes(config)) == (of_token, of_state)


def test_qwen3_next_keeps_72_mib_and_its_convolutions():
    """Every fourth of 48 layers attends: 24.6 KB per token. The published config names none."""
    config = _config(QWEN3_NEXT)
    assert token_bytes(config).kept == 12 * 2 * 2 * 256 * 2
    a_layer = 32 * 128 * 128 * 4 + 4 * (2 * 16 + 32) * 128 * 2
    assert state_bytes(config) == 64 + 36 * a_layer == MODELS["qwen3-next-80b"].state_bytes


def test_a_pattern_gives_the_layers_that_attend():
    """As older configs of nemotron_h have it: M scans, * attends, - and E do neither."""
    config = _config(
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M*E",
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "attention_head_dim": 64,
            "hidden_size": 256,
            "mamba_num_heads": 16,
            "mamba_head_dim": 32,
            "ssm_state_size": 128,
            "n_groups": 2,
            "conv_kernel": 4,
            "torch_dtype": "bfloat16",
        }
    )
    assert token_bytes(config).kept == 2 * 2 * 64 * 2
    assert state_bytes(config) == 64 + 2 * (16 * 32 * 128 * 4 + 4 * (16 * 32 + 2 * 2 * 128) * 2)


@pytest.mark.parametrize(
    ("fields", "kv_bytes"),
    [
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1}, 2),
        ({"model_type": "bamba", "attn_layer_indices": [0, 6, 7]}, 3),
        ({"model_type": "lfm2", "full_attn_idxs": [2]}, 1),
        ({"model_type": "falcon_h1"}, 8),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 7 + ["attention"]}, 1),
    ],
)
def test_other_fields_give_the_layers_that_attend(fields, kv_bytes):
    """So many of eight layers, each with two times 16 numbers of two bytes."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64}
    config = _config({"num_hidden_layers": 8, **sizes, **fields})
    assert token_bytes(config).kept == kv_bytes * 2 * 16 * 2


def test_models_with_attention_only_keep_no_state():
    """Whatever their layers are called."""
    kinds = ["sliding_attention", "full_attention", "chunked_attention", "indexed_attention"]
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    config = _config({"model_type": "gemma9", "layer_types": kinds, **sizes})
    assert (token_bytes(config).kept, state_bytes(config)) == (4 * 2 * 64 * 2, 0)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (QWEN3_NEXT | {"linear_conv_kernel_dim": None}, "no linear_conv_kernel_dim"),
        (QWEN3_NEXT | {"model_type": "qwen9", "layer_types": MIXED}, "linear_attention"),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, "recurrent"),
        ({"layer_types": ["sliding_attention", "compressed_sparse_attention"]}, "compressed"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "there is no layer_types"),
        ({"model_type": "zamba", "num_hidden_layers": 4}, "there is no layer_types"),
    ],
)
def test_states_of_unknown_size_are_refused(fields, complaint):
    """The line names the file and the remedy; sizes are not guessed."""
    with pytest.raises(UnknownModelError, match=complaint) as raised:
        state_bytes(_config(fields))
    assert "config.json" in str(raised.value)
    assert "--kv-bytes-per-token" in str(raised.value)


GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2560,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
OF_LAYER = 2 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("changed", "num_windowed"),
    [
        ({}, 29),
        ({"layer_types": ["sliding_attention", "full_attention"] * 17}, 17),
        # every layer: one in eight is not possible
        ({"layer_types": ["sliding_attention"] * 34}, 34 - 5),
        ({"layer_types": ["full_attention"] * 34}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 131_072}, 0),
        ({"sliding_window_pattern": None}, 0),
        ({"sliding_window_pattern": None, "model_type": "mistral"}, 34 - 5),
    ],
)
def test_layers_with_windows_are_counted(changed, num_windowed):
    """Where others have full attention: by a list of kinds, or every so many layers."""
    found = token_bytes(ModelConfig(Path("config.json"), {**GEMMA3, **changed}))
    assert found.kept == (34 - num_windowed) * OF_LAYER
    assert (found.windowed, found.window) == (num_windowed * OF_LAYER, 1024 * bool(num_windowed))
