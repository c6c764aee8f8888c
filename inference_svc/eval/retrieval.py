"""Part `retrieval`: questions about records that a truncation has left, for every method.

A context is filled with records until it overflows; the last overflow comes with the question. It
is a conversation: the user gives a few records at a time, the model acknowledges; without a chat
template it is plain text. All methods get the same questions about the same contexts. An answer is
right if each token of the number is the model's first choice: the same as greedy decoding that
gives exactly this number.

*Source:* CachedAttention, USENIX ATC'24, §4.3.5 and Table 2; LongEval's lines task (Li et al.,
2023), with which the demo model has been trained.
"""

# ruff: noqa: SIM905 - word lists read better as text
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from inference_svc.eval.eval_model import EvalModel
from inference_svc.eval.figures import MethodRetrieval, RetrievalReport
from inference_svc.eval.options import (
    Method,
    RetrievalOptions,
    check_truncation,
    dropped,
    with_sinks,
)
from inference_svc.eval.sequence import Sequence as Context
from inference_svc.runtime.turns.chat_text import TurnText
from shared.measuring.statistics import share
from shared.types.errors import InvalidInputError

ADJECTIVES = """
    amber ancient bitter bold brave brisk broad calm clever cold crimson curious damp dark deep
    dry eager early empty faint fierce free gentle giant glad golden grand great green grey
    happy heavy hidden hollow humble jolly keen kind large late light little lively lonely loud
    lucky mellow mighty modern narrow noble odd old pale plain proud quick quiet rapid rare red
    rich rough royal rusty sharp shy silent silver simple slow small soft solid steep still
    strange strong sunny sweet swift tall tame tender thin tiny vast warm wet white wide wild
    wise young
""".split()
NOUNS = """
    anchor apple arrow badge basket beach bear bell bird boat bottle branch bridge brook bucket
    cabin camel candle canyon castle cat chair cliff cloud coin comet crow desert door drum
    eagle engine falcon feather field flame flower forest fountain fox garden gate glass hammer
    harbor hill horse house island kettle kite lake lamp lantern leaf lion market meadow mirror
    mountain needle oak ocean orchard owl paper path pencil piano pilot planet pond prairie
    queen rabbit ribbon ridge river road rocket rose sail salmon school shadow sheep ship shore
    spoon star station stone storm stream table temple tiger tower train tree tunnel valley
    village violin wagon wall water whale wheel window wolf
""".split()
RECORDS_PER_TURN = 8
INTRO = "Remember these lines.\n"
ACKNOWLEDGEMENT = "Noted."
MOST_RECORDS = len(ADJECTIVES) * len(NOUNS)


@dataclass(frozen=True, slots=True)
class Record:
    """A name, and the line that an answer has to repeat."""

    key: str
    line: str


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens that are fed to ask for a record.

    Attributes:
        token_ids: the question, then the whole right answer.
        num_judged: number of last tokens that are judged: from the number's first one on. The
            tokens before are given, so that a model that words its answers differently is not
            punished.
    """

    token_ids: list[int]
    num_judged: int


def record_line(key: str, value: int) -> str:
    """Write a record in LongEval's style; the right answer to a question is the same line."""
    return f"line {key}: REGISTER_CONTENT is <{value}>"


def record_question(key: str) -> str:
    """Write the question for one record."""
    return f"Tell me the content of line {key}."


def distinct_keys(rng: random.Random, count: int) -> list[str]:
    """Draw `count` different names of an adjective and a noun."""
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i // len(ADJECTIVES)]}" for i in pairs]


def draw_records(seed: str) -> list[Record]:
    """Draw as many records as there are names, in an order that depends on the seed."""
    rng = random.Random(seed)  # noqa: S311 - draws need no secrecy
    keys = distinct_keys(rng, MOST_RECORDS)
    return [Record(key, record_line(key, draw_value(rng))) for key in keys]


def draw_value(rng: random.Random) -> int:
    """Draw a number of five digits."""
    return rng.randrange(10_000, 100_000)


class RecordText:
    """Encodes records and questions for one model."""

    def __init__(self, text: TurnText, bos_id: int | None) -> None:
        """Keep the encoder; `bos_id` begins a context without a chat template."""
        self._text = text
        self._bos_ids = [] if bos_id is None else [bos_id]

    def records(self, records: Sequence[Record], context_ids: Sequence[int]) -> list[int]:
        """Return the tokens that records add to a context, acknowledgement included."""
        return self.encode_message(
            INTRO + "\n".join(record.line for record in records), context_ids
        )

    def encode_message(self, message: str, context_ids: Sequence[int]) -> list[int]:
        """Return the tokens that a message adds to a context, acknowledgement included."""
        return self._encode_user(message, context_ids) + self._text.control.encode_plain(
            ACKNOWLEDGEMENT
        )

    def question(self, record: Record, context_ids: Sequence[int]) -> Question:
        """Return the question for a record, as it is added to a context, with the right answer."""
        asked = self._encode_user(record_question(record.key), context_ids)
        answer = self._text.control.encode_plain(record.line)
        other = self._text.control.encode_plain(_other_number(record.line))
        given = next(
            (i for i, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1]), 0
        )
        return Question(asked + answer, len(answer) - given)

    def _encode_user(self, said: str, context_ids: Sequence[int]) -> list[int]:
        if not self._text.chat_problem:
            return self._text.encode_chat([{"role": "user", "content": said}], context_ids)
        begin = [] if context_ids else self._bos_ids
        return begin + self._text.control.encode_plain(f"\n{said}\n")


def _other_number(line: str) -> str:
    """Replace every digit of a record's number by another one."""
    before, _, number = line.rpartition("<")
    turned = "".join(str((int(c) + 1) % 10) if c.isdigit() else c for c in number)
    return f"{before}<{turned}"


@dataclass
class _Answers:
    """The questions to one method: (record is in the context, answer is right), and their cost."""

    marks: list[tuple[bool, bool]] = field(default_factory=list)
    context_tokens: int = 0
    num_computed: int = 0
    elapsed_s: float = 0.0


def measure_retrieval(
    model: EvalModel, options: RetrievalOptions, on_progress: Callable[[str], None]
) -> RetrievalReport:
    """Ask every method all questions.

    Raises:
        InvalidInputError: the window does not hold the records of a turn twice, or holds more
            records than there are names.
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
    """The records that a context was filled with, dropped ones included."""

    records: Sequence[Record]
    num_fed: int


def fill(context: Context, prompts: RecordText, options: RetrievalOptions, seed: str) -> Filled:
    """Feed records, truncating as often as the options say, the last time at the end.

    Raises:
        InvalidInputError: see `measure_retrieval`.
    """
    records, num_given, num_fed = draw_records(seed), 0, 0
    for _ in range(options.num_overflows):
        while True:
            given = records[num_given : num_given + RECORDS_PER_TURN]
            piece = prompts.records(given, context.context_ids)
            if len(piece) > context.kv.free_tokens:
                break
            if num_given + RECORDS_PER_TURN > MOST_RECORDS:
                raise InvalidInputError(
                    f"there are names for only {MOST_RECORDS} records",
                    "give a smaller --window or fewer --overflows",
                )
            context.feed(piece, want="none")
            num_given += len(given)
            num_fed += len(piece)
        if len(context.context_ids) < len(piece):
            raise InvalidInputError(
                f"the window is too small for twice {RECORDS_PER_TURN} records of {len(piece)} "
                "tokens",
                "give a larger --window",
            )
        context.discard(dropped(options.truncation, len(context.context_ids)))
    return Filled(records[:num_given], num_fed)


def is_found(context: Context, question: Question) -> bool:
    """Return whether a question is answered right; the context is unchanged afterwards."""
    return check_answer(context, question).is_right


class AnswerCheck(NamedTuple):
    """The result of a question.

    Attributes:
        is_right: whether each token of the number is the model's first choice.
        log_probability: of the number, in nats.
    """

    is_right: bool
    log_probability: float


def check_answer(context: Context, question: Question) -> AnswerCheck:
    """Ask one question, and check the answer; the context is unchanged afterwards."""
    num_before = len(context.context_ids)
    logits = context.feed(question.token_ids)[-question.num_judged - 1 : -1]
    context.rewind(num_before)
    number = torch.tensor(question.token_ids[-question.num_judged :])
    losses = functional.cross_entropy(logits, number, reduction="none").double()
    return AnswerCheck(torch.equal(logits.argmax(dim=-1), number), -float(losses.sum()))


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
