"""A conversation about records that is edited, and the questions asked about it afterwards.

The user gives a few records in each message, the model acknowledges. The message in the middle is
edited. The one behind it names one of its records, without its value, as later messages of a
conversation do: if anything behind the edit still carries the old value, it is this message. Then
come messages that stay. The kinds of edits (`edits.KINDS`) do the following:

    clear    the message, and at times the one before it, is replaced by CLEARED
    replace  the named record gets another value, and a record is added or removed
    compact  all messages but the first, up to the edited one, become a summary with one record
    delete   the message is removed with its acknowledgement

The questions are about a record behind the edit, one that the edit has inserted, and the named one,
whose old value should not be in any answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from inference_svc.core.ranges import Range
from inference_svc.eval.edits import CLEARED, SUMMARY, Edit, Kind, Replacement
from inference_svc.eval.retrieval import (
    INTRO,
    Record,
    RecordText,
    draw_records,
    draw_value,
    record_line,
)
from shared.types.errors import InvalidInputError

RECORDS_PER_MESSAGE = 4
LEAST_MESSAGES = 4  # the first, the edited one, the one that names a record, one that stays


@dataclass(frozen=True)
class Conversation:
    """A conversation about records before any edit.

    Attributes:
        token_ids: its tokens, acknowledgements included.
        messages: the records of each message, and the range of its tokens, in order.
        named: the record of the edited message that a later message names.
        spare: records that no message has.
    """

    token_ids: list[int]
    messages: Sequence[tuple[Sequence[Record], Range]]
    named: Record
    spare: Sequence[Record]

    @property
    def edited(self) -> int:
        """Index of the message that is edited."""
        return (len(self.messages) - 1) // 2


@dataclass(frozen=True)
class EditQuestions:
    """An edit, and the records that are asked for behind it.

    Attributes:
        edit: the edit.
        kept: a record behind the edit.
        brought: a record that the edit has inserted; None: it inserts none.
        old: the named record, with the value that is no longer in the context.
    """

    edit: Edit
    kept: Record
    brought: Record | None
    old: Record


def converse(text: RecordText, most_tokens: int, seed: str) -> Conversation:
    """Draw a conversation that fills a context.

    Raises:
        InvalidInputError: it has no room for messages before, in and behind an edit.
    """
    records = draw_records(seed)
    rng = Random(f"named/{seed}")  # noqa: S311 - draws need no secrecy
    num_messages = _num_messages(text, records, most_tokens)
    edited = (num_messages - 1) // 2
    token_ids: list[int] = []
    messages: list[tuple[Sequence[Record], Range]] = []
    named = records[0]
    for index in range(num_messages):
        start = len(token_ids)
        given: Sequence[Record] = ()
        if index == edited + 1:
            token_ids += text.encode_message(f"Look at line {named.key} once more.", token_ids)
        else:
            given = _given(records, index)
            token_ids += text.encode_message(_message(given), token_ids)
        if index == edited:
            named = rng.choice(given)
        messages.append((given, (start, len(token_ids))))
    return Conversation(token_ids, messages, named, records[num_messages * RECORDS_PER_MESSAGE :])


def _num_messages(text: RecordText, records: Sequence[Record], most_tokens: int) -> int:
    """Return how many messages fit in a context; the naming one is shorter than assumed here."""
    token_ids: list[int] = []
    number = 0
    while len(token_ids) <= most_tokens:
        token_ids += text.encode_message(_message(_given(records, number)), token_ids)
        number += 1
    if number <= LEAST_MESSAGES:
        raise InvalidInputError(
            f"{LEAST_MESSAGES} messages of {RECORDS_PER_MESSAGE} records do not fit into "
            f"{most_tokens} tokens",
            "give a larger --context",
        )
    return number - 1


def _given(records: Sequence[Record], message: int) -> Sequence[Record]:
    return records[message * RECORDS_PER_MESSAGE : (message + 1) * RECORDS_PER_MESSAGE]


def _message(records: Sequence[Record]) -> str:
    return INTRO + "\n".join(record.line for record in records)


def edit_records(kind: Kind, said: Conversation, text: RecordText, seed: str) -> EditQuestions:
    """Draw an edit of a conversation, and the questions behind it."""
    rng = Random(f"{kind}/{seed}")  # noqa: S311 - draws need no secrecy
    given, (start, end) = said.messages[said.edited]
    kept = rng.choice([each for records, _ in said.messages[said.edited + 2 :] for each in records])
    others = [record for record in given if record != said.named]
    spans, brought, message = [(start, end)], None, ""
    match kind:
        case "clear":
            message = CLEARED
            if said.edited > 1 and rng.random() < 1 / 2:
                spans.insert(0, said.messages[said.edited - 1][1])
        case "replace":
            brought = _with_other_value(said.named, rng)
            changed = [brought, *others[1:]] if rng.random() < 1 / 2 else [brought, *others]
            if len(changed) == len(given):
                changed.append(said.spare[0])
            message = _message(rng.sample(changed, len(changed)))
        case "compact":
            brought = rng.choice(others)
            spans = [(said.messages[1][1][0], end)]
            message = SUMMARY + brought.line
        case "delete":
            pass
    replacements = [
        Replacement(
            span, text.encode_message(message, said.token_ids[: span[0]]) if message else ()
        )
        for span in spans
    ]
    return EditQuestions(Edit(tuple(replacements)), kept, brought, said.named)


def _with_other_value(record: Record, rng: Random) -> Record:
    """Draw a value with another first digit, which shows whether an answer gives the old one."""
    while True:
        line = record_line(record.key, draw_value(rng))
        if line.rpartition("<")[2][0] != record.line.rpartition("<")[2][0]:
            return Record(record.key, line)
