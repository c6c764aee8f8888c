"""Models of every mode in the live pair: a second turn finds its history in kvd, and is right."""

import asyncio

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconConfig,
    GPT2Config,
    Qwen4ExpTextConfig,
    RecurrentGemmaConfig,
)

from tests.oracle import Oracle
from tests.pair import VOCAB_SIZE, Pair
from tests.sampled import sampled

WINDOW_TOKENS = 512
COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
COMMON |= {"initializer_range": 0.35}  # so that answers vary
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {
    **COMMON,
    **SIZE,
    "max_position_embeddings": WINDOW_TOKENS,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# What calibration must find, (mode, positions), for which model.
CONFIGS = {
    "learned positions": (
        ("ragged", "coupled"),
        GPT2Config(**COMMON, n_positions=WINDOW_TOKENS, n_embd=64, n_layer=2, n_head=4),
    ),
    "latents": (("latent", "decoupled"), DeepseekV3Config(**LATENT)),
    "an index": (
        ("indexed", "decoupled"),
        DeepseekV32Config(**LATENT, index_n_heads=16, index_head_dim=16, index_topk=24),
    ),
    "attention of its own": (
        ("masked", "decoupled"),
        FalconConfig(
            **COMMON, **SIZE, max_position_embeddings=WINDOW_TOKENS, new_decoder_architecture=True
        ),
    ),
    "an index and states": (
        ("masked", "coupled"),
        Qwen4ExpTextConfig(
            **{**COMMON, "eos_token_id": VOCAB_SIZE - 1},  # where n-grams start over
            **SIZE,
            max_position_embeddings=WINDOW_TOKENS,
            layer_types=["linear_attention", "indexed_attention"],
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            indexer_n_heads=4,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=24,
            indexer_compress_ratio=4,
            hc_lowrank=8,
            ple_layer_ids=[1],
            ngram_vocab_size_base=VOCAB_SIZE,
        ),
    ),
    "states in modules": (
        ("ragged", "coupled"),
        RecurrentGemmaConfig(
            **COMMON,
            **{**SIZE, "num_hidden_layers": 3},
            num_key_value_heads=1,
            intermediate_size=96,
            attention_window_size=64,
            lru_width=64,
        ),
    ),
    "no positions": (
        ("single", "decoupled"),
        BloomConfig(**COMMON, hidden_size=64, n_layer=2, n_head=4, seq_length=WINDOW_TOKENS),
    ),
}


@pytest.fixture
def model_dir(name, tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[name][1]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", sampled(list(CONFIGS), 2, seed=1, always=("learned positions",)))
async def test_a_second_turn_reuses_the_first(name, model_dir, tmp_path):
    """KV is saved to kvd and loaded, whatever the kind of attention; answers are the model's."""
    pair = Pair(model_dir, tmp_path)
    oracle = Oracle(model_dir)
    async with pair.service, pair.with_kvd("--dram", "64MB"):
        async with pair.service.client() as client:
            model = await client.get_model()
        assert (model.attention_mode, model.positions) == CONFIGS[name][0]
        await pair.say("a", 90)
        await pair.until_saved()
        usage = (await pair.say("a", 20)).usage
        assert usage.reused_tokens == usage.history_tokens > 0
        assert usage.recomputed_tokens == 0
        assert (await pair.verdict(oracle, "a")).is_identical


@pytest.mark.parametrize(
    "name",
    [
        "an index",
        pytest.param("an index and states", marks=pytest.mark.long),
        pytest.param("states in modules", marks=pytest.mark.long),
    ],
)
async def test_an_index_or_states_outlive_both_processes(name, model_dir, tmp_path):
    """Sessions run side by side, processes are killed, one is forked: answers are the model's."""
    pair = Pair(model_dir, tmp_path)
    oracle = Oracle(model_dir)
    async with pair.service, pair.with_kvd("--dram", "64MB"):
        await asyncio.gather(*(pair.say(key, 60 + 9 * place) for place, key in enumerate("abc")))
        await pair.until_saved()
        for process in (pair.kvd, pair.service):
            await process.kill()
            await process.start()
            await pair.until_kvd_is("attached")
            for key in "abc":
                usage = (await pair.say(key, 15)).usage
                assert usage.reused_tokens == usage.history_tokens > 0
            await pair.until_saved()
        async with pair.service.client() as client:
            await client.fork_session(pair.name("a"), None, pair.name("d"))
        await pair.say("d", 15)
        for key in "abcd":
            assert (await pair.verdict(oracle, key)).is_identical
