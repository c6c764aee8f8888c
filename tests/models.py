"""A tiny model for tests: random weights, a BPE tokenizer, a chat template; always the same."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

MAX_VOCAB_SIZE = 512
WINDOW_TOKENS = 2048
SEED = 7
# Large weights: the greedy answers of a random model then vary, and the best logit leads clearly.
INITIALIZER_RANGE = 0.35
EOS = "<|end|>"
SPECIAL_TOKENS = [EOS, "<|start|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "The history of a conversation is loaded, not recomputed, when the next turn begins.",
    "Each turn adds a question and an answer; the keys and values of both are kept in blocks.",
    "A block holds the same number of tokens in every layer, and its key is a hash of its tokens.",
    "Größe, naïve, 東京, здравствуй, emoji 🙂 and 🚀: characters of two, three and four bytes.",
]


def build_model(directory: Path, seed: int = SEED) -> Path:
    """Write the model to a directory; another seed is another model."""
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
        max_position_embeddings=WINDOW_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
        pad_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


def build_absolute_model(directory: Path) -> Path:
    """Write a model whose positions are learned embeddings: rows are coupled to them."""
    size = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **size)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def build_recurrent_model(directory: Path) -> Path:
    """Write a model that keeps a state instead of keys and values: it cannot be served."""
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(directory)
    return directory


def narrow_model(model_dir: Path, directory: Path, window_tokens: int) -> Path:
    """Copy a model and give it a smaller window."""
    shutil.copytree(model_dir, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"max_position_embeddings": window_tokens}))
    return directory


def _train_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
