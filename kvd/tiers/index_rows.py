"""Reading the index at the start: millions of rows in a second or two.

Blocks come by columns. A row that becomes Python objects costs a microsecond or more; so SQLite
joins each column to one text (keys to one blob: to SQLite bytes are text as they are), which is
turned back into numbers in one call.
"""

import sqlite3
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvd.core.records import Pin, SessionRecord
from shared.block_key import KEY_BYTES
from shared.session_key import SessionKey

_UNDECODABLE = "\ufffd"  # stands for bytes that were no text
_FETCH = 4096  # rows at a time

# Keys are digests: their first byte splits them evenly.
_RANGES = tuple(
    (bytes([first]), bytes([first + 15]) + b"\xff" * 256) for first in range(0, 256, 16)
)
# Types and lengths are checked although the tables are strict: the file may have been damaged.
_BLOCKS = """
SELECT CAST(group_concat(key, '') AS BLOB), group_concat(extent), group_concat(num_tokens)
FROM blocks
WHERE layout = ? AND key BETWEEN ? AND ? AND length(key) = ?
AND typeof(key) = 'blob' AND typeof(extent) = 'integer' AND typeof(num_tokens) = 'integer'
"""
_SESSIONS = """
SELECT tenant, session_id, spans, iif(typeof(uses.last_access_ns) = 'integer',
    uses.last_access_ns, sessions.last_access_ns), ttl_ns, pin, ended
FROM sessions LEFT JOIN uses USING (layout, tenant, session_id)
WHERE layout = ? AND typeof(tenant) = 'text' AND typeof(session_id) = 'text'
AND typeof(spans) = 'blob' AND typeof(sessions.last_access_ns) = 'integer'
AND typeof(ttl_ns) IN ('integer', 'null')
"""
_MOST_TOKENS = np.iinfo(np.int32).max  # what a damaged row has more than, or less than none of
_PINS = {pin.value: pin for pin in Pin}


def read_blocks(
    db: sqlite3.Connection, layout_id: int
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int32]]:
    """(keys joined, extents, numbers of tokens) of a layout's blocks."""
    keys: list[bytes] = []
    extents: list[NDArray[np.int64]] = [_numbers("")]
    block_tokens: list[NDArray[np.int32]] = [_numbers("").astype(np.int32)]
    for first, last in _RANGES:
        values = (layout_id, first, last, KEY_BYTES)
        joined_keys, extent_text, tokens_text = db.execute(_BLOCKS, values).fetchone()
        if joined_keys:
            keys.append(joined_keys)
            extents.append(_numbers(extent_text))
            num_tokens = np.clip(_numbers(tokens_text), 0, _MOST_TOKENS)
            block_tokens.append(num_tokens.astype(np.int32))
    return b"".join(keys), np.concatenate(extents), np.concatenate(block_tokens)


def read_sessions(db: sqlite3.Connection, layout_id: int, model: str) -> Iterator[SessionRecord]:
    """A layout's sessions; what their spans hold is not looked at."""
    cursor = db.execute(_SESSIONS, (layout_id,))
    names: dict[str, str] = {}  # each row comes with a text of its own for its tenant
    while rows := cursor.fetchmany(_FETCH):
        for tenant, session_id, spans, last_access_ns, ttl_ns, pin, ended in rows:
            if _UNDECODABLE in tenant or _UNDECODABLE in session_id or pin not in _PINS:
                continue
            key = SessionKey(names.setdefault(tenant, tenant), model, session_id)
            yield SessionRecord(key, spans, last_access_ns, ttl_ns, _PINS[pin], bool(ended))


def _numbers(text: str) -> NDArray[np.int64]:
    return np.fromstring(text, dtype=np.int64, sep=",") if text else np.empty(0, dtype=np.int64)
