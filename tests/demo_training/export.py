"""Writes the model directory: tokenizer, configuration, and weights in bfloat16.

Owns: the model's shape and the files that `from_pretrained` reads. Tokenizer and configuration are
written once; later exports replace only the weights, by rename, so a reader always finds a complete
directory.
"""

import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from inference_svc.eval.retrieval import record_line
from tests.demo_training.corpus import Corpus
from tests.demo_training.tokenizer import (
    BOS,
    END,
    MAX_TOKENS,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    train_tokenizer,
)


def model_config() -> LlamaConfig:
    """About 4 million parameters: small enough to ship, deep enough for retrieval to form."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="bfloat16",
    )


def write_tokenizer(out: Path, corpus: Corpus, rng: random.Random) -> None:
    """Train and save the tokenizer unless `out` has one; a shipped vocabulary never changes."""
    if (out / "tokenizer.json").exists():
        return
    numbers = [record_line("a", rng.randrange(10_000, 100_000)) for _ in range(4000)]
    turns = [text for d in corpus.dialogues for t in d for text in (t.user, t.assistant)]
    train_tokenizer([*corpus.articles, *turns, *numbers]).save_pretrained(out)


def export_weights(model: LlamaForCausalLM, out: Path) -> None:
    """Write configuration and bfloat16 weights; a reader sees the old file or the new one."""
    if not (out / "config.json").exists():
        config = model_config()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(out)
        GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        ).save_pretrained(out)
    tensors = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    temporary = out / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(out / "model.safetensors")
