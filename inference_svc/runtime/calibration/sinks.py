"""Attention sinks: how many first tokens a model depends on, found by running it.

Many models put unneeded attention on the first tokens of a context. They break when these tokens
are dropped while KV that was computed over them stays. Other models, above all small ones, do not.
A fixed text is computed once. Then a part of it is dropped as an overflow does, behind the first 0,
4, 8 and 16 tokens, and the model's next predictions are compared with those over the whole text.
Models with sinks are several times further off without them, models without sinks equally far in
each case. The least number that is about as good as the best is chosen.

Cost: TEXT_TOKENS + (number of CANDIDATES + 1) * NEXT_TOKENS tokens of prefill, 304, and their KV
during the measurement. Deterministic.

*Source:* StreamingLLM, "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.,
ICLR 2024): four suffice for most models, fewer save nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inference_svc.core.ranges import Range
from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration

CANDIDATES = (0, USUAL_SINKS, 8, 16)  # ascending
TEXT_TOKENS = 224
NEXT_TOKENS = 16
LEAST_TEXT_TOKENS = 64  # half of a shorter text is too little to predict from
# SmolLM2-135M is 36 times as far off without sinks as at best, models without any 1.0 to 1.1 times.
MOST_TIMES_THE_BEST = 1.5
NEGLIGIBLE = 1e-3  # nats; rounding, in models whose predictions do not depend on the text
TEXT = (
    "The bridge at the lower end of the valley was built in the year of the great flood, when the "
    "old ferry had been carried away and nobody wanted to pay for a new one. Three villages shared "
    "the cost. The first gave the timber, because its forests reached down to the water; the "
    "second sent forty men for two summers; and the third, which had neither wood nor hands to "
    "spare, fed everybody who came. Stones for the piers were taken from a quarry on the northern "
    "slope, where the marks of the chisels can be seen to this day. For a hundred and twelve years "
    "carts, cattle and soldiers crossed it without an accident worth writing down. Then the "
    "railway came. Engineers measured the arches, shook their heads, and asked for iron. The "
    "council argued through one whole winter about the money, about the view, and about whose name "
    "should stand on the plate, until in spring a second flood settled the matter for them. What "
    "is left of the old bridge stands a little upstream: two piers, a piece of the roadway between "
    "them, and a bench from which one can watch the trains. Children are told that the mason who "
    "set the last stone hid a silver coin behind it, and every few years somebody brings a hammer "
    "to look. Nobody has found it. The railway company, which owns the ground, has put up a fence, "
    "and the fence has a hole in it that is repaired each autumn and open again by May."
)


def find_sinks(loaded: LoadedModel, calibration: Calibration) -> int:
    """Return the number of first tokens of a context that should never be dropped.

    Args:
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.

    Returns:
        One of CANDIDATES. USUAL_SINKS if it cannot be measured: positions are not decoupled, so
        that no token stays behind a dropped one; the window or the text is too short; or the
        model's logits are not finite.
    """
    token_ids = _token_ids(loaded)
    num_tokens = min(TEXT_TOKENS, len(token_ids) - NEXT_TOKENS)
    if calibration.positions != "decoupled" or num_tokens < LEAST_TEXT_TOKENS:
        return USUAL_SINKS
    distances = sink_distances(loaded, calibration, token_ids[: num_tokens + NEXT_TOKENS])
    if not all(map(math.isfinite, distances)):
        return USUAL_SINKS
    most = MOST_TIMES_THE_BEST * max(NEGLIGIBLE, min(distances))
    return next(number for number, far in zip(CANDIDATES, distances, strict=True) if far <= most)


@torch.inference_mode()
def sink_distances(
    loaded: LoadedModel, calibration: Calibration, token_ids: Sequence[int]
) -> list[float]:
    """Measure how predictions change after half of a text is dropped, by the number of sinks kept.

    Args:
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration, with decoupled positions.
        token_ids: the text, and NEXT_TOKENS tokens after it.

    Returns:
        For each of CANDIDATES the Kullback-Leibler divergence in nats, averaged over the next
        tokens, between the predictions over the whole text and those over the kept part.
    """
    num_tokens = len(token_ids) - NEXT_TOKENS
    text_ids, next_ids = list(token_ids[:num_tokens]), list(token_ids[num_tokens:])
    runner = ModelRunner(loaded, calibration)
    pool = new_pool(loaded, calibration, (2 + len(CANDIDATES)) * len(token_ids))
    whole, stored = pool.new_kv(len(token_ids)), pool.new_write_buffer(0, num_tokens)
    runner.step([Chunk(whole, text_ids, want_logits=False, write_buffer=stored)])
    kvs = [whole]
    for number in CANDIDATES:
        kvs.append(pool.new_kv(len(token_ids)))
        kept = [(0, number), (number + num_tokens // 2, num_tokens)]
        embed_kept(stored, kept, kvs[-1], calibration)
    chunks = [Chunk(kv, next_ids, want_logits=True, want_all=True) for kv in kvs]
    predicted = torch.split(runner.step(chunks).log_softmax(dim=-1), NEXT_TOKENS)
    return [_divergence(predicted[0], truncated) for truncated in predicted[1:]]


@torch.inference_mode()
def embed_kept(
    stored: WriteBuffer, kept: Sequence[Range], kv: SequenceKv, calibration: Calibration
) -> None:
    """Fill KV with kept tokens of a buffer like a load: embedded at positions from 0 on.

    Args:
        stored: keys before RoPE, and values, from position 0 on.
        kept: ranges of its tokens, in order; at least one.
        kv: KV with room for them, which is overwritten.
        calibration: the model's calibration, with decoupled positions.
    """
    index = torch.cat([torch.arange(start, end) for start, end in kept])
    index = index.to(stored.device)
    for layer_index, recipe in enumerate(calibration.layers):
        for component, tokens, kept_tokens in zip(
            recipe.components, stored.components, kv.components, strict=False
        ):
            unrotated = tokens[layer_index].index_select(0, index)  # [kept tokens, kv_heads, dim]
            with kept_tokens.filling(layer_index, 0, len(index)) as target:
                target.copy_(component.embed(unrotated, 0))
    kv.num_tokens = len(index)


def _token_ids(loaded: LoadedModel) -> list[int]:
    """Encode the text like the beginning of a session; without a tokenizer, make up ids."""
    most = min(TEXT_TOKENS + NEXT_TOKENS, loaded.context_window)
    token_ids: list[int] = []
    if loaded.tokenizer is not None:
        token_ids = loaded.tokenizer(TEXT, verbose=False).input_ids
    else:
        token_ids = [(37 * index + 11) % loaded.vocab_size for index in range(most)]
    return [token_id for token_id in token_ids[:most] if token_id < loaded.vocab_size]


def _divergence(whole: Tensor, truncated: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence in nats of log-probabilities [tokens, vocab]."""
    return float((whole.exp() * (whole - truncated)).sum(dim=-1).mean())
