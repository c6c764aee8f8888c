"""Part `compression`: quality when a policy has dropped part of a context.

A context is compressed once, as the service does when a turn is over, and then continued:

- text: a piece of it is the context; the perplexity of the tokens behind it is measured;
- records, asked after: the context is records; then one is asked for, as in a next turn;
- records, asked before: the question is the end of the compressed context, as in SnapKV's own
  experiments, so that policies with scores know what is needed.

All policies get the same contexts and questions. The tokens that the service protects are protected
here: the model's sinks, special tokens, and the last token, which has not been computed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inference_svc.core.compression import (
    CompressionPolicy,
    check_compression,
    make_compression,
    special_tokens,
)
from inference_svc.core.ranges import num_in
from inference_svc.eval.eval_model import EvalModel, EvalText, UnusableTextError, load_text
from inference_svc.eval.figures import CompressedQuality, CompressionReport
from inference_svc.eval.options import CompressionOptions
from inference_svc.eval.perplexity import perplexity_of, ratio_of
from inference_svc.eval.retrieval import (
    RECORDS_PER_TURN,
    Question,
    Record,
    RecordText,
    draw_records,
    is_found,
)
from inference_svc.eval.sequence import Sequence as Context
from inference_svc.runtime.compute.attention_scores import keeper_for
from shared.measuring.statistics import share
from shared.types.errors import InvalidInputError

MOST_ASKED_TOKENS = 64  # room for a question and its answer behind a context


@dataclass
class _PolicyResults:
    """The results of one policy at one ratio so far."""

    policy: CompressionPolicy
    kept: list[float] = field(default_factory=list)  # share of each piece of text
    losses: list[Tensor] = field(default_factory=list)  # [next tokens] of each, in nats
    before: list[bool] = field(default_factory=list)
    after: list[bool] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)  # CPU time of computing each context


class _Compressed(NamedTuple):
    """A context that a policy has compressed; its last token is still to be fed."""

    found: _PolicyResults
    context: Context
    kept: float


def measure_compression(
    model: EvalModel, options: CompressionOptions, on_progress: Callable[[str], None]
) -> CompressionReport:
    """Compress every context by every policy.

    Raises:
        UnusableTextError: the text is too short.
        InvalidCompressionError: no such policy, a ratio out of range, or a model without queries.
        InvalidInputError: the window does not hold a context and the tokens behind it.
    """
    found = [_PolicyResults(policy) for policy in _policies(options, model)]
    text = load_text(options.text, model)
    _check(options, text, model)
    records = RecordText(model.text, text.token_ids[0])
    for index in range(options.num_contexts):
        on_progress(f"context {index + 1}/{options.num_contexts}")
        _resume(model, options, text, index, found)
        _ask(model, options, records, f"{options.seed}/{index}", found)
    token_bytes = next(iter(model.calibrations.values())).layout.token_bytes
    return CompressionReport(
        text=options.text.name,
        num_contexts=options.num_contexts,
        context_tokens=options.context_tokens,
        num_tokens=options.num_contexts * options.next_tokens,
        num_asked=len(found[0].after),
        token_bytes=token_bytes,
        seed=options.seed,
        rows=tuple(_figures(each, found[0], text, options) for each in found),
    )


def _policies(options: CompressionOptions, model: EvalModel) -> list[CompressionPolicy]:
    """List the policy that keeps the whole context, then each policy by falling ratio."""
    ratios = sorted({ratio for ratio in options.ratios if ratio != 1}, reverse=True)
    chosen = [make_compression("sinks_recent", 1.0)]
    chosen += [make_compression(name, ratio) for name in options.policies for ratio in ratios]
    policies = [policy for policy in chosen if policy is not None]
    for policy in policies:
        check_compression(policy, next(iter(model.calibrations.values())).mode)
    return policies


def _check(options: CompressionOptions, text: EvalText, model: EvalModel) -> None:
    behind_tokens = max(options.next_tokens, MOST_ASKED_TOKENS)
    if 1 + options.context_tokens + behind_tokens > model.window_tokens:
        raise InvalidInputError(
            f"a context of {options.context_tokens} tokens and the {behind_tokens} after it "
            f"exceed the window of {model.window_tokens}",
            "give a smaller --context or --next",
        )
    num_needed = 1 + options.num_contexts * (options.context_tokens + options.next_tokens)
    if len(text.token_ids) < num_needed:
        raise UnusableTextError(
            f"{options.text} has {len(text.token_ids)} tokens, but {num_needed} are needed",
            "give a longer text, or fewer --contexts",
        )


def _compress(
    model: EvalModel, token_ids: list[int], found: list[_PolicyResults]
) -> Iterator[_Compressed]:
    """Yield one context compressed by each policy; use it before the next one.

    The context is computed once for each kind of scores.
    """
    special_ids = model.text.frame_tokens.ids
    num_tokens = len(token_ids)
    protected = (
        (0, model.sink_tokens),
        *special_tokens(token_ids, special_ids),
        (num_tokens - 1, num_tokens),
    )
    for needs in ("nothing", "window", "accumulated"):
        group = [each for each in found if each.policy.needs == needs]
        if not group:
            continue
        keeper = keeper_for(needs, group[0].policy.window_tokens, num_tokens - 1)
        with Context(model, "ca") as whole:
            started = time.process_time()
            whole.feed(token_ids[:-1], want="none", scores=keeper)
            prefill_s = time.process_time() - started
            scores = None if keeper is None else keeper.scores()
            for each in group:
                with Context(model, "ca") as context:
                    each.prefill_s.append(prefill_s)
                    context.copy_from(whole)
                    ranges = each.policy.drop(num_tokens, scores, protected)
                    if ranges:
                        context.discard(ranges)
                    yield _Compressed(each, context, 1 - num_in(ranges) / num_tokens)


def _resume(
    model: EvalModel,
    options: CompressionOptions,
    text: EvalText,
    index: int,
    found: list[_PolicyResults],
) -> None:
    """Compress one piece of the text, and predict the text behind it."""
    first = 1 + index * (options.context_tokens + options.next_tokens)
    end = first + options.context_tokens
    token_ids = [text.token_ids[0], *text.token_ids[first:end]]
    targets = torch.tensor(text.token_ids[end : end + options.next_tokens])
    for each, context, kept in _compress(model, token_ids, found):
        logits = context.feed([token_ids[-1], *targets[:-1].tolist()])
        each.kept.append(kept)
        each.losses.append(functional.cross_entropy(logits, targets, reduction="none").double())


def _ask(
    model: EvalModel,
    options: CompressionOptions,
    text: RecordText,
    seed: str,
    found: list[_PolicyResults],
) -> None:
    """Compress one context of records, without and with each question, and ask the questions."""
    records, token_ids = _fill(text, options.context_tokens, seed)
    rng = Random(f"questions/{seed}")  # noqa: S311 - draws need no secrecy
    asked = rng.sample(records, min(options.num_questions, len(records)))
    questions = [text.question(record, token_ids) for record in asked]
    for each, context, _ in _compress(model, token_ids, found):
        context.feed(token_ids[-1:], want="none")
        each.after += [is_found(context, question) for question in questions]
    for record, question in zip(asked, questions, strict=True):
        num_answered = len(model.text.control.encode_plain(record.line))
        prompt_ids = token_ids + question.token_ids[:-num_answered]
        answer_ids = question.token_ids[-num_answered:]
        answer = Question([prompt_ids[-1], *answer_ids], question.num_judged)
        for each, context, _ in _compress(model, prompt_ids, found):
            each.before.append(is_found(context, answer))


def _fill(text: RecordText, most_tokens: int, seed: str) -> tuple[list[Record], list[int]]:
    """Draw records that fill a context; return them and its tokens.

    Raises:
        InvalidInputError: there is not even room for those of one turn.
    """
    records, num_given = draw_records(seed), 0
    token_ids: list[int] = []
    while True:
        piece = text.records(records[num_given : num_given + RECORDS_PER_TURN], token_ids)
        if len(token_ids) + len(piece) > most_tokens:
            break
        token_ids += piece
        num_given += RECORDS_PER_TURN
    if not num_given:
        raise InvalidInputError(
            f"{RECORDS_PER_TURN} records do not fit into {most_tokens} tokens",
            "give a larger --context",
        )
    return records[:num_given], token_ids


def _figures(
    found: _PolicyResults, whole: _PolicyResults, text: EvalText, options: CompressionOptions
) -> CompressedQuality:
    losses, reference = torch.cat(found.losses), torch.cat(whole.losses)
    return CompressedQuality(
        policy="none" if found is whole else found.policy.name,
        keep_ratio=found.policy.keep_ratio,
        kept=sum(found.kept) / len(found.kept),
        next_tokens=perplexity_of(losses, (len(text.token_ids) - 1) / text.num_words),
        to_whole=ratio_of(losses, reference, 1.0, options.next_tokens),
        prefill=median(ours / s for ours, s in zip(found.prefill_s, whole.prefill_s, strict=True)),
        asked_before=share(sum(found.before), len(found.before)),
        asked_after=share(sum(found.after), len(found.after)),
    )
