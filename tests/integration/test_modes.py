"""Models of every mode in the live pair: a second turn finds its history in kvd, and is right."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
)

from tests.oracle import Oracle
from tests.pair import VOCAB_SIZE, Pair

WINDOW_TOKENS = 512
COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
COMMON |= {"initializer_range": 0.35}  # so that answers vary
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# By (mode, positions) that calibration is to find.
CONFIGS = {
    ("ragged", "coupled"): GPT2Config(
        **COMMON, n_positions=WINDOW_TOKENS, n_embd=64, n_layer=2, n_head=4
    ),
    ("gather", "decoupled"): DeepseekV3Config(
        **COMMON,
        **SIZE,
        max_position_embeddings=WINDOW_TOKENS,
        num_key_value_heads=4,
        intermediate_size=64,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    ("masked", "decoupled"): FalconConfig(
        **COMMON, **SIZE, max_position_embeddings=WINDOW_TOKENS, new_decoder_architecture=True
    ),
    ("single", "decoupled"): BloomConfig(
        **COMMON, hidden_size=64, n_layer=2, n_head=4, seq_length=WINDOW_TOKENS
    ),
}


@pytest.fixture(params=CONFIGS, ids="-".join)
def kind(request):
    return request.param


@pytest.fixture
def model_dir(kind, tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


async def test_a_second_turn_reuses_the_first(kind, model_dir, tmp_path):
    """Rows go to kvd and come back, whatever the model attends with; answers are the model's."""
    pair = Pair(model_dir, tmp_path)
    oracle = Oracle(model_dir)
    async with pair.service, pair.with_kvd():
        async with pair.service.client() as client:
            model = await client.get_model()
        assert (model.attention_mode, model.positions) == kind
        await pair.say("a", 90)
        await pair.until_saved()
        usage = (await pair.say("a", 20)).usage
        assert usage.reused_tokens == usage.history_tokens > 0
        assert usage.recomputed_tokens == 0
        assert (await pair.verdict(oracle, "a")).is_identical
