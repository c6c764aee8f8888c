"""Tiny configs of every causal language model that the installed Transformers has.

A config is made of its class's fields: those whose names are in SHRUNK get a small value, the
rest keep their defaults. Layer patterns ("layer_types" and its like) are cut to a few layers so
that each kind that the default has occurs. `overrides.py` corrects the rest. Pure but for the

imports of config classes; the same in every process.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Fields = Mapping[str, Any]

VOCAB = 97
WINDOW = 160  # tokens
SLIDING = 16  # tokens; less than any history that is checked
LAYERS = 4

# Names under which configs keep sizes, and what they become.
SHRUNK: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # width
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "dff": 96,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "image_size": 32,
    "patch_size": 16,
    # depth
    "depth": 1,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "decoder_layers": LAYERS,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    # positions
    "max_position_embeddings": WINDOW,
    "n_positions": WINDOW,
    "seq_length": WINDOW,
    "max_seq_len": WINDOW,
    "sliding_window": SLIDING,
    "attention_chunk_size": SLIDING,
    "rotary_dim": 8,
    # experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # states; chunks shorter than a history, so that there are several of them
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
# Fields with one entry per layer.
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")


def causal_types() -> list[str]:
    """Name every causal model type of the installed Transformers, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, overrides: Mapping[str, Fields]) -> PretrainedConfig:
    """Make the config of a type.

    Args:
        model_type: as Transformers names it.
        overrides: by type, applied after shrinking; `...` stands for the class's default.

    Raises:
        whatever the config class raises for sizes that do not fit each other.
    """
    return _shrunk(CONFIG_MAPPING[model_type], model_type, overrides)


def _shrunk(
    config_class: type[PretrainedConfig], model_type: str, overrides: Mapping[str, Fields]
) -> PretrainedConfig:
    names = {field.name for field in fields(config_class)}
    values = {name: value for name, value in SHRUNK.items() if name in names}
    values |= {
        name: cut for name in PATTERNS if name in names and (cut := _cut(config_class, name))
    }
    if "qk_rope_head_dim" in names:  # latent attention: no groups, head_dim is its rotary part
        values |= {name: value for name, value in LATENT.items() if name in names}
    values |= _parts(config_class, overrides) | overrides.get(model_type, {})
    return config_class(**{name: value for name, value in values.items() if value is not ...})


def _parts(
    config_class: type[PretrainedConfig], overrides: Mapping[str, Fields]
) -> dict[str, PretrainedConfig]:
    """Make the configs of a multimodal model's parts: the text model and all others."""
    if not {"text_config", "vision_config"} & config_class.sub_configs.keys():
        return {}
    whole = config_class()
    parts = {name: getattr(whole, name, None) for name in config_class.sub_configs}
    return {
        name: _shrunk(type(part), part.model_type, overrides)
        for name, part in parts.items()
        if part is not None
    }


def _cut(config_class: type[PretrainedConfig], name: str) -> list[Any]:
    """Return a pattern of LAYERS layers with each kind of the default's layers, or nothing."""
    pattern = getattr(config_class(), name, None)
    if not isinstance(pattern, (list, tuple)) or not pattern:
        return []
    kinds = sorted(set(pattern), key=list(pattern).index)
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]
