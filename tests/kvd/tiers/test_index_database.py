"""The index as a file: damaged, of another release, locked, or impossible to open."""

import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.index_database import (
    SCHEMA_VERSION,
    NewerManifestError,
    UnusableManifestError,
    open_database,
)
from kvd.tiers.manifest import Manifest
from tests.kvd.tiers.indexes import BLOCK, KEY, LAYOUT, SESSION, fill, rows_of
from tests.sampled import examples


def test_a_file_that_is_not_a_database_is_moved_aside(make, tmp_path):
    """Nothing is deleted: each damaged file gets a new name, and kvd starts empty."""
    for number in (1, 2):
        (tmp_path / "manifest.db").write_bytes(b"junk" * 1000)
        manifest = make()
        assert manifest.layouts() == []
        manifest.close()
        aside = tmp_path / f"manifest.db.corrupt-{number}"
        assert aside.read_bytes() == b"junk" * 1000


def test_the_log_of_a_damaged_index_is_moved_with_it(make, tmp_path):
    """It must not be applied to the new one."""
    (tmp_path / "manifest.db").write_bytes(b"junk" * 1000)
    (tmp_path / "manifest.db-wal").write_bytes(b"log")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1-wal").read_bytes() == b"log"


def test_another_release_may_format_its_tables_differently(make, tmp_path):
    """SQLite keeps comments and blanks of a table's statement: they do not matter."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("PRAGMA writable_schema = ON")
        changed = db.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL,  ', 'NOT NULL, -- once ')"
            " || ' -- of then' || char(10) WHERE sql LIKE '%NOT NULL,  %--%'"
        )
        assert changed.rowcount
    assert rows_of(make()) == ([BLOCK], [SESSION])
    assert not list(tmp_path.glob("*.corrupt*"))


def test_foreign_tables_are_damage(make, tmp_path):
    """A table with other columns cannot be used."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("ALTER TABLE blocks RENAME COLUMN extent TO eytent")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1").exists()


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_prevent_the_start(tmp_path_factory, data):
    """The index opens, or reports a newer version; reading it does not fail."""
    directory = tmp_path_factory.mktemp("index")
    path = directory / "manifest.db"
    manifest = Manifest(path, directory / "volumes", NoFaults())
    manifest.open()
    fill(manifest)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found = Manifest(path, directory / "volumes", NoFaults())
    try:
        found.open()
    except NewerManifestError:
        return
    assert len(found.layouts()) <= 1
    assert len(found.salts()) <= 1
    blocks, sessions = _rows_or_none(found)
    assert len(blocks) <= 1
    assert len(sessions) <= 1
    found.close()


def _rows_or_none(manifest):
    try:
        return rows_of(manifest)
    except ValueError:
        return [], []  # the layout's own row is damaged


class KilledBetween(NoFaults):
    """Dies after an older index's volumes are renamed, before the index is."""

    def reach(self, point):
        if point is WritePoint.INDEX_SET_ASIDE:
            raise KeyboardInterrupt


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "after a kill in between"])
def test_an_older_schema_is_set_aside_with_its_volumes(make, tmp_path, killed):
    """Its segments have another format: both are renamed, together, and kvd starts empty."""
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("CREATE TABLE layouts (fingerprint TEXT)")
        db.execute("PRAGMA user_version = 1")
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / "00000.segment").write_bytes(b"data")
    if killed:
        with pytest.raises(KeyboardInterrupt):
            open_database(tmp_path / "manifest.db", tmp_path / "volumes", KilledBetween())
        assert not (tmp_path / "volumes").exists()
        assert (tmp_path / "manifest.db").exists()
    manifest = make()
    assert manifest.layouts() == []
    assert (tmp_path / "volumes.schema-1-1" / "00000.segment").read_bytes() == b"data"
    assert not (tmp_path / "volumes").exists()
    with sqlite3.connect(tmp_path / "manifest.db.schema-1-1") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        (2, ("tenant_keys", "uses", "retentions")),
        (3, ("uses", "retentions")),
        (4, ("retentions",)),
    ],
)
def test_an_older_schema_is_upgraded(make, tmp_path, version, lacks):
    """It only lacks tables, which are added."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        for table in lacks:
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    found = make()
    assert rows_of(found) == ([BLOCK], [SESSION])
    assert (found.salts(), found.tenant_keys()) == ({"tenant": b"s" * 32}, {})
    found.put_use(LAYOUT.fingerprint, KEY, 8)
    found.close()
    assert rows_of(make()) == ([BLOCK], [replace(SESSION, last_access_ns=8)])
    assert [path.name for path in tmp_path.glob("manifest.db.*")] == []


def test_a_newer_schema_is_left_alone(make, tmp_path):
    """A newer release's index is neither used nor moved."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(NewerManifestError, match=f"schema {SCHEMA_VERSION + 1}"):
        make()
    assert [path.name for path in tmp_path.glob("manifest.db.*")] == []


def test_a_directory_that_is_not_there(tmp_path):
    """What cannot be opened is not damaged."""
    with pytest.raises(UnusableManifestError, match="let kvd write to state_dir"):
        Manifest(tmp_path / "nowhere" / "manifest.db", tmp_path / "volumes", NoFaults()).open()


def test_a_locked_database_is_not_mistaken_for_a_damaged_one(make, tmp_path):
    """The other process may go away; the rows stay where they are."""
    fill(make())
    in_the_way = tmp_path / "manifest.db-wal"
    in_the_way.mkdir()
    with pytest.raises(UnusableManifestError):
        open_database(tmp_path / "manifest.db", tmp_path / "volumes", NoFaults())
    assert not list(tmp_path.glob("*.corrupt*"))
    in_the_way.rmdir()
    assert rows_of(make()) == ([BLOCK], [SESSION])
