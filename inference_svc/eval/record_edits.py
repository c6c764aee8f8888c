"""A conversation about records that is edited, and what is asked about it afterwards.

The user gives a few records in each message, the model acknowledges. The message in the middle is
what is edited; the one behind it names one of its records, without its value, as later messages of
a conversation do: if anything behind an edit still knows the old value, it is there. Then come
messages that stay. What the kinds of edits (`edits.KINDS`) make of it:

    clear    the message, and at times the one before it, say CLEARED
    replace  the named record has another value, and a record goes or comes
    compact  all messages but the first, up to the edited one, are a summary with one of its records
    delete   the message goes, and its acknowledgement

Asked are: a record behind the edit; one that the edit has brought; and the named one, whose old
value nobody should say any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from inference_svc.core.discards import Range
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
LEAST_MESSAGES = 4  # the first, the one that is edited, the one that names a record, one that stays


@dataclass(frozen=True)
class Conversation:
    """Records as they were given, before any edit.

    Attributes:
        token_ids: what was said, acknowledgements included.
        messages: the records of each message, and the range of its tokens, in order.
        named: of the edited message's records the one that a later message names.
        spare: records that were not given.
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
class Asked:
    """An edit, and the records that are asked for behind it.

    Attributes:
        kept: one that stands behind the edit.
        brought: one that stands in what the edit has brought; None: it brings none.
        old: the named record, with the value that is not in the context any more.
    """

    edit: Edit
    kept: Record
    brought: Record | None
    old: Record


def converse(text: RecordText, most_tokens: int, seed: str) -> Conversation:
    """Draw records that fill a context.

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
            token_ids += text.said(f"Look at line {named.key} once more.", token_ids)
        else:
            given = _given(records, index)
            token_ids += text.said(_message(given), token_ids)
        if index == edited:
            named = rng.choice(given)
        messages.append((given, (start, len(token_ids))))
    return Conversation(token_ids, messages, named, records[num_messages * RECORDS_PER_MESSAGE :])


def _num_messages(text: RecordText, records: Sequence[Record], most_tokens: int) -> int:
    """Return how many messages with records a context has room for; the naming one is shorter."""
    token_ids: list[int] = []
    number = 0
    while len(token_ids) <= most_tokens:
        token_ids += text.said(_message(_given(records, number)), token_ids)
        number += 1
    if number <= LEAST_MESSAGES:
        raise InvalidInputError(
            f"{most_tokens} tokens do not hold {LEAST_MESSAGES} messages of {RECORDS_PER_MESSAGE} "
            "records",
            "give a larger --context",
        )
    return number - 1


def _given(records: Sequence[Record], message: int) -> Sequence[Record]:
    return records[message * RECORDS_PER_MESSAGE : (message + 1) * RECORDS_PER_MESSAGE]


def _message(records: Sequence[Record]) -> str:
    return INTRO + "\n".join(record.line for record in records)


def edit_records(kind: Kind, said: Conversation, text: RecordText, seed: str) -> Asked:
    """Draw an edit of a conversation, and what is asked behind it."""
    rng = Random(f"{kind}/{seed}")  # noqa: S311 - draws need no secrecy
    given, (start, end) = said.messages[said.edited]
    kept = rng.choice([one for records, _ in said.messages[said.edited + 2 :] for one in records])
    others = [record for record in given if record != said.named]
    spans, brought, message = [(start, end)], None, ""
    match kind:
        case "clear":
            message = CLEARED
            if said.edited > 1 and rng.random() < 1 / 2:
                spans.insert(0, said.messages[said.edited - 1][1])
        case "replace":
            brought = _with_another_value(said.named, rng)
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
        Replacement(span, text.said(message, said.token_ids[: span[0]]) if message else ())
        for span in spans
    ]
    return Asked(Edit(tuple(replacements)), kept, brought, said.named)


def _with_another_value(record: Record, rng: Random) -> Record:
    """Draw a value of another first digit, which tells whether the old one is given."""
    while True:
        line = record_line(record.key, draw_value(rng))
        if line.rpartition("<")[2][0] != record.line.rpartition("<")[2][0]:
            return Record(record.key, line)
