"""Contexts of record lines, and questions about them, as token ids. Pure but for the tokenizer.

A context is a conversation: the user gives a few records at a time, the model acknowledges. Without
a chat template it is plain text.

*Source:* LongEval's lines task (Li et al., 2023), as `demo/training/retrieval.py` generates it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.demo.training.retrieval import (
    ADJECTIVES,
    NOUNS,
    distinct_keys,
    record_line,
    record_question,
)
from inference_svc.runtime.turns.chat_text import TurnText

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
