"""Whose KV it is: a model by name, or the configuration of a model directory.

Pure but for reading the file. A directory is not loaded: its config.json says how many numbers K
and V of a token are.
"""

import json
from pathlib import Path
from typing import Any

from kvd.plan.hardware import MODELS, PlannedModel
from shared.types.errors import InvalidInputError

CONFIG = "config.json"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DEFAULT_BYTES = 2  # of a number, if the configuration does not say
DEFAULT_WINDOW = 4096  # of a model of which nothing is known
_REMEDY = "say --kv-bytes-per-token instead"


class UnknownModelError(InvalidInputError):
    """Neither a known name nor a model directory."""

    reason = "unknown_model"


def choose_model(name: str, kv_bytes_per_token: int | None, window_tokens: int) -> PlannedModel:
    """The model of a command line: its name or directory, and what is said besides.

    Args:
        name: "": nothing is said but the size of a token.
        kv_bytes_per_token: None: the model's own.
        window_tokens: 0: the model's own.

    Raises:
        UnknownModelError: there is no such model.
    """
    if name in MODELS:
        model = MODELS[name]
    elif name:
        model = read_model(Path(name))
    else:
        model = PlannedModel("-", 0, DEFAULT_WINDOW)
    return PlannedModel(
        model.name,
        model.kv_bytes_per_token if kv_bytes_per_token is None else kv_bytes_per_token,
        window_tokens or model.window_tokens,
    )


def read_model(directory: Path) -> PlannedModel:
    """A model by its directory.

    Raises:
        UnknownModelError: it is none, or its configuration does not say what is needed.
    """
    path = directory / CONFIG
    if not path.is_file():
        known = ", ".join(MODELS)
        raise UnknownModelError(
            f"no model {str(directory)!r}", f"name {known}, or a directory with a {CONFIG}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{path}: cannot be read as JSON", _REMEDY) from error
    if not isinstance(config, dict):
        raise UnknownModelError(f"{path}: no JSON object", _REMEDY)
    nested = config.get("text_config")
    text: dict[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
    return PlannedModel(directory.resolve().name, _kv_bytes(path, text), _window(text))


def _kv_bytes(path: Path, config: dict[str, Any]) -> int:
    if "kv_lora_rank" in config:
        raise UnknownModelError(f"{path}: keeps latents, not keys and values", _REMEDY)
    layers = _count(path, config, "num_hidden_layers", "n_layer", "n_layers")
    heads = _count(path, config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") or config.get("num_kv_heads"):
        kv_heads = _count(path, config, "num_key_value_heads", "num_kv_heads")
    elif config.get("multi_query"):
        kv_heads = 1
    if config.get("head_dim"):
        head_dim = _count(path, config, "head_dim")
    else:
        head_dim = _count(path, config, "hidden_size", "n_embd", "d_model") // heads
    return 2 * layers * kv_heads * head_dim * _number_bytes(config)


def _number_bytes(config: dict[str, Any]) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return _BYTES.get(str(dtype).removeprefix("torch."), DEFAULT_BYTES)


def _window(config: dict[str, Any]) -> int:
    window = config.get("max_position_embeddings")
    return window if isinstance(window, int) and window > 0 else DEFAULT_WINDOW


def _count(path: Path, config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise UnknownModelError(f"{path}: no {names[0]}", _REMEDY)
