"""Records and messages that say the same: equal names are copied, and every other one is named.

A `MessageFields` pairs a record (a dataclass or a named tuple) with a message. A field of the
record goes into the field of the message that has its name, without a leading `is_` or `num_` if
need be. What has another name is in `renamed`; what has no counterpart, in `left_out`; what the
encoder works out, in `given`. A pair that does not add up cannot be made, and it is made when its
module is imported: a field that is new on one side is not forgotten on the other.

An enum of the message is filled from an Enum of ours, or from a text, whose names are the same but
for the prefix: Tier.DRAM, or "dram", is TIER_DRAM. Pure.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

PREFIXES = ("is_", "num_")  # of our names, which messages do without

Record = TypeVar("Record")
Encoded = TypeVar("Encoded", bound=Message)


class MessageFields(Generic[Record, Encoded]):
    """One pair.

    Args:
        record: a dataclass or named tuple.
        message: what it is encoded as.
        renamed: field of the record → field of the message.
        left_out: fields of the record that are not in the message under any name.
        given: fields of the message that whoever encodes works out, be there one of the same name.

    Raises:
        TypeError: they do not add up; names what is missing where.
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
        """Make the message of a record.

        Args:
            record: what is encoded; a field that is None is left empty.
            given: all of the pair's `given`; None leaves one empty.
        """
        if given.keys() != self._given:
            raise TypeError(f"given are {sorted(given)}, not {sorted(self._given)}")
        for name, target in self._plain:  # a load has hundreds of spans: this is as fast as by hand
            given[target] = getattr(record, name)
        for name, target, numbers in self._enums:
            given[target] = numbers[getattr(record, name)]
        return self._message(**given)

    def decode(self, message: Encoded, **others: Any) -> Record:
        """Make the record of a message: `others` are its enums, and the fields without equal."""
        values = {name: getattr(message, target) for name, target in self._plain}
        values.update(others)
        return self._record(**values)

    def decode_row(self, message: Encoded, *others: Any) -> Record:
        """Make the record of one of very many messages: by position, which takes half the time.

        `others` are the record's last fields; all fields before them are plain.
        """
        return self._record(*[getattr(message, target) for _, target in self._plain], *others)


class _Numbers(dict[str | Enum, int]):
    """The numbers of a message's enum, by names without their prefix, and by members of ours."""

    def __init__(self, enum: Any) -> None:
        """Take the descriptor of the message's enum."""
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).lower() + "_"
        super().__init__((v.name.lower().removeprefix(prefix), v.number) for v in enum.values)

    def __missing__(self, value: str | Enum) -> int:
        if not isinstance(value, Enum):
            raise KeyError(value)
        number = self[value] = self[value.name.lower()]
        return number


def _names(record: type[Any]) -> Sequence[str]:
    """Name the fields of a dataclass or of a named tuple."""
    named: Sequence[str] | None = getattr(record, "_fields", None)
    return [field.name for field in fields(record)] if named is None else named


def _target(name: str, renamed: Mapping[str, str], sent: Mapping[str, object]) -> str:
    """The field of the message that is meant; its own name if there is none."""
    names = [renamed.get(name, name), *(name.removeprefix(prefix) for prefix in PREFIXES)]
    return next((found for found in names if found in sent), name)
