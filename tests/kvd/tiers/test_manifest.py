"""The index: what is committed is found by the next start."""

import sqlite3
import threading

import pytest

from kvd.core.records import BlockRecord, SessionRecord, Span
from kvd.tiers.manifest import LayoutRow, Manifest, NewerManifestError, UnusableManifestError
from shared.session_key import SessionKey

LAYOUT = "ab" * 16
KEY = SessionKey("tenant", "model", "a")
SPANS = (Span(b"k" * 16, 0, 16, b"d" * 16, b"k" * 16), Span(b"l" * 16, 3, 5, b"e" * 16, b"c" * 16))
SESSION = SessionRecord(KEY, SPANS, last_access_ns=7, ttl_ns=-1, pinned=True, ended=True)
BLOCK = BlockRecord(b"k" * 16, b"\1\0\0\0" * 16, 16, 3, (1, 2**64 - 1))


def _ignore():
    """Nobody waits for this commit."""


@pytest.fixture
def make(tmp_path):
    made = []

    def manifest():
        made.append(Manifest(tmp_path / "manifest.db"))
        made[-1].open()
        return made[-1]

    yield manifest
    for each in made:
        each.close()


def _fill(manifest):
    manifest.put_layout(LayoutRow(LAYOUT, b"message", 5))
    manifest.put_salt("tenant", b"s" * 32)
    manifest.put_meta("clock", "text")
    manifest.put_block(LAYOUT, BLOCK, _ignore)
    manifest.put_session(LAYOUT, SESSION)
    manifest.close()


def test_everything_is_found_again(make):
    """Layouts, salts, values, blocks and sessions come back as they were put."""
    _fill(make())
    found = make()
    assert found.layouts() == [LayoutRow(LAYOUT, b"message", 5)]
    assert found.salts() == {"tenant": b"s" * 32}
    assert (found.meta("clock"), found.meta("nothing")) == ("text", "")
    assert list(found.blocks(LAYOUT)) == [BLOCK]
    assert list(found.sessions(LAYOUT)) == [SESSION]


def test_rows_are_replaced_and_removed(make):
    """A later row takes the place of an earlier one; dropped rows are gone."""
    manifest = make()
    manifest.put_session(LAYOUT, SESSION)
    changed = SessionRecord(KEY, SPANS[:1], last_access_ns=9)
    manifest.put_session(LAYOUT, changed)
    manifest.put_block(LAYOUT, BLOCK, _ignore)
    manifest.drop_block(LAYOUT, BLOCK.key, _ignore)
    manifest.close()
    found = make()
    assert list(found.sessions(LAYOUT)) == [changed]
    assert list(found.blocks(LAYOUT)) == []
    found.drop_session(LAYOUT, KEY)
    found.close()
    assert list(make().sessions(LAYOUT)) == []


def test_committed_is_told_after_the_commit(make, tmp_path):
    """When a drop is reported, another connection no longer sees the row."""
    manifest = make()
    manifest.put_block(LAYOUT, BLOCK, _ignore)
    seen = []
    done = threading.Event()

    def committed():
        with sqlite3.connect(tmp_path / "manifest.db") as other:
            seen.extend(other.execute("SELECT * FROM blocks").fetchall())
        done.set()

    manifest.drop_block(LAYOUT, BLOCK.key, committed)
    assert done.wait(30)
    assert seen == []


def test_sessions_come_least_recently_used_first(make):
    """The order of use survives."""
    manifest = make()
    for name, last_access_ns in (("new", 30), ("old", 10), ("middle", 20)):
        key = SessionKey("tenant", "model", name)
        manifest.put_session(LAYOUT, SessionRecord(key, SPANS, last_access_ns))
    manifest.close()
    names = [session.key.session_id for session in make().sessions(LAYOUT)]
    assert names == ["old", "middle", "new"]


def test_layouts_do_not_see_each_other(make):
    """Rows belong to their layout."""
    _fill(make())
    found = make()
    assert list(found.blocks("cd" * 16)) == list(found.sessions("cd" * 16)) == []


def test_rows_that_cannot_be_decoded_are_left_out(make, tmp_path):
    """One damaged row costs itself, not the start."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE blocks SET token_ids = x'00'")
        db.execute("UPDATE sessions SET spans = x'0011'")
    found = make()
    assert list(found.blocks(LAYOUT)) == list(found.sessions(LAYOUT)) == []


def test_a_file_that_is_no_database_is_moved_aside(make, tmp_path):
    """Nothing is deleted: each damaged file gets a new name, and the start is empty."""
    for number in (1, 2):
        (tmp_path / "manifest.db").write_bytes(b"junk" * 1000)
        manifest = make()
        assert manifest.layouts() == []
        manifest.close()
        aside = tmp_path / f"manifest.db.corrupt-{number}"
        assert aside.read_bytes() == b"junk" * 1000


def test_a_newer_schema_is_left_alone(make, tmp_path):
    """A newer release's index is neither used nor moved."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(NewerManifestError, match="schema 2"):
        make()
    assert not list(tmp_path.glob("*.corrupt*"))


def test_a_directory_that_is_not_there(tmp_path):
    """What cannot be opened is not damaged."""
    with pytest.raises(UnusableManifestError, match="writable"):
        Manifest(tmp_path / "nowhere" / "manifest.db").open()


def test_a_locked_database_is_tried_again(make, tmp_path):
    """While somebody else holds the write lock rows wait; then they are committed, in order."""
    manifest = make()
    other = sqlite3.connect(tmp_path / "manifest.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    manifest.put_meta("a", "1")
    manifest.put_meta("a", "2")
    other.execute("COMMIT")
    other.close()
    manifest.close()
    assert make().meta("a") == "2"
