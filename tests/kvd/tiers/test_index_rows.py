"""Rows of the index at the start: in columns, and what cannot be decoded left out."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.entries import BlockRecord
from kvd.tiers.faults import NoFaults
from kvd.tiers.index_rows import read_blocks
from kvd.tiers.manifest import Manifest
from tests.kvd.tiers.indexes import BLOCK, LAYOUT, fill, ignore, new_layouts, rows_of


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.tuples(st.integers(0, 1 << 62), st.integers(1, 1 << 20)),
    )
)
def test_columns_belong_together(tmp_path_factory, blocks):
    """Whatever the keys: each comes with its own extent and length."""
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
    """One damaged row costs itself, not the start; a layout's says so of itself."""
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


@pytest.mark.parametrize("extent", ["x", 1.5, None])
def test_a_block_whose_numbers_are_none_is_left_out(extent):
    """Also where a damaged table hands it out: the blocks beside it keep their places."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE blocks (layout, key, extent, num_tokens)")
        rows = [(1, bytes([7, n]) * 8, extent if n == 1 else n, 16) for n in range(3)]
        db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", rows)
        keys, extents, num_tokens = read_blocks(db, 1)
    assert keys == rows[0][1] + rows[2][1]
    assert (extents.tolist(), num_tokens.tolist()) == ([0, 2], [16, 16])


def test_a_name_that_is_no_text_is_left_out(make, tmp_path):
    """Bytes that are no UTF-8 do not end the start."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE sessions SET session_id = CAST(x'61ff62' AS TEXT)")
    assert rows_of(make()) == ([BLOCK], [])
