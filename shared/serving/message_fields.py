"""MessageFields: copies a record to a protobuf message and back, by equal field names. Pure.

A `MessageFields` pairs a record (a dataclass or a named tuple) with a message. A field of the
record corresponds to the field of the message with the same name, or with that name without a
leading `is_` or `num_`. All others have to be listed: in `renamed` if they have another name, in
`left_out` if the message has no such field, in `given` if the encoder computes the value. A pair
that is not complete raises an error when its module is imported: so a field that is new on one side
is not forgotten on the other.

An enum of the message is filled from our Enum, or from a text, with the same names except for the
prefix: Tier.DRAM, or "dram", is TIER_DRAM.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

PREFIXES = ("is_", "num_")  # of our names; messages do without

Record = TypeVar("Record")
Encoded = TypeVar("Encoded", bound=Message)


class MessageFields(Generic[Record, Encoded]):
    """A record type and a message type whose fields correspond.

    Args:
        record: a dataclass or named tuple.
        message: the message type for it.
        renamed: field of the message, by field of the record.
        left_out: fields of the record that are not in the message under any name.
        given: fields of the message whose values the caller of `encode` passes, even if the record
            has a field of the same name.

    Raises:
        TypeError: a field has no counterpart; the message names all of them.
    """

    def __init__(
        self,
        record: type[Record],
        message: type[Encoded],
        *,
        renamed: Mapping[str, str] | None = None,
        left_out: Collection[str] = (),
        given: Collection[str] = (),
    ) -> None:
        self._record, self._message, self._given = record, message, frozenset(given)
        sent: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
        names = _names(record)
        targets = {
            name: _target(name, renamed or {}, sent)
            for name in names
            if name not in left_out and name not in self._given
        }
        unknown = {*left_out, *(renamed or {})} - set(names)
        lost = {name for name, target in targets.items() if target not in sent}
        empty = set(sent) - set(targets.values()) - self._given
        if unknown or lost or empty or not self._given <= set(sent):
            raise TypeError(
                f"{record.__name__} and {message.DESCRIPTOR.name}: no counterpart of {sorted(lost)}"
                f" in the message, of {sorted(empty)} in the record; unknown: "
                f"{sorted(unknown | self._given - set(sent))}"
            )
        self._plain = [(n, target) for n, target in targets.items() if not sent[target].enum_type]
        self._enums = [
            (name, target, _Numbers(sent[target].enum_type))
            for name, target in targets.items()
            if sent[target].enum_type
        ]

    def encode(self, record: Record, **given: Any) -> Encoded:
        """Return the message of a record.

        Args:
            record: the record; a field that is None is left empty.
            given: values for all of the pair's `given`; None leaves one empty.
        """
        if given.keys() != self._given:
            raise TypeError(f"given are {sorted(given)}, not {sorted(self._given)}")
        for name, target in self._plain:  # as fast as by hand; a load has hundreds of spans
            given[target] = getattr(record, name)
        for name, target, numbers in self._enums:
            given[target] = numbers[getattr(record, name)]
        return self._message(**given)

    def decode(self, message: Encoded, **extra: Any) -> Record:
        """Return the record of a message. `extra` are its enums, and fields without a match."""
        values = {name: getattr(message, target) for name, target in self._plain}
        values.update(extra)
        return self._record(**values)

    def decode_row(self, message: Encoded, *extra: Any) -> Record:
        """Return the record of one of very many messages: by position, which takes half the time.

        `extra` are the record's last fields. All fields before them are plain.
        """
        return self._record(*[getattr(message, target) for _, target in self._plain], *extra)


class _Numbers(dict[str | Enum, int]):
    """Numbers of a message's enum, by names without their prefix, and by members of our Enum."""

    def __init__(self, enum: Any) -> None:
        """Fill the table from the descriptor of the message's enum."""
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).lower() + "_"
        super().__init__((v.name.lower().removeprefix(prefix), v.number) for v in enum.values)

    def __missing__(self, value: str | Enum) -> int:
        if not isinstance(value, Enum):
            raise KeyError(value)
        number = self[value] = self[value.name.lower()]
        return number


def _names(record: type[Any]) -> Sequence[str]:
    """Return the names of the fields of a dataclass or named tuple."""
    named: Sequence[str] | None = getattr(record, "_fields", None)
    return [field.name for field in fields(record)] if named is None else named


def _target(name: str, renamed: Mapping[str, str], sent: Mapping[str, object]) -> str:
    """Return the field of the message for a field of the record; its own name if there is none."""
    names = [renamed.get(name, name), *(name.removeprefix(prefix) for prefix in PREFIXES)]
    return next((found for found in names if found in sent), name)
