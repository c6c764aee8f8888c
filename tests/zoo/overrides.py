"""What shrinking a config by the names of its fields gets wrong, and variants of types."""

from collections.abc import Mapping
from typing import Any

from tests.zoo.tiny_configs import LAYERS, SLIDING, WINDOW, Fields

_HALF = LAYERS // 2
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * _HALF
_SHARING = {  # the last two layers attend to the KV of the first two
    "num_kv_shared_layers": _HALF,
    "layer_types": _SLIDING_AND_FULL,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97,
}
_CHOOSY = {"index_topk": 8, "index_head_dim": 16}  # most keys are skipped: the choice matters
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * _HALF}


def _rope(rope_type: str, **fields: Any) -> Fields:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **fields}}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=WINDOW // 4)
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": WINDOW // 4,
    "factor": 4.0,
}

OVERRIDES: Mapping[str, Fields] = {
    "axk2": _CHOOSY,
    "cohere_compass_text": {
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
            for kind in _SLIDING_AND_FULL
        },
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v32": _CHOOSY,
    "deepseek_v4": {
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 7,
        },
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **_CHOOSY,
        "shared_experts_intermediate_size": 32,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma3n_text": {**_SHARING, "laurel_rank": 8, "altup_num_inputs": 2},
    "gemma4_text": _SHARING,
    "glm_moe_dsa": _CHOOSY,
    "gpt_neo": {
        "num_heads": 4,
        "attention_types": [[["global", "local"], _HALF]],
        "window_size": SLIDING,
    },
    "hy_v4": _CHOOSY,
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": _HALF},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97},
    "qwen4_exp_text": {
        "ple_layer_ids": [1, 3],  # counted from one; those without an index
        "ngram_vocab_size_base": 97,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "recurrent_gemma": {"attention_window_size": SLIDING},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 20)},
    "whisper": {"max_target_positions": WINDOW},
    "xlm": {"emb_dim": 64},
    "xlstm": {"hidden_size": 128, "num_heads": 4, "chunk_size": 16},  # whole multiples of 64
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# name -> (type, fields on top of those of the type)
VARIANTS: Mapping[str, tuple[str, Fields]] = {
    "bert (is_decoder)": ("bert", {"is_decoder": True}),
    "deepseek_v2 (q_lora_rank none)": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3 (yarn)": ("deepseek_v3", _YARN),
    "falcon (7b)": ("falcon", {"multi_query": True, "parallel_attn": True}),
    "falcon (new)": ("falcon", {"new_decoder_architecture": True}),
    "falcon (rw)": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4},
    ),
    "gemma4_text (k = v)": ("gemma4_text", {"attention_k_eq_v": True, "num_kv_shared_layers": 0}),
    "glm_moe_dsa (shared index)": (
        "glm_moe_dsa",
        {"indexer_types": ["full", "shared"] * _HALF},
    ),
    "gpt_bigcode (no multi-query)": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox (sequential)": ("gpt_neox", {"use_parallel_residual": False}),
    "granitemoehybrid (attention)": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * LAYERS},
    ),
    "llama (bias)": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama (dynamic)": ("llama", _rope("dynamic", factor=4.0)),
    "llama (linear)": ("llama", _rope("linear", factor=4.0)),
    "llama (llama3)": (
        "llama",
        _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=WINDOW // 4,
        ),
    ),
    "llama (longrope)": ("llama", {"rope_parameters": _LONGROPE}),
    "llama (multi-query)": ("llama", {"num_key_value_heads": 1}),
    "llama (yarn)": ("llama", _YARN),
    "ministral3 (scaled)": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": WINDOW // 4,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "mistral (no window)": ("mistral", {"sliding_window": None}),
    "olmo (clip)": ("olmo", {"clip_qkv": 0.5}),
    "phi (qk norm)": ("phi", {"qk_layernorm": True}),
    "phi3 (longrope)": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": WINDOW // 4},
    ),
    "roberta (is_decoder)": ("roberta", {"is_decoder": True}),
    "qwen2 (sliding)": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": _SLIDING_AND_FULL},
    ),
    "qwen3 (yarn)": ("qwen3", _YARN),
    "stablelm (qk norm)": ("stablelm", {"qk_layernorm": True}),
}
# By type, the factor of its initial weights where the usual one is too large: over 50 tokens
# larger weights put Mamba's first scan 2e-4 off its own decoding.
WEIGHT_SCALES: Mapping[str, float] = {"mamba": 2.0}
# Types that look up cosines in a table without negative positions.
UP: frozenset[str] = frozenset({"codegen", "gptj"})
# Types with a weighted norm after their rotary embedding, see `explicit.py`.
EXPLICIT: frozenset[str] = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
# Types that are not in the zoo, and why.
NOT_TRIED: Mapping[str, str] = {
    "blt": "four models in one, over bytes",
    "dots3_note": "multimodal, of dots3_note_text",
    "gemma3n": "multimodal, of gemma3n_text; needs the timm library",
    "gemma4_assistant": "drafts tokens for another model, whose KV it reads",
    "gemma4_unified_assistant": "drafts tokens for another model, whose KV it reads",
    "musicgen": "makes music, not text",
    "musicgen_melody": "makes music, not text",
}
