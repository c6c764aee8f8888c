"""Reads the rows of the index at the start: millions of rows in a second or two.

Blocks are read by columns. Turning a row into Python objects costs a microsecond or more. So
SQLite concatenates each column into one text (keys into one blob: SQLite treats bytes as text
unchanged), and one call converts that text to numbers. Sessions are read by columns, too, in groups
of rows.

The tables are strict, but types of values are still checked, because the file may be damaged.
open_database() has checked all values (quick_check looks at every value of a strict table). Here
it suffices to check that every value arrived, and as a number. Only if that fails, each row is
checked by itself.
"""

import sqlite3
from collections.abc import Iterator
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.entries import Pin, SessionColumns, SessionRecord
from shared.types.block_key import KEY_BYTES
from shared.types.session_key import SessionKey

_FETCH = 1024  # rows fetched at a time; some may be long

# Keys are digests, so that ranges of their first byte have equal shares of the blocks.
_RANGES = tuple(
    (bytes([first]), bytes([first + 15]) + b"\xff" * 256) for first in range(0, 256, 16)
)
_BLOCKS = """
SELECT CAST(group_concat(key, '') AS BLOB), group_concat(extent), group_concat(num_tokens)
FROM blocks WHERE layout = ? AND key BETWEEN ? AND ? AND length(key) = ?
"""
_CHECKED_BLOCKS = f"""{_BLOCKS}
AND typeof(key) = 'blob' AND typeof(extent) = 'integer' AND typeof(num_tokens) = 'integer'
"""
_SESSIONS = """
SELECT CAST(tenant AS BLOB), CAST(session_id AS BLOB), spans,
    iif(typeof(uses.last_access_ns) = 'integer',
    uses.last_access_ns, sessions.last_access_ns), ttl_ns, pin, ended,
    iif(typeof(retain_ns) = 'integer', retain_ns, NULL)
FROM sessions LEFT JOIN uses USING (layout, tenant, session_id)
LEFT JOIN retentions USING (layout, tenant, session_id)
WHERE layout = ? AND typeof(tenant) = 'text' AND typeof(session_id) = 'text'
AND typeof(spans) = 'blob' AND typeof(sessions.last_access_ns) = 'integer'
AND typeof(ttl_ns) IN ('integer', 'null') AND pin IN (0, 1, 2)
"""
_MOST_TOKENS = np.iinfo(np.int32).max  # a damaged row may have more, or a negative number
_PINS = {pin.value: pin for pin in Pin}

_Row: TypeAlias = tuple[bytes, bytes, bytes, int, int | None, int, int, int | None]


def read_blocks(
    db: sqlite3.Connection, layout_id: int
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int32]]:
    """Read a layout's blocks.

    Returns:
        (keys, concatenated; extents [blocks]; numbers of tokens [blocks]), in the same order.
    """
    keys: list[bytes] = []
    extents: list[NDArray[np.int64]] = [_numbers("")]
    block_tokens: list[NDArray[np.int32]] = [_numbers("").astype(np.int32)]
    for first, last in _RANGES:
        values = (layout_id, first, last, KEY_BYTES)
        found = db.execute(_BLOCKS, values).fetchone()
        if not _are_columns(*found):
            found = db.execute(_CHECKED_BLOCKS, values).fetchone()
        joined_keys, extent_text, tokens_text = found
        if joined_keys:
            keys.append(joined_keys)
            extents.append(_numbers(extent_text))
            num_tokens = np.clip(_numbers(tokens_text), 0, _MOST_TOKENS)
            block_tokens.append(num_tokens.astype(np.int32))
    return b"".join(keys), np.concatenate(extents), np.concatenate(block_tokens)


def read_sessions(db: sqlite3.Connection, layout_id: int, model: str) -> Iterator[SessionColumns]:
    """Yield a layout's sessions in groups; their spans are not decoded.

    Args:
        db: the index.
        layout_id: number of the layout in the index.
        model: fingerprint of the layout's model, for the session keys.
    """
    cursor = db.execute(_SESSIONS, (layout_id,))
    # Each row has its own bytes object for the tenant's name: share one string per tenant instead.
    names: dict[bytes, str] = {}
    while rows := cursor.fetchmany(_FETCH):
        try:
            yield _columns(rows, model, names)
        except UnicodeDecodeError:
            yield _columns(list(filter(_has_names, rows)), model, names)


def _columns(rows: list[_Row], model: str, names: dict[bytes, str]) -> SessionColumns:
    """Turn rows of sessions into columns.

    Args:
        rows: rows of the table of sessions.
        model: fingerprint of their model.
        names: known names of tenants, encoded → decoded; new ones are added.

    Raises:
        UnicodeDecodeError: the name of a tenant or a session is not valid text.
    """
    if not rows:
        return SessionColumns((), (), (), {})
    tenants, ids, spans, last_access_ns, ttls_ns, pins, ended, retain_ns = zip(*rows, strict=True)
    for tenant in set(tenants) - names.keys():
        names[tenant] = tenant.decode()
    fields = zip(map(names.__getitem__, tenants), repeat(model), map(bytes.decode, ids))
    keys = list(map(SessionKey._make, fields))
    is_timed = ttls_ns.count(None) + retain_ns.count(None) < 2 * len(rows)
    has_settings = any(pins) or any(ended) or is_timed
    columns = (keys, last_access_ns, ttls_ns, pins, ended, retain_ns)
    settings = {
        index: SessionRecord(key, b"", last_ns, ttl_ns, _PINS[pin], bool(end), kept_ns)
        for index, (key, last_ns, ttl_ns, pin, end, kept_ns) in enumerate(
            zip(*columns, strict=True) if has_settings else ()
        )
        if ttl_ns is not None or pin or end or kept_ns is not None
    }
    return SessionColumns(keys, spans, last_access_ns, settings)


def _has_names(row: _Row) -> bool:
    """Whether the names of a row's tenant and session are valid text."""
    try:
        row[0].decode()
        row[1].decode()
    except UnicodeDecodeError:
        return False
    return True


def _are_columns(keys: bytes | None, *texts: str | None) -> bool:
    """Whether each text is a list of as many numbers as there are keys, and nothing else."""
    num_commas = len(keys or b"") // KEY_BYTES - 1
    return all(
        not keys if text is None else _is_numbers(text) and text.count(",") == num_commas
        for text in texts
    )


def _is_numbers(text: str) -> bool:
    return not text.encode().translate(None, delete=b"0123456789,-")


def _numbers(text: str) -> NDArray[np.int64]:
    return np.fromstring(text, dtype=np.int64, sep=",") if text else np.empty(0, dtype=np.int64)
