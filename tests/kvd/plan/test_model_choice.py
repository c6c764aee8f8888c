"""KV bytes per token, by name or from a model directory."""

import json
from pathlib import Path

import pytest

from kvd.plan.model_choice import UnknownModelError, choose_model

LLAMA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def _directory(path: Path, config: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def _without(*names):
    return {name: value for name, value in LLAMA.items() if name not in names}


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("llama-13b", 0.78), ("llama-65b", 2.5), ("llama-70b", 0.31), ("falcon-40b", 0.12)],
)
def test_models_of_the_paper_have_its_sizes(name, megabytes):
    """§4.2, as it writes them."""
    assert choose_model(name, None, 0).kv_bytes_per_token == pytest.approx(megabytes * 1e6)


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        (LLAMA, 2 * 4 * 2 * 64 * 2),
        (LLAMA | {"head_dim": 128}, 2 * 4 * 2 * 128 * 2),
        (LLAMA | {"dtype": "float32"}, 2 * 4 * 2 * 64 * 4),
        (_without("dtype") | {"torch_dtype": "torch.float16"}, 2 * 4 * 2 * 64 * 2),
        (_without("num_key_value_heads"), 2 * 4 * 8 * 64 * 2),
        (_without("num_key_value_heads") | {"multi_query": True}, 2 * 4 * 1 * 64 * 2),
        ({"text_config": LLAMA, "vision_config": {"num_hidden_layers": 9}}, 2 * 4 * 2 * 64 * 2),
    ],
)
def test_a_directory_gives_the_size_of_a_token(tmp_path: Path, config, kv_bytes):
    """Two vectors per layer and KV head, of the head's width."""
    model = choose_model(_directory(tmp_path / "model", config), None, 0)
    assert (model.name, model.kv_bytes_per_token, model.window_tokens) == ("model", kv_bytes, 2048)


def test_options_override_the_model():
    """Size and window of the command line are used; without a model, nothing else is known."""
    model = choose_model("llama-13b", 1000, 512)
    assert (model.kv_bytes_per_token, model.window_tokens) == (1000, 512)


HYBRID = LLAMA | {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
}


def test_a_directory_gives_the_size_of_a_state(tmp_path: Path):
    """Only one of the four layers has keys; an option overrides the config."""
    name = _directory(tmp_path / "model", HYBRID)
    model = choose_model(name, None, 0)
    assert (model.kv_bytes_per_token, model.state_bytes) == (2 * 2 * 64 * 2, 64 + 3 * 512 * 3 * 2)
    assert choose_model(name + "/config.json", None, 0) == model
    assert choose_model(name, None, 0, 0).state_bytes == 0
    assert choose_model("qwen3-next-80b", None, 0).state_bytes == 77_856_832
    unknown = _directory(tmp_path / "other", HYBRID | {"model_type": "lfm9"})
    with pytest.raises(UnknownModelError, match="it is not known how much its conv layers keep"):
        choose_model(unknown, None, 0)
    with pytest.raises(UnknownModelError, match="it is not known how much its conv layers keep"):
        choose_model(unknown, None, 0, 72)
    model = choose_model(unknown, 1000, 0, 72)
    assert (model.kv_bytes_per_token, model.window_tokens, model.state_bytes) == (1000, 2048, 72)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"num_hidden_layers": 4}, "no num_attention_heads"),
        (_without("num_hidden_layers"), "no num_hidden_layers"),
        (LLAMA | {"kv_lora_rank": 512}, "latents"),
        ([], "contains no JSON object"),
    ],
)
def test_a_directory_without_the_sizes_is_refused(tmp_path: Path, config, complaint):
    """The line names the file and the remedy."""
    with pytest.raises(UnknownModelError) as raised:
        choose_model(_directory(tmp_path / "model", config), None, 0)
    assert complaint in str(raised.value)
    assert "--kv-bytes-per-token" in str(raised.value)


def test_an_unknown_name_is_refused(tmp_path: Path):
    """The line lists the known ones."""
    with pytest.raises(UnknownModelError, match="llama-13b, llama-65b"):
        choose_model(str(tmp_path / "gpt"), None, 0)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UnknownModelError, match="cannot be read as JSON"):
        choose_model(str(tmp_path), None, 0)
