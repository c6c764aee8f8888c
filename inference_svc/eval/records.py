"""Contexts of record lines, and questions about them, as token ids. Pure but for the tokenizer.

A context is a conversation: the user gives a few records at a time, the model acknowledges. Without
a chat template it is plain text.

*Source:* LongEval's lines task (Li et al., 2023), as the demo model has been trained with.
"""
# ruff: noqa: SIM905 - word lists read better as text

import random
from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.runtime.turns.chat_text import TurnText

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
    """A name, and the line that is to be found again."""

    key: str
    line: str


@dataclass(frozen=True, slots=True)
class Question:
    """What is fed to ask for a record.

    Attributes:
        token_ids: question, then the whole right answer.
        num_judged: of the last of them: those from the number's first on. What stands before is
            given, so that a model that words its answers otherwise is not punished.
    """

    token_ids: list[int]
    num_judged: int


def record_line(key: str, value: int) -> str:
    """Write one LongEval-style record; the right answer to a question is the same line again."""
    return f"line {key}: REGISTER_CONTENT is <{value}>"


def record_question(key: str) -> str:
    """Ask for one record."""
    return f"Tell me the content of line {key}."


def distinct_keys(rng: random.Random, count: int) -> list[str]:
    """Draw `count` different adjective-noun names."""
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i // len(ADJECTIVES)]}" for i in pairs]


def draw_records(seed: str) -> list[Record]:
    """Draw as many records as there are names, in an order of this seed."""
    rng = random.Random(seed)  # noqa: S311 - draws need no secrecy
    keys = distinct_keys(rng, MOST_RECORDS)
    return [Record(key, record_line(key, rng.randrange(10_000, 100_000))) for key in keys]


class RecordText:
    """Encodes records and questions for one model."""

    def __init__(self, text: TurnText, bos_id: int | None) -> None:
        """Keep the encoder; `bos_id` begins a context without a chat template."""
        self._text = text
        self._bos_ids = [] if bos_id is None else [bos_id]

    def records(self, records: Sequence[Record], context_ids: Sequence[int]) -> list[int]:
        """What a few records add to a context, acknowledgement included."""
        said = INTRO + "\n".join(record.line for record in records)
        return self._asked(said, context_ids) + self._text.encode_piece(ACKNOWLEDGEMENT)

    def question(self, record: Record, context_ids: Sequence[int]) -> Question:
        """What asking for a record adds, with the right answer."""
        asked = self._asked(record_question(record.key), context_ids)
        answer = self._text.encode_piece(record.line)
        other = self._text.encode_piece(_other_number(record.line))
        given = next(
            (i for i, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1]), 0
        )
        return Question(asked + answer, len(answer) - given)

    def _asked(self, said: str, context_ids: Sequence[int]) -> list[int]:
        if not self._text.chat_problem:
            return self._text.encode_chat([{"role": "user", "content": said}], context_ids)
        begin = [] if context_ids else self._bos_ids
        return begin + self._text.encode_piece(f"\n{said}\n")


def _other_number(line: str) -> str:
    """Replace every digit of a record's number by another."""
    before, _, number = line.rpartition("<")
    turned = "".join(str((int(c) + 1) % 10) if c.isdigit() else c for c in number)
    return f"{before}<{turned}"
