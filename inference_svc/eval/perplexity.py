"""Part `perplexity`: text streamed through a window that overflows, by every method.

Each time the window is full its oldest part is dropped, and the text continues. Every token but the
first is predicted once. All methods compute the first window alike.

*Source:* CachedAttention, USENIX ATC'24, §4.3.5 and Table 1.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from inference_svc.eval.eval_model import EvalModel, EvalText, UnusableTextError, load_text
from inference_svc.eval.figures import MethodPerplexity, Perplexity, PerplexityReport
from inference_svc.eval.options import (
    REFERENCE,
    Method,
    PerplexityOptions,
    Truncation,
    check_truncation,
    dropped,
    with_sinks,
)
from inference_svc.eval.sequence import Sequence as Context
from shared.measuring.statistics import Interval, mean


@dataclass(frozen=True)
class Streamed:
    """The results of one method on a text.

    Attributes:
        losses: [tokens - 1] float64, -ln p of every token but the first, in nats.
        num_computed: number of tokens that went through the model.
        num_overflows: number of truncations.
        elapsed_s: seconds it took.
    """

    losses: Tensor
    num_computed: int
    num_overflows: int
    elapsed_s: float


def measure_perplexity(
    model: EvalModel, options: PerplexityOptions, on_progress: Callable[[str], None]
) -> PerplexityReport:
    """Stream a text by every method.

    Raises:
        UnusableTextError: the text does not fill the window, so that nothing overflows.
        InvalidInputError: the truncation is invalid, see `check_truncation`.
    """
    truncation = with_sinks(options.truncation, model.sink_tokens)
    ratio = truncation.ratio if options.reference_ratio is None else options.reference_ratio
    of_reference = replace(truncation, ratio=ratio)
    for checked in (truncation, of_reference):
        check_truncation(checked, model.window_tokens)
    text = load_text(options.text, model, options.num_words)
    if len(text.token_ids) <= model.window_tokens + 1:
        raise UnusableTextError(
            f"{options.text} has {len(text.token_ids)} tokens, which do not overflow a window "
            f"of {model.window_tokens}",
            "give a longer text or a smaller --window",
        )
    streamed: dict[Method, Streamed] = {}
    for method in options.methods:
        on_progress(f"{method}: {len(text.token_ids)} tokens")
        with Context(model, method) as context:
            used = of_reference if method == REFERENCE else truncation
            streamed[method] = stream(context, text.token_ids, used)
    piece_tokens = int(max(truncation.ratio, of_reference.ratio) * model.window_tokens)
    return PerplexityReport(
        text=options.text.name,
        num_tokens=len(text.token_ids) - 1,
        num_words=text.num_words,
        window_tokens=model.window_tokens,
        truncation=truncation,
        reference_ratio=of_reference.ratio,
        methods=tuple(
            _figures(method, streamed, text, model.window_tokens, piece_tokens)
            for method in options.methods
        ),
    )


def stream(context: Context, token_ids: Sequence[int], truncation: Truncation) -> Streamed:
    """Feed a text to an empty context, and truncate it whenever it is full."""
    losses: list[Tensor] = []
    num_done = num_overflows = 0
    started = time.monotonic()
    while num_done < len(token_ids) - 1:
        if not context.kv.free_tokens:
            context.discard(dropped(truncation, len(context.context_ids)))
            num_overflows += 1
        end = min(num_done + context.kv.free_tokens, len(token_ids) - 1)
        logits = context.feed(token_ids[num_done:end])
        targets = torch.tensor(token_ids[num_done + 1 : end + 1])
        losses.append(functional.cross_entropy(logits, targets, reduction="none").double())
        num_done = end
    elapsed_s = time.monotonic() - started
    return Streamed(torch.cat(losses), context.num_computed, num_overflows, elapsed_s)


def perplexity_of(losses: Tensor, tokens_per_word: float) -> Perplexity:
    """Compute perplexities from losses in nats."""
    nats = float(losses.mean())
    return Perplexity(nats, math.exp(nats), math.exp(nats * tokens_per_word))


def _figures(
    method: Method,
    streamed: dict[Method, Streamed],
    text: EvalText,
    window_tokens: int,
    piece_tokens: int,
) -> MethodPerplexity:
    found = streamed[method]
    tokens_per_word = len(found.losses) / text.num_words
    reference = streamed.get(REFERENCE)

    def to_reference(first_token: int) -> Interval | None:
        if reference is None or len(reference.losses) - first_token < piece_tokens:
            return None
        losses, others = found.losses[first_token:], reference.losses[first_token:]
        return ratio_of(losses, others, tokens_per_word, piece_tokens)

    return MethodPerplexity(
        method=method,
        all_tokens=perplexity_of(found.losses, tokens_per_word),
        after_overflow=perplexity_of(found.losses[window_tokens:], tokens_per_word),
        to_reference=to_reference(0),
        after_to_reference=to_reference(window_tokens),
        num_computed=found.num_computed,
        num_overflows=found.num_overflows,
        elapsed_s=found.elapsed_s,
    )


def ratio_of(
    losses: Tensor, reference: Tensor, tokens_per_word: float, piece_tokens: int
) -> Interval:
    """Divide two perplexities per word of the same text.

    The interval treats pieces of the text as independent, and ignores an incomplete last one.
    """
    differences = losses - reference
    pieces = differences[: len(differences) // piece_tokens * piece_tokens].view(-1, piece_tokens)
    spread = mean(pieces.mean(dim=1).tolist())
    value = float(differences.mean())
    return Interval(
        _exp((value - (spread.value - spread.low)) * tokens_per_word),
        _exp(value * tokens_per_word),
        _exp((value + (spread.high - spread.value)) * tokens_per_word),
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the interval of a single piece has no upper end
