"""The rows of sessions by columns, as recovery reads them. Pure."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvd.core.records.records import Pin, SessionRecord, Span
from kvd.core.recovery.row_join import PARTIAL, Flags, Ints, SpanJoin
from kvd.core.state.packing import (
    FULL,
    PLAIN,
    PLAIN_SPAN_BYTES,
    is_plain,
    pack_spans,
    plain_span,
    unpack_spans,
)
from shared.types.session_key import SessionKey

_PLAIN_KIND = bytes((PLAIN,))


@dataclass(frozen=True, slots=True)
class SessionColumns:
    """The rows of some sessions by columns: a record for each would cost more than all the rest.

    Attributes:
        spans: as kvd/core/state/packing.py packs them.
        settings: by index: a session's row, if its settings are not the default ones; spans apart.
    """

    keys: Sequence[SessionKey]
    spans: Sequence[bytes]
    last_access_ns: Sequence[int]
    settings: Mapping[int, SessionRecord]


def columns_of(records: Iterable[SessionRecord]) -> SessionColumns:
    """Put the rows of sessions into columns."""
    rows = list(records)
    return SessionColumns(
        [row.key for row in rows],
        [row.spans for row in rows],
        [row.last_access_ns for row in rows],
        {
            index: replace(row, spans=b"")
            for index, row in enumerate(rows)
            if row.ttl_ns is not None or row.pin is not Pin.NONE or row.ended
        },
    )


@dataclass(slots=True)
class SessionRows:
    """The rows of sessions by columns.

    Attributes:
        full: by index: the spans of a session that are not all plain.
        settings: by index: a session's row, if its settings are not the default ones.
        damaged: indexes of sessions whose row could not be read to its end.
    """

    keys: list[SessionKey] = field(default_factory=list)
    last_access_ns: "array[int]" = field(default_factory=lambda: array("q"))
    full: dict[int, list[Span]] = field(default_factory=dict)
    settings: dict[int, SessionRecord] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)

    def collect(self, sessions: Iterable[SessionColumns], spans: SpanJoin) -> None:
        """Take the rows in; their spans are needed for a moment only."""
        for some in sessions:
            first = len(self.keys)
            self.keys.extend(some.keys)
            self.last_access_ns.extend(some.last_access_ns)
            for index, settings in some.settings.items():
                self.settings[first + index] = settings
            spans.add(
                [
                    packed[1:]
                    if packed[:1] == _PLAIN_KIND and len(packed) % PLAIN_SPAN_BYTES == 1
                    else self._joinable(index, packed)
                    for index, packed in enumerate(some.spans, first)
                ]
            )

    def in_order(self) -> Ints:
        """Indexes of the sessions, coldest first."""
        return np.argsort(np.frombuffer(self.last_access_ns, dtype=np.int64), kind="stable")

    def are_plain(self) -> Flags:
        """Which sessions have plain spans, a sound row and the default settings."""
        are_plain = np.ones(len(self.keys), dtype=np.bool_)
        for others in (self.full, self.settings, self.damaged):
            are_plain[list(others)] = False
        return are_plain

    def _joinable(self, index: int, packed: bytes) -> bytes:
        spans = unpack_spans(packed)
        if packed[:1] == bytes((FULL,)):
            self.full[index] = spans
        if pack_spans(spans) != packed:
            self.damaged.add(index)
        ends = (span.start + span.num_tokens for span in spans)
        joinable = (
            plain_span(span.block_key, end if is_plain(span) else end | PARTIAL)
            for span, end in zip(spans, ends, strict=True)
        )
        return pack_spans(list(joinable))[1:]
