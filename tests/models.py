"""Tiny models for tests: random weights, a BPE tokenizer, a chat template; always the same."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

MAX_VOCAB_SIZE = 512
WINDOW_TOKENS = 2048
ATTENTION_WINDOW = 90  # of the windowed model's layers: less than a block
SEED = 7
# Large weights: the greedy answers of a random model then vary, and the best logit leads clearly.
INITIALIZER_RANGE = 0.35
EOS = "<|end|>"
BOS = "<|begin|>"
EMBEDDING_PROMPT = "text: "
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
    return _write(
        directory,
        LlamaForCausalLM,
        LlamaConfig,
        seed,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
    )


def build_sink_model(directory: Path) -> Path:
    """Write a model with an attention sink, as real ones have.

    The sink is the begin token, which its tokenizer puts before every text. All queries match its
    key, whose value is zero: nine tenths of each head's attention rest there. Without it that
    attention goes to the other tokens, and the answers change.
    """
    build_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"bos_token": BOS})
    bos_id = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )
    tokenizer.save_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        _lean_on(model, bos_id)
    model.save_pretrained(directory)
    return directory


def _lean_on(model: LlamaForCausalLM, token_id: int) -> None:
    """Make all heads attend to one token.

    Element 0 of the hidden state is the same for all tokens, element 1 marks that token; no layer
    writes to them. Queries read the former and keys the latter into the element of a head that RoPE
    turns least.
    """
    embedding = model.model.embed_tokens.weight
    embedding[:, 0], embedding[:, 1] = 2.0, 0.0
    embedding[token_id] = 0.0
    embedding[token_id, 1] = 40.0
    model.lm_head.weight[:, :2] = 0.0
    head_dim = model.config.head_dim
    slowest = [head_dim // 2 - 1, head_dim - 1]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for projection, read_element in ((attention.q_proj, 0), (attention.k_proj, 1)):
            heads = projection.weight.view(-1, head_dim, projection.in_features)
            heads *= 0.3  # so that other tokens differ little
            heads[:, slowest] = 0.0
            heads[:, slowest[0], read_element] = 1.2
        attention.v_proj.weight[:, :2] = 0.0
        mlp.down_proj.weight *= 0.02
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight[:2] = 0.0


def build_absolute_model(directory: Path) -> Path:
    """Write a model whose positions are learned embeddings: rows are coupled to them."""
    size = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **size)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def build_uncached_model(directory: Path) -> Path:
    """Write a model that computes all tokens with each new one: it cannot be served."""
    config = OpenAIGPTConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    OpenAIGPTLMHeadModel(config).save_pretrained(directory)
    return directory


def build_hybrid_model(directory: Path) -> Path:
    """Write a model with keys and values in two layers, and a recurrent state in two others."""
    return _write(
        directory,
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def build_compressing_model(directory: Path) -> Path:
    """Write a model that keeps an entry for some tokens each, and windows beside these."""
    sliding, sparse, heavy = (
        f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
    )
    return _write(
        directory,
        DeepseekV4ForCausalLM,
        DeepseekV4Config,
        hidden_size=64,
        num_hidden_layers=4,
        layer_types=[sliding, sparse, heavy, sparse],
        compress_rates={sparse: 2, heavy: 9},  # of 136 values per token: 128 tokens per block
        sliding_window=24,
        num_attention_heads=4,
        head_dim=64,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,  # few heads find no tokens worth choosing now and then: all are alike
        index_head_dim=64,
        index_topk=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )


SOME_WINDOWED = ("sliding_attention", "sliding_attention", "full_attention") * 2
ALL_WINDOWED = ("sliding_attention",) * 6


def build_windowed_model(directory: Path, layer_types: Sequence[str] = SOME_WINDOWED) -> Path:
    """Write a model of six layers, some of which attend to the last ATTENTION_WINDOW tokens."""
    return _write(
        directory,
        Qwen2ForCausalLM,
        Qwen2Config,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        layer_types=list(layer_types),
        use_sliding_window=True,
        sliding_window=ATTENTION_WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
    )


def build_shapes_model(directory: Path) -> Path:
    """Write a model with one layer of full attention, whose rows are twice as long as the others'.

    The four others have a window: a third of the model's KV is of full attention.
    """
    return _write(
        directory,
        Gemma4ForCausalLM,
        lambda **sizes: Gemma4TextConfig(vocab_size_per_layer_input=sizes["vocab_size"], **sizes),
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=128,
        num_hidden_layers=5,
        layer_types=[*["sliding_attention"] * 4, "full_attention"],
        sliding_window=ATTENTION_WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
        global_head_dim=64,
        final_logit_softcapping=None,  # so that they differ: large logits would all be the same
    )


def build_chunked_model(directory: Path) -> Path:
    """Write a model of six layers, four of which attend to chunks of ATTENTION_WINDOW tokens."""
    return _write(
        directory,
        Llama4ForCausalLM,
        Llama4TextConfig,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_hidden_layers=6,
        no_rope_layers=[1, 1, 0] * 2,  # the third has no positions, and attends to all
        attention_chunk_size=ATTENTION_WINDOW,
        attn_temperature_tuning=False,  # else it counts positions by its own cache
        num_local_experts=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # 512 bytes of KV per token and layer: 128 tokens per block
    )


def _write(
    directory: Path,
    model: type[Any],
    config: Callable[..., Any],
    seed: int = SEED,
    **sizes: Any,
) -> Path:
    """Write a model of these sizes, with the tokenizer that all of them share."""
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": WINDOW_TOKENS,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(EOS),
        "pad_token_id": None,
    }
    model(config(**common, **sizes)).float().save_pretrained(directory)
    return directory


def build_embedding_model(model_dir: Path, directory: Path, mode: str = "lasttoken") -> Path:
    """Copy a model and make it an embedding model, in the format of sentence-transformers.

    Its tokenizer closes every text with the end-of-turn token.
    """
    shutil.copytree(model_dir, directory)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    flags = {
        "pooling_mode_lasttoken": mode == "lasttoken",
        "pooling_mode_mean_tokens": mode == "mean",
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    prompts = {"default_prompt_name": "all", "prompts": {"all": EMBEDDING_PROMPT}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.convert_tokens_to_ids(EOS))]
    )
    tokenizer.save_pretrained(directory)
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
