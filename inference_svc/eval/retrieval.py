"""Part `retrieval`: records that a truncation has left are asked for, by every method.

A context is filled with records until it overflows; the last overflow comes with the question. All
methods are asked the same questions about the same contexts. An answer is right if each token of
the number is the model's first choice: the same as greedy decoding giving exactly that number.

*Source:* CachedAttention, USENIX ATC'24, §4.3.5 and Table 2 (LongEval).
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inference_svc.eval.eval_model import EvalModel
from inference_svc.eval.figures import MethodRetrieval, RetrievalReport
from inference_svc.eval.options import (
    Method,
    RetrievalOptions,
    check_truncation,
    dropped,
    with_sinks,
)
from inference_svc.eval.records import (
    MOST_RECORDS,
    RECORDS_PER_TURN,
    Question,
    Record,
    RecordText,
    draw_records,
)
from inference_svc.eval.sequence import Sequence as Context
from shared.measuring.statistics import share
from shared.types.errors import InvalidInputError


@dataclass
class _Answers:
    """What one method was asked, and got right: (record is in the context, answer is right)."""

    marks: list[tuple[bool, bool]] = field(default_factory=list)
    context_tokens: int = 0
    num_computed: int = 0
    elapsed_s: float = 0.0


def measure_retrieval(
    model: EvalModel, options: RetrievalOptions, on_progress: Callable[[str], None]
) -> RetrievalReport:
    """Ask every method.

    Raises:
        InvalidInputError: the window does not hold the records of a turn twice, or more than there
            are names for.
    """
    options = replace(options, truncation=with_sinks(options.truncation, model.sink_tokens))
    check_truncation(options.truncation, model.window_tokens)
    answers: dict[Method, _Answers] = {method: _Answers() for method in options.methods}
    for index in range(options.num_contexts):
        on_progress(f"context {index + 1}/{options.num_contexts}")
        for method in options.methods:
            _ask(model, method, options, f"{options.seed}/{index}", answers[method])
    fed = max(each.context_tokens for each in answers.values())
    return RetrievalReport(
        num_contexts=options.num_contexts,
        num_questions=options.num_questions,
        num_overflows=options.num_overflows,
        context_tokens=fed / options.num_contexts,
        seed=options.seed,
        window_tokens=model.window_tokens,
        truncation=options.truncation,
        methods=tuple(_figures(method, found) for method, found in answers.items()),
    )


def _ask(
    model: EvalModel, method: Method, options: RetrievalOptions, seed: str, answers: _Answers
) -> None:
    """Fill one context and ask all its questions."""
    started = time.monotonic()
    prompts = RecordText(model.text, model.loaded.tokenizer.bos_token_id)  # type: ignore[union-attr]
    with Context(model, method) as context:
        asked_of = fill(context, prompts, options, seed)
        answers.context_tokens += asked_of.num_fed
        left = model.loaded.tokenizer.decode(context.context_ids)  # type: ignore[union-attr]
        rng = random.Random(f"questions/{seed}")  # noqa: S311 - draws need no secrecy
        for record in rng.sample(
            asked_of.records, min(options.num_questions, len(asked_of.records))
        ):
            is_right = is_found(context, prompts.question(record, context.context_ids))
            answers.marks.append((record.line in left, is_right))
        answers.num_computed += context.num_computed
    answers.elapsed_s += time.monotonic() - started


@dataclass(frozen=True)
class Filled:
    """What a context was filled with, dropped records included."""

    records: Sequence[Record]
    num_fed: int


def fill(context: Context, prompts: RecordText, options: RetrievalOptions, seed: str) -> Filled:
    """Feed records, truncating as often as asked for, the last time at the end.

    Raises:
        InvalidInputError: see `measure_retrieval`.
    """
    records, num_given, num_fed = draw_records(seed), 0, 0
    for _ in range(options.num_overflows):
        while True:
            given = records[num_given : num_given + RECORDS_PER_TURN]
            piece = prompts.records(given, context.context_ids)
            if len(piece) > context.free_tokens:
                break
            if num_given + RECORDS_PER_TURN > MOST_RECORDS:
                raise InvalidInputError(
                    f"there are names for {MOST_RECORDS} records only",
                    "give a smaller --window or fewer --overflows",
                )
            context.feed(piece, want="none")
            num_given += len(given)
            num_fed += len(piece)
        if len(context.context_ids) < len(piece):
            raise InvalidInputError(
                f"the window does not hold {RECORDS_PER_TURN} records of {len(piece)} tokens twice",
                "give a larger --window",
            )
        context.discard(dropped(options.truncation, len(context.context_ids)))
    return Filled(records[:num_given], num_fed)


def is_found(context: Context, question: Question) -> bool:
    """Ask one question; the context is afterwards as it was."""
    num_before = len(context.context_ids)
    logits = context.feed(question.token_ids)
    choices = logits[-question.num_judged - 1 : -1].argmax(dim=-1).tolist()
    context.rewind(num_before)
    return bool(choices == question.token_ids[-question.num_judged :])


def _figures(method: Method, answers: _Answers) -> MethodRetrieval:
    kept = [is_right for is_kept, is_right in answers.marks if is_kept]
    return MethodRetrieval(
        method=method,
        kept=share(sum(kept), len(kept)),
        overall=share(sum(is_right for _, is_right in answers.marks), len(answers.marks)),
        num_kept=len(kept),
        num_asked=len(answers.marks),
        num_computed=answers.num_computed,
        elapsed_s=answers.elapsed_s,
    )
