"""The sizes of a token's KV and of a state, computed from a model's config.json. Pure.

A token's KV is the keys and values of the layers that attend: of all tokens, or in layers with a
window (`KVLayout.window`) of the last tokens only. A state is what the other layers keep of all
tokens so far: per layer the newest inputs of its convolution, in the model's type, and a recurrent
state, which Transformers keeps in float32. States are packed as the engine packs them.

States are computed only for the architectures that are listed here: two architectures use one field
name for different things. If the config has no list of layers, a few fields tell which layers
attend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.types.errors import InvalidInputError
from shared.types.kv_layout import WHOLE_EVERY
from shared.types.units import align_up, ceil_div

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DEFAULT_BYTES = 2  # of a number, if the config does not name its type
RECURRENT_BYTES = 4  # of a number of a recurrent state
STATE_ALIGNMENT = 64  # bytes, of each tensor of a packed state; its header takes as much
DEFAULT_WINDOW = 4096  # tokens, if the config does not name it
REMEDY = "give --kv-bytes-per-token instead"
STATES_REMEDY = "give --kv-bytes-per-token and --state-bytes instead"


class UnknownModelError(InvalidInputError):
    """The model is neither a known name nor a model directory, or its config lacks a field."""

    reason = "unknown_model"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's config.

    Attributes:
        path: its file.
        fields: its fields; of a multimodal model those of its text model.
    """

    path: Path
    fields: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The architecture's name; "" if it has none."""
        return str(self.fields.get("model_type", ""))

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the model's type."""
        dtype = self.fields.get("dtype") or self.fields.get("torch_dtype")
        return _BYTES.get(str(dtype).removeprefix("torch."), DEFAULT_BYTES)

    @property
    def window_tokens(self) -> int:
        """The longest context, in tokens."""
        window = self.fields.get("max_position_embeddings")
        return window if isinstance(window, int) and window > 0 else DEFAULT_WINDOW

    def count(self, *names: str) -> int:
        """Return the first of these fields that is a positive whole number.

        Raises:
            UnknownModelError: none is.
        """
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise UnknownModelError(f"{self.path}: there is no {names[0]}", REMEDY)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of a token's KV.

    Attributes:
        kept: keys and values of layers that keep them of all tokens.
        windowed: keys and values of layers that keep them of the last tokens only.
        window: the number of these tokens; 0: there are no such layers.
    """

    kept: int
    windowed: int = 0
    window: int = 0


def token_bytes(config: ModelConfig) -> TokenBytes:
    """Return the bytes of a token's keys and values in all layers that attend.

    Raises:
        UnknownModelError: the config does not tell.
    """
    if "kv_lora_rank" in config.fields:
        raise UnknownModelError(
            f"{config.path}: the model caches latents, not keys and values", REMEDY
        )
    num_windowed = 0
    if _is_hybrid(config):
        num_layers = sum(kind in _ATTENDING for kind in _kinds(config))
    else:
        num_layers = config.count(*_LAYERS)
        num_windowed = _num_windowed(config, num_layers)
    if not num_layers:
        return TokenBytes(0)
    of_layer = 2 * _kv_width(config) * config.number_bytes
    if not num_windowed:
        return TokenBytes(num_layers * of_layer)
    window = config.count("sliding_window")
    return TokenBytes((num_layers - num_windowed) * of_layer, num_windowed * of_layer, window)


def _num_windowed(config: ModelConfig, num_layers: int) -> int:
    """Return the number of layers that keep KV of the last tokens only; see `WHOLE_EVERY`."""
    window = config.fields.get("sliding_window")
    if not isinstance(window, int) or not 0 < window < config.window_tokens:
        return 0
    pattern = config.fields.get("sliding_window_pattern")
    if kinds := _named_kinds(config):
        found = kinds.count("sliding_attention")
    elif (
        isinstance(pattern, int) and pattern > 1
    ):  # the last layer of each period attends to all tokens
        found = num_layers - num_layers // pattern
    else:
        found = num_layers if config.model_type in _ALL_WINDOWED else 0
    return found if found < num_layers else num_layers - ceil_div(num_layers, WHOLE_EVERY)


def state_bytes(config: ModelConfig) -> int:
    """Return the bytes of a state of all layers that keep one; 0: none does.

    Raises:
        UnknownModelError: the config does not tell, or its architecture is not listed here.
    """
    num_layers = 0
    if _is_hybrid(config):
        num_layers = sum(kind in _WITH_STATE for kind in _kinds(config))
    if not num_layers:
        return 0
    of_convolution, of_recurrence = _RULES[config.model_type](config)
    of_layer = align_up(of_convolution * config.number_bytes, STATE_ALIGNMENT)
    of_layer += align_up(of_recurrence * RECURRENT_BYTES, STATE_ALIGNMENT)
    return STATE_ALIGNMENT + num_layers * of_layer


def _is_hybrid(config: ModelConfig) -> bool:
    """Return whether layers of this architecture keep states; it is listed here then.

    Raises:
        UnknownModelError: they do, and it is not listed.
    """
    if config.model_type in _RULES:
        return True
    if kinds := sorted(_WITH_STATE.intersection(_named_kinds(config))):
        raise UnknownModelError(
            f"{config.path}: it is not known how much its {', '.join(kinds)} layers keep",
            STATES_REMEDY,
        )
    return False


def _kv_width(config: ModelConfig) -> int:
    """Return the numbers in the keys of a token, in one layer: kv_heads * head_dim."""
    heads = config.count("num_attention_heads", "n_head", "n_heads")
    kv_heads = heads
    if config.fields.get("num_key_value_heads") or config.fields.get("num_kv_heads"):
        kv_heads = config.count("num_key_value_heads", "num_kv_heads")
    elif config.fields.get("multi_query"):
        kv_heads = 1
    if config.fields.get("head_dim") or config.fields.get("attention_head_dim"):
        return kv_heads * config.count("head_dim", "attention_head_dim")
    width = config.count("hidden_size", "n_embd", "d_model")
    if config.model_type in ("zamba", "zamba2"):  # their attention sees the embeddings as well
        width *= 2
    return kv_heads * (width // heads)


# ---------------------------------------------------------------------------------- kinds of layers

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_WITH_STATE = frozenset(
    (
        *("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"),
        *("compressed_sparse_attention", "heavily_compressed_attention"),
    )
)
_ATTENDING = frozenset(
    ("full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding")
)
# Architectures in which all layers have the config's window.
_ALL_WINDOWED = ("ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
_OF_PATTERN = {"M": "mamba", "*": "attention"}
_OF_ONE_KIND = {
    "falcon_h1": "hybrid",
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), "mamba"),
}


def _named_kinds(config: ModelConfig) -> list[str]:
    """Return the layers' kinds as the config names them; empty: it does not."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = config.fields.get(name)
        if isinstance(kinds, list):
            return [str(kind) for kind in kinds]
    pattern = config.fields.get("hybrid_override_pattern")
    return [_OF_PATTERN.get(letter, letter) for letter in pattern or ()]


def _kinds(config: ModelConfig) -> list[str]:
    """Return the kinds of the layers, of an architecture that is listed here."""
    if named := _named_kinds(config):
        return named
    num_layers = config.count(*_LAYERS)
    if config.model_type in _OF_ONE_KIND:
        return [_OF_ONE_KIND[config.model_type]] * num_layers
    attends = _attends(config)
    return ["attention" if attends(layer) else "mamba" for layer in range(num_layers)]


def _attends(config: ModelConfig) -> Callable[[int], bool]:
    """Return a function that tells whether a layer, counted from 0, attends."""
    layers = config.fields.get("attn_layer_indices") or config.fields.get("full_attn_idxs")
    if isinstance(layers, list):
        return layers.__contains__
    if config.model_type == "jamba":
        period, offset = config.count("attn_layer_period"), config.fields.get("attn_layer_offset")
        return lambda layer: layer % period == offset
    if "full_attention_interval" not in config.fields:
        raise UnknownModelError(f"{config.path}: there is no layer_types", STATES_REMEDY)
    interval = config.count("full_attention_interval")
    return lambda layer: (layer + 1) % interval == 0


# -------------------------------------- numbers in a layer's convolution state and recurrent state


def _delta_rule(config: ModelConfig) -> tuple[int, int]:
    """Gated delta rule: queries, keys and values are convolved; a value head keeps a matrix."""
    key_dim = config.count("linear_key_head_dim")
    keys = config.count("linear_num_key_heads") * key_dim
    values = config.count("linear_num_value_heads") * config.count("linear_value_head_dim")
    return (2 * keys + values) * config.count("linear_conv_kernel_dim"), values * key_dim


def _mamba(config: ModelConfig) -> tuple[int, int]:
    """Mamba: only the scanned inputs are convolved."""
    width = _mamba_width(config)
    kernel = config.count("mamba_d_conv", "conv_kernel")
    return width * kernel, width * config.count("mamba_d_state", "state_size")


def _mamba2(config: ModelConfig) -> tuple[int, int]:
    """Mamba 2: B and C of each group are convolved, too."""
    width = _mamba_width(config)
    state = config.count("mamba_d_state", "ssm_state_size", "state_size")
    groups = config.count("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = config.count("mamba_d_conv", "conv_kernel")
    return (width + 2 * groups * state) * kernel, width * state


def _mamba_width(config: ModelConfig) -> int:
    if config.fields.get("mamba_num_heads"):
        return config.count("mamba_num_heads") * config.count("mamba_head_dim")
    if config.fields.get("mamba_d_ssm"):
        return config.count("mamba_d_ssm")
    return config.count("mamba_expand", "expand") * config.count("hidden_size", "d_model")


def _short_convolution(config: ModelConfig) -> tuple[int, int]:
    return config.count("hidden_size") * config.count("conv_L_cache"), 0


_RULES: Mapping[str, Callable[[ModelConfig], tuple[int, int]]] = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid"), _delta_rule),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _delta_rule),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _delta_rule),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), _mamba),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _mamba2),
    **dict.fromkeys(("mamba2", "nemotron_h", "zamba2"), _mamba2),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm3"), _short_convolution),
}
