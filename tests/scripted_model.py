"""A model with scripted answers: a real one, whose head maps each token to the next one.

Only the last token of the context matters: attention adds next to nothing, the MLP nothing, and
the embeddings are orthogonal. An answer is cut into pieces, each of which is a token
that occurs nowhere else. The last token of the prompt selects the first piece.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.models import WINDOW_TOKENS

LEADS_BY = 8.0  # of the next token's logit
WHISPER = 0.05  # of the attention weights: a model without attention cannot be served


def build_scripted_model(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    answers: Mapping[int, Sequence[str]],
    end: str,
    window_tokens: int = WINDOW_TOKENS,
) -> Path:
    """Write a model that gives these answers.

    Args:
        directory: where to.
        tokenizer: with its chat template; gets the pieces as tokens.
        answers: by the last token of the prompt, the pieces of what follows: each piece is one of
            the tokenizer's tokens, or becomes one; all are different, and none is in any prompt.
        end: the token that ends answers.
        window_tokens: most tokens of a context.
    """
    pieces = [piece for answer in answers.values() for piece in answer]
    new = [piece for piece in pieces if piece not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in new])
    tokenizer.save_pretrained(directory)
    size = 1 << (len(tokenizer) - 1).bit_length()
    end_id = tokenizer.convert_tokens_to_ids(end)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=window_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=end_id)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= WHISPER
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        for last, answer in answers.items():
            path = [last, *map(tokenizer.convert_tokens_to_ids, answer)]
            for token, following in zip(path, [*path[1:], end_id], strict=True):
                model.lm_head.weight[following, token] = LEADS_BY
    model.save_pretrained(directory)
    return directory


def last_of_prompt(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that a tokenizer's chat template writes last, before each answer."""
    question = [{"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    last: int = tokenizer(text, add_special_tokens=False).input_ids[-1]
    return last
