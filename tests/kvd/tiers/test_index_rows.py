"""Rows of the index at the start: in columns, without those that cannot be decoded."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.entries import BlockRecord
from kvd.tiers.faults import NoFaults
from kvd.tiers.index_rows import read_blocks
from kvd.tiers.manifest import LayoutRow, Manifest
from tests.kvd.tiers.indexes import (
    BLOCK,
    KEY,
    LAYOUT,
    OTHER,
    SESSION,
    fill,
    ignore,
    new_layouts,
    rows_of,
)
from tests.sampled import examples


@settings(max_examples=examples(25), deadline=None)
@given(
    blocks=st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.tuples(st.integers(0, 1 << 62), st.integers(1, 1 << 20)),
    )
)
def test_columns_belong_together(tmp_path_factory, blocks):
    """With any keys: each comes with its own extent and length."""
    directory = tmp_path_factory.mktemp("index")
    manifest = Manifest(directory / "manifest.db", directory / "volumes", NoFaults())
    manifest.open()
    new_layouts(manifest, LAYOUT)
    records = [BlockRecord(key, *place) for key, place in blocks.items()]
    for record in records:
        manifest.put_block(LAYOUT.fingerprint, record, ignore)
    manifest.close()
    found = Manifest(directory / "manifest.db", directory / "volumes", NoFaults())
    found.open()
    assert sorted(rows_of(found)[0], key=lambda block: block.key) == sorted(
        records, key=lambda block: block.key
    )
    assert isinstance(found.rows(LAYOUT).extents, np.ndarray)
    found.close()


def test_rows_that_cannot_be_decoded_are_left_out(make, tmp_path):
    """One damaged row costs only itself, not the start; a layout's row reports the damage."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE blocks SET key = x'00'")
        db.execute("UPDATE sessions SET pin = 9")
        db.execute("UPDATE salts SET salt = x'00'")
        db.execute("UPDATE layouts SET extents_per_segment = 0")
    found = make()
    assert rows_of(found) == ([], [])
    assert found.salts() == {}
    assert [row.extents_per_segment for row in found.layouts()] == [0]


@pytest.mark.parametrize(("extent", "num_tokens"), [("x", 16), (1.5, 16), (None, 16), (None, None)])
def test_a_block_with_invalid_numbers_is_left_out(extent, num_tokens):
    """Also from a damaged table: the blocks beside it keep their places."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE blocks (layout, key, extent, num_tokens)")
        rows = [(1, bytes([7, n]) * 8, n, 16) for n in range(3)]
        rows[1] = (*rows[1][:2], extent, num_tokens)
        db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", rows)
        keys, extents, num_tokens = read_blocks(db, 1)
        db.execute("DELETE FROM blocks WHERE extent IN (0, 2)")
        assert read_blocks(db, 1)[0] == b"", "nor where there is no other"
    assert keys == rows[0][1] + rows[2][1]
    assert (extents.tolist(), num_tokens.tolist()) == ([0, 2], [16, 16])


def test_a_name_that_is_not_text_is_left_out(make, tmp_path):
    """Bytes that are not UTF-8 do not prevent the start."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE sessions SET session_id = CAST(x'61ff62' AS TEXT)")
    assert rows_of(make()) == ([BLOCK], [])


def test_a_layout_is_removed_with_everything_that_names_it(make):
    """Created anew it is another one: it has no row of the old one, and no volume."""
    row = LayoutRow(LAYOUT.fingerprint, b"message", 5, "volume")
    fill(make())
    manifest = make()
    manifest.put_layout(row)
    manifest.put_use(LAYOUT.fingerprint, KEY, 9)
    manifest.close()
    found = make()
    assert found.layouts() == [row]
    found.drop_layout(LAYOUT.fingerprint)
    found.put_layout(replace(row, volume_id=""))
    found.close()
    again = make()
    assert again.layouts() == [replace(row, volume_id="")]
    assert rows_of(again) == ([], [])
    again.put_session(LAYOUT.fingerprint, SESSION)
    again.close()
    assert rows_of(make()) == ([], [SESSION])


def test_a_renamed_layout_belongs_to_none(make):
    """Its rows wait under the other name, and come back with it."""
    fill(make())
    manifest = make()
    manifest.rename_layout(LAYOUT.fingerprint, OTHER.fingerprint)
    assert manifest.is_layout_name(OTHER.fingerprint)
    assert not manifest.is_layout_name(LAYOUT.fingerprint)
    manifest.close()
    found = make()
    assert [row.fingerprint for row in found.layouts()] == [OTHER.fingerprint]
    assert rows_of(found, OTHER)[0] == [BLOCK]


@pytest.mark.parametrize("offset", [18, 19])
def test_a_header_of_an_unknown_format_is_damage(make, tmp_path, offset):
    """In the write version or the read version: SQLite would only refuse to write."""
    fill(make())
    with (tmp_path / "manifest.db").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x03")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1").exists()
