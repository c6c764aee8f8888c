"""Models with a preset's shape and random weights, in memory.

All but two are built as Llama: rotary embedding, RMS norm, gated feed-forward. The properties that
decide the figures are those of the model with that name: layers, hidden size, heads, KV heads, head
size, vocabulary, and the number of feed-forward weights. Two properties differ: Mistral's sliding
window is missing (it is as long as its context), and Falcon's parallel blocks with an ungated
feed-forward are replaced by a gated one with the same number of weights.

One is built as DeepSeek-V3 with the attention of DeepSeek-V2-Lite, and no experts. The hybrid is
built as Qwen3-Next without experts, and has its proportions: of four layers three have linear
attention, and a state takes as much as 3,072 tokens' KV.
"""

import hashlib
import json
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import psutil
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from inference_svc.bench.options import ModelChoice
from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.model.model_loader import LoadedModel, describe_model, load_model
from shared.measuring.workspace import NoRoomError
from shared.types.errors import InvalidInputError
from shared.types.units import format_bytes


class UnknownPresetError(InvalidInputError):
    """No shape has this name."""

    reason = "unknown_preset"


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of latent attention: of the latent, and of each head's parts."""

    latent: int
    rotated: int
    free: int
    value: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model.

    Attributes:
        layers: number of layers.
        hidden: width of the hidden states.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        intermediate: width of the gated feed-forward.
        vocab: size of the vocabulary.
        attention: the widths of latent attention; None: attention as Llama's.
        linear_heads: heads of linear attention, in three layers of four; 0: there is none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    attention: LatentShape | None = None
    linear_heads: int = 0

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def num_weights(self) -> int:
        """Number of weights, with embedding and head counted apart."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        attention = max(attention, 4 * self.hidden * self.linear_heads * LINEAR_DIM)
        if self.attention is not None:
            latent, rotated, free, value = astuple(self.attention)
            attention = self.hidden * (self.heads * (free + rotated + value) + latent + rotated)
            attention += latent * (self.heads * (free + value) + 1)  # with the latent's norm
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden


LINEAR_DIM = 128  # of a head of linear attention: its state is LINEAR_DIM x LINEAR_DIM

# The first four are scaled down for CPUs: heads of 64, a feed-forward of 2.75 hidden as Llama's.
PRESETS = {
    "4x256": Shape(4, 256, 4, 4, 704, 8192),
    "8x512": Shape(8, 512, 8, 8, 1408, 8192),
    "16x1024": Shape(16, 1024, 16, 4, 2816, 8192),
    "latent-4x512": Shape(4, 512, 16, 16, 1408, 8192, LatentShape(512, 64, 128, 128)),
    "hybrid-8x512": Shape(8, 512, 8, 1, 1408, 8192, linear_heads=8),
    "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "llama-65b": Shape(80, 8192, 64, 64, 22016, 32000),
    "llama-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000),
    "falcon-40b": Shape(60, 8192, 128, 8, 21824, 65024),
}


def preset(name: str, num_layers: int = 0) -> Shape:
    """Return the shape with a name, with fewer layers if `num_layers` is not 0.

    Raises:
        UnknownPresetError: there is none, or it does not have that many layers.
    """
    shape = PRESETS.get(name)
    if shape is None:
        raise UnknownPresetError(
            f"there is no preset {name!r}", f"give one of {', '.join(PRESETS)}"
        )
    if not 0 <= num_layers <= shape.layers:
        raise UnknownPresetError(
            f"preset {name} has {shape.layers} layers, so {num_layers} are not possible",
            "give at most that many with --layers",
        )
    return replace(shape, layers=num_layers or shape.layers)


MIN_WINDOW_TOKENS = 4096


def chosen_model(choice: ModelChoice, window_tokens: int) -> LoadedModel:
    """Load the model directory, or build the preset, that a run's options name.

    Args:
        choice: the run's choice of a model.
        window_tokens: number of positions that the run needs: a preset gets as many.

    Raises:
        UnknownModelError: neither or both were named.
        UnsupportedModelError: the directory's model has fewer positions.
    """
    if (choice.path is None) == (not choice.random):
        raise UnknownModelError(
            "it is not clear which model to measure",
            "give either --model DIRECTORY or --random PRESET",
        )
    if choice.path is None:
        shape = preset(choice.random, choice.layers)
        return random_model(choice, shape, max(MIN_WINDOW_TOKENS, window_tokens))
    loaded = load_model(choice.path, choice.dtype, choice.device)
    if 0 < loaded.context_window < window_tokens:
        raise UnsupportedModelError(
            f"{loaded.name} has {loaded.context_window} positions, but the bench needs "
            f"{window_tokens}",
            "measure shorter histories, or another model",
        )
    return loaded


def random_model(choice: ModelChoice, shape: Shape, window_tokens: int) -> LoadedModel:
    """Build a model with a shape; dtype "auto" is float32.

    Raises:
        NoRoomError: it does not fit into memory.
    """
    dtype = torch.float32 if choice.dtype == "auto" else getattr(torch, choice.dtype)
    device = torch.device(choice.device)
    _check_room(shape, choice, device, dtype)
    config = _config(shape, window_tokens)
    torch.manual_seed(choice.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    parts = {name: value for name, value in asdict(shape).items() if value}
    identity = {**parts, "window": window_tokens, "seed": choice.seed}
    text = json.dumps(identity, sort_keys=True)
    return describe_model(
        model,
        tokenizer=None,
        name=choice.random,
        fingerprint=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )


def _config(shape: Shape, window_tokens: int) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": window_tokens,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,  # every answer has the requested length
        "pad_token_id": None,
    }
    if shape.attention is not None:
        return DeepseekV3Config(
            **common,
            first_k_dense_replace=shape.layers,
            q_lora_rank=None,
            kv_lora_rank=shape.attention.latent,
            qk_rope_head_dim=shape.attention.rotated,
            qk_nope_head_dim=shape.attention.free,
            v_head_dim=shape.attention.value,
        )
    common["head_dim"] = shape.head_dim
    if not shape.linear_heads:
        return LlamaConfig(**common)
    return Qwen3NextConfig(
        **common,
        linear_num_key_heads=shape.linear_heads // 2,
        linear_num_value_heads=shape.linear_heads,
        linear_key_head_dim=LINEAR_DIM,
        linear_value_head_dim=LINEAR_DIM,
        mlp_only_layers=list(range(shape.layers)),
    )


def _check_room(
    shape: Shape, choice: ModelChoice, device: torch.device, dtype: torch.dtype
) -> None:
    needed = shape.num_weights * dtype.itemsize
    available = psutil.virtual_memory().available
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    if needed > available:
        raise NoRoomError(
            f"the weights of {choice.random} take {format_bytes(needed)}, but only "
            f"{format_bytes(available)} of memory are available",
            "give fewer layers with --layers, or a smaller dtype with --dtype",
        )
