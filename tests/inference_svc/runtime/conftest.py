"""Tiny random models, calibrated once per session, each with an untouched twin to compare with."""

import copy
import mmap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from inference_svc.runtime.calibration.calibration import calibrate, without_windows
from inference_svc.runtime.compute.compiled_forward import compile_forward
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.model.model_loader import LoadedModel, describe_model
from inference_svc.runtime.positions.recipes import Calibration
from tests.inference_svc.runtime.eager_pieces import EAGER

VOCAB = 97
WINDOW = 192
POOL_ROWS = 2048
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 48,
    "factor": 4.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
# name -> (config class, arguments added to SIZES; ... : without this one)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-longrope": ("LlamaConfig", {"rope_parameters": LONGROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma2": ("Gemma2Config", {"sliding_window": 7, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "num_kv_shared_layers": 2}),
    "gemma4-wide": (  # the rows of layers with a window are the longer ones
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
        },
    ),
    "mimo": (  # keys and values of unequal widths
        "MiMoV2FlashConfig",
        {
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "v_head_dim": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phimoe": ("PhimoeConfig", {"sliding_window": 7, "num_local_experts": 4}),
    "stablelm": ("StableLmConfig", {}),
    "glm": ("GlmConfig", {}),
    "cohere": ("CohereConfig", {}),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "hunyuan": ("HunYuanDenseV1Config", {}),
    "nanochat": ("NanoChatConfig", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "seq_length": WINDOW}),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen4-exp": (
        "Qwen4ExpTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 8,
            "ple_layer_ids": [1, 3],
            "ngram_vocab_size_base": VOCAB,
            "heads_per_ngram": 2,
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "bert": ("BertConfig", {}),
    "roberta": ("RobertaConfig", {"is_decoder": True, "pad_token_id": 1, "bos_token_id": 0}),
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": WINDOW}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "head_dim": ...}),
    "falcon-rw": (
        "FalconConfig",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "head_dim": ...},
    ),
    "gpt-neo": (
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
        },
    ),
    "codegen": (
        "CodeGenConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW, "rotary_dim": 4},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 16,
            "floor_scale": 64,
            "attn_scale": 0.5,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
    ),
    "llama4-ragged": (  # queries are not scaled by position, otherwise it counts by its own cache
        "Llama4TextConfig",
        {
            "attention_chunk_size": 16,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
    ),
    "diffllama": ("DiffLlamaConfig", {}),
    "gptj": (
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW, "rotary_dim": 4},
    ),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "deepseek-v4": (
        "DeepseekV4Config",
        {
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 7,
            },
            "sliding_window": 10,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "deepseek-v32": (
        "DeepseekV32Config",
        # With fewer heads several keys have score 0, any of which may be chosen.
        {**LATENT, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 4},
    ),
}


@dataclass(frozen=True)
class Tiny:
    """A calibrated model, and its twin that still runs stock attention."""

    loaded: LoadedModel
    calibration: Calibration
    runner: ModelRunner
    stock: Any
    pool: KVPool

    def new_kv(self, capacity_tokens):
        """Lend an empty sequence KV; it is never returned, the pool is large enough."""
        return self.pool.new_kv(capacity_tokens)

    def new_buffer(self, capacity_tokens, first_token=0):
        """Lend an empty write buffer."""
        return self.pool.new_write_buffer(first_token, capacity_tokens)

    def stock_logits(self, token_ids):
        """Run the twin over a whole sequence; returns [tokens, vocab]."""
        with torch.no_grad():
            return self.stock(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute on one thread: the machine is shared, and results must not depend on its load."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def build(one_thread):
    """Return a function that builds a random model by name, uncalibrated."""

    def build_by_name(name, **overrides):
        class_name, arguments = CONFIGS[name]
        merged = {**SIZES, **arguments, **overrides}
        merged = {key: value for key, value in merged.items() if value is not ...}
        config = getattr(transformers, class_name)(**merged)
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                # Weights larger than usual: otherwise tiny models hardly use their context.
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        return model

    return build_by_name


@pytest.fixture(scope="session")
def tiny(build):
    """Return a function that gives a calibrated model by name, always the same object.

    `has_windows`: of layers with a window no more is stored and loaded than they attend to.
    `overrides`: of the model's configuration.
    """
    made: dict[tuple[Any, ...], Tiny] = {}

    def tiny_by_name(
        name, dtype=torch.float32, positions="auto", *, has_windows=False, **overrides
    ):
        what = name, dtype, positions, has_windows, *overrides.items()
        if what not in made:
            model = build(name, **overrides).to(dtype)
            stock = copy.deepcopy(model).eval()
            loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
            calibration = calibrate(loaded, positions)
            if not has_windows:
                calibration = without_windows(calibration)
            shapes = [layer.shape for layer in calibration.layers]
            pool = KVPool(
                shapes,
                POOL_ROWS,
                device=loaded.device,
                dtype=dtype,
                states=calibration.state_shapes,
            )
            runner = ModelRunner(loaded, calibration)
            made[what] = Tiny(loaded, calibration, runner, stock, pool)
        return made[what]

    return tiny_by_name


@pytest.fixture(scope="session")
def graph_runner(tiny):
    """Return a function that gives a runner by name, the same each time, whose forwards are graphs.

    These are not compiled, but run operation by operation.
    """
    made: dict[str, ModelRunner] = {}

    def runner_by_name(name):
        if name not in made:
            model = tiny(name).loaded, tiny(name).calibration
            made[name] = ModelRunner(*model, compiled=compile_forward(*model, EAGER))
        return made[name]

    return runner_by_name


@dataclass(frozen=True)
class Rows:
    """A block and a span in one object."""

    slot_id: int
    token_offset: int
    num_tokens: int
    start: int = 0


class PlainArena:
    """Slots in anonymous memory, filled with garbage at first."""

    def __init__(self, slot_bytes, num_slots):
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        memory = mmap.mmap(-1, slot_bytes * num_slots)
        memory.write(b"\xab" * (slot_bytes * num_slots))
        self.memory = memoryview(memory)

    def slot(self, slot_id):
        begin = slot_id * self.slot_bytes
        return self.memory[begin : begin + self.slot_bytes]


@pytest.fixture
def rows():
    """Return the class of test spans and blocks."""
    return Rows


@pytest.fixture
def make_arena():
    """Return a function that makes an arena for a layout, and its rows."""

    def make(layout, num_slots=4):
        arena = PlainArena(layout.block_bytes, num_slots)
        return arena, ArenaKv(arena, layout)

    return make
