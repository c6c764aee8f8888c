"""Indexes of a small layout, and rows that tests put into them."""

import struct
from dataclasses import replace

from kvd.core.records.entries import BlockRecord, Pin, SessionRecord
from kvd.tiers.manifest import LayoutRow
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.session_key import SessionKey

LAYERS = (Layer((Component("k", (8,), "float32"),)),)
LAYOUT, OTHER = (KVLayout(model, LAYERS, block_tokens=16) for model in ("ab" * 16, "cd" * 16))
KEY = SessionKey("tenant", LAYOUT.model, "a")
SPANS = b"\0" + b"k" * 16 + struct.pack("<I", 16)
SESSION = SessionRecord(KEY, SPANS, last_access_ns=7, ttl_ns=-1, pin=Pin.HARD, ended=True)
BLOCK = BlockRecord(b"k" * 16, extent=1 << 40, num_tokens=16)


def ignore():
    """Ignore a commit."""


def new_layouts(manifest, *layouts):
    for layout in layouts:
        manifest.put_layout(LayoutRow(layout.fingerprint, b"message", 5))
    return manifest


def fill(manifest):
    new_layouts(manifest, LAYOUT)
    manifest.put_salt("tenant", b"s" * 32)
    manifest.put_meta("clock", "text")
    manifest.put_block(LAYOUT.fingerprint, BLOCK, ignore)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.close()


def rows_of(manifest, layout=LAYOUT):
    """Return (blocks, sessions) as records."""
    rows = manifest.rows(layout)
    keys = [rows.block_keys[start : start + 16] for start in range(0, len(rows.block_keys), 16)]
    fields = zip(keys, rows.extents, rows.block_tokens, strict=True)
    return [BlockRecord(*block) for block in fields], list(records_of(rows.sessions))


def records_of(columns):
    for some in columns:
        fields = zip(some.keys, some.spans, some.last_access_ns, strict=True)
        for index, (key, spans, last_access_ns) in enumerate(fields):
            settings = some.settings.get(index, SessionRecord(key, b"", last_access_ns))
            yield replace(settings, spans=spans)
