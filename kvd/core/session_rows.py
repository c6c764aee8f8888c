"""The rows of sessions by columns, as recovery reads them. Pure."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from kvd.core.packing import (
    FULL,
    PLAIN,
    PLAIN_SPAN_BYTES,
    is_plain,
    pack_spans,
    plain_span,
    unpack_spans,
)
from kvd.core.records import Pin, SessionRecord, Span
from kvd.core.row_join import PARTIAL, Ints, SpanJoin
from shared.session_key import SessionKey

_PLAIN_KIND = bytes((PLAIN,))


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

    def collect(self, records: Iterable[SessionRecord], spans: SpanJoin) -> None:
        """Take the rows apart; each is needed for a moment only, as are its spans."""
        for index, record in enumerate(records):
            self.keys.append(record.key)
            self.last_access_ns.append(record.last_access_ns)
            packed = record.spans
            is_plain_row = packed[:1] == _PLAIN_KIND and len(packed) % PLAIN_SPAN_BYTES == 1
            spans.add(packed[1:] if is_plain_row else self._joinable(index, packed))
            if record.ttl_ns is not None or record.pin is not Pin.NONE or record.ended:
                self.settings[index] = replace(record, spans=b"")

    def in_order(self) -> Ints:
        """Indexes of the sessions, coldest first."""
        return np.argsort(np.frombuffer(self.last_access_ns, dtype=np.int64), kind="stable")

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
