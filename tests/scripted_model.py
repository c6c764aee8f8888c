"""A model that says what it was told to: a real model, whose head maps each token to the next one.

Nothing of the context but its last token matters: attention adds next to nothing, the MLP nothing,
embeddings are orthogonal to one another. Each answer is cut into pieces, each a token that is
nowhere else. The last token of the prompt, which the chat template writes, is followed by the first
piece of an answer: so a template can say which answer it is to be.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.models import WINDOW_TOKENS, build_model

LEADS_BY = 8.0  # of the next token's logit
WHISPER = 0.05  # of attention: a model without any cannot be served


def build_scripted_model(
    directory: Path,
    answers: Mapping[str, Sequence[str]],
    template: str,
    special: Sequence[str] = (),
    window_tokens: int = WINDOW_TOKENS,
) -> Path:
    """Write a model that gives these answers.

    Args:
        directory: where to.
        answers: by the last token of the prompt, pieces which become tokens: all different, none
            of them in any prompt.
        template: the chat template.
        special: names of special tokens, of the template or among the pieces.
        window_tokens: most tokens of a context.
    """
    build_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"extra_special_tokens": list(special)})
    pieces = [piece for answer in answers.values() for piece in answer]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    _scripted(tokenizer, answers, window_tokens).save_pretrained(directory)
    return directory


def _scripted(
    tokenizer: PreTrainedTokenizerBase, answers: Mapping[str, Sequence[str]], window_tokens: int
) -> LlamaForCausalLM:
    size = 1 << (len(tokenizer) - 1).bit_length()
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= WHISPER
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        model.lm_head.weight.zero_()
        for last, answer in answers.items():
            path = [tokenizer.convert_tokens_to_ids(piece) for piece in (last, *answer)]
            for token, following in zip(path, [*path[1:], tokenizer.eos_token_id], strict=True):
                model.lm_head.weight[following, token] = LEADS_BY
    return model
