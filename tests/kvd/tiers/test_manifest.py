"""The index: what is committed is found by the next start."""

import errno
import sqlite3
import struct
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.entries import BlockRecord, Pin, SessionRecord
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.index_database import (
    SCHEMA_VERSION,
    NewerManifestError,
    UnusableManifestError,
    open_database,
)
from kvd.tiers.index_rows import read_blocks
from kvd.tiers.manifest import MAX_BATCH, MAX_QUEUED_BYTES, LayoutRow, Manifest
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.session_key import SessionKey

LAYERS = (Layer((Component("k", (8,), "float32"),)),)
LAYOUT, OTHER = (KVLayout(model, LAYERS, block_tokens=16) for model in ("ab" * 16, "cd" * 16))
DEADLINE_S = 30.0
KEY = SessionKey("tenant", LAYOUT.model, "a")
SPANS = b"\0" + b"k" * 16 + struct.pack("<I", 16)
SESSION = SessionRecord(KEY, SPANS, last_access_ns=7, ttl_ns=-1, pin=Pin.HARD, ended=True)
_USES_OF_SESSIONS = (
    "SELECT sessions.last_access_ns, uses.last_access_ns "
    "FROM sessions LEFT JOIN uses USING (layout, tenant, session_id)"
)
BLOCK = BlockRecord(b"k" * 16, extent=1 << 40, num_tokens=16)


def _ignore():
    """Nobody waits for this commit."""


class Recorder(NoFaults):
    """Notes write points; fails the first commits."""

    def __init__(self, num_failures=0):
        self.points, self.num_failures = [], num_failures

    def reach(self, point):
        self.points.append(point)
        if point is WritePoint.INDEX_ROWS and self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.ENOSPC, "injected")


class Told(NoFaults):
    """Sets an event at a write point."""

    def __init__(self, point, event):
        self.point, self.event = point, event

    def reach(self, point):
        if point is self.point:
            self.event.set()


@pytest.fixture
def make(tmp_path):
    made = []

    def manifest(faults=None):
        made.append(Manifest(tmp_path / "manifest.db", tmp_path / "volumes", faults or NoFaults()))
        made[-1].open()
        return made[-1]

    yield manifest
    for each in made:
        each.close()


def _new(manifest, *layouts):
    for layout in layouts:
        manifest.put_layout(LayoutRow(layout.fingerprint, b"message", 5))
    return manifest


def _fill(manifest):
    _new(manifest, LAYOUT)
    manifest.put_salt("tenant", b"s" * 32)
    manifest.put_meta("clock", "text")
    manifest.put_block(LAYOUT.fingerprint, BLOCK, _ignore)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.close()


def _rows(manifest, layout=LAYOUT):
    """(blocks, sessions) as records."""
    rows = manifest.rows(layout)
    keys = [rows.block_keys[start : start + 16] for start in range(0, len(rows.block_keys), 16)]
    fields = zip(keys, rows.extents, rows.block_tokens, strict=True)
    return [BlockRecord(*block) for block in fields], list(_records(rows.sessions))


def _records(columns):
    for some in columns:
        fields = zip(some.keys, some.spans, some.last_access_ns, strict=True)
        for index, (key, spans, last_access_ns) in enumerate(fields):
            settings = some.settings.get(index, SessionRecord(key, b"", last_access_ns))
            yield replace(settings, spans=spans)


def test_everything_is_found_again(make):
    """Layouts, salts, values, blocks and sessions come back as they were put."""
    _fill(make())
    found = make()
    assert found.layouts() == [LayoutRow(LAYOUT.fingerprint, b"message", 5)]
    assert found.salts() == {"tenant": b"s" * 32}
    assert (found.meta("clock"), found.meta("nothing")) == ("text", "")
    assert _rows(found) == ([BLOCK], [SESSION])


@pytest.mark.parametrize("setting", [{"ttl_ns": 5}, {"pin": Pin.SOFT}, {"ended": True}])
def test_a_session_with_one_setting_keeps_it(make, setting):
    """Though no other one has any."""
    plain = SessionRecord(KEY, SPANS, last_access_ns=7)
    sessions = [plain, replace(plain, key=KEY._replace(session_id="b"), **setting)]
    manifest = _new(make(), LAYOUT)
    for session in sessions:
        manifest.put_session(LAYOUT.fingerprint, session)
    manifest.close()
    assert _rows(make())[1] == sessions


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
    _new(manifest, LAYOUT)
    records = [BlockRecord(key, *place) for key, place in blocks.items()]
    for record in records:
        manifest.put_block(LAYOUT.fingerprint, record, _ignore)
    manifest.close()
    found = Manifest(directory / "manifest.db", directory / "volumes", NoFaults())
    found.open()
    assert sorted(_rows(found)[0], key=lambda block: block.key) == sorted(
        records, key=lambda block: block.key
    )
    assert isinstance(found.rows(LAYOUT).extents, np.ndarray)
    found.close()


def test_rows_are_replaced_and_removed(make):
    """A later row takes the place of an earlier one; dropped rows are gone."""
    manifest = _new(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    changed = SessionRecord(KEY, b"\0", last_access_ns=9)
    manifest.put_session(LAYOUT.fingerprint, changed)
    manifest.put_block(LAYOUT.fingerprint, BLOCK, _ignore)
    manifest.drop_block(LAYOUT.fingerprint, BLOCK.key)
    manifest.close()
    found = make()
    assert _rows(found) == ([], [changed])
    found.drop_session(LAYOUT.fingerprint, KEY)
    found.close()
    assert _rows(make()) == ([], [])


def test_commits_are_reported_when_they_are_durable(make, tmp_path):
    """When a drop is reported, another connection no longer sees the row."""
    manifest = _new(make(), LAYOUT)
    manifest.put_block(LAYOUT.fingerprint, BLOCK, _ignore)
    seen = []
    done = threading.Event()

    def committed():
        with sqlite3.connect(tmp_path / "manifest.db") as other:
            seen.extend(other.execute("SELECT * FROM blocks").fetchall())
        done.set()

    manifest.drop_block(LAYOUT.fingerprint, BLOCK.key, committed)
    assert done.wait(30)
    assert seen == []


def test_layouts_do_not_see_each_other(make):
    """Rows belong to their layout, also after it was put again and others have come."""
    manifest = _new(make(), LAYOUT, OTHER)
    manifest.put_block(OTHER.fingerprint, BLOCK, _ignore)
    manifest.close()
    found = _new(make(), OTHER)
    other_session = SessionRecord(SessionKey("tenant", OTHER.model, "a"), SPANS, 1)
    found.put_session(OTHER.fingerprint, other_session)
    found.put_session(LAYOUT.fingerprint, SESSION)
    found.close()
    found = make()
    assert _rows(found) == ([], [SESSION])
    assert _rows(found, OTHER) == ([BLOCK], [other_session])
    with pytest.raises(ValueError, match="not in the index"):
        found.rows(KVLayout("ef" * 16, LAYERS, block_tokens=16))


def test_rows_that_cannot_be_decoded_are_left_out(make, tmp_path):
    """One damaged row costs itself, not the start; a layout's says so of itself."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE blocks SET key = x'00'")
        db.execute("UPDATE sessions SET pin = 9")
        db.execute("UPDATE salts SET salt = x'00'")
        db.execute("UPDATE layouts SET extents_per_segment = 0")
    found = make()
    assert _rows(found) == ([], [])
    assert found.salts() == {}
    assert [row.extents_per_segment for row in found.layouts()] == [0]


@pytest.mark.parametrize(("extent", "num_tokens"), [("x", 16), (1.5, 16), (None, 16), (None, None)])
def test_a_block_whose_numbers_are_none_is_left_out(extent, num_tokens):
    """Also where a damaged table hands it out: the blocks beside it keep their places."""
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


def test_a_name_that_is_no_text_is_left_out(make, tmp_path):
    """Bytes that are no UTF-8 do not end the start."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("UPDATE sessions SET session_id = CAST(x'61ff62' AS TEXT)")
    assert _rows(make()) == ([BLOCK], [])


# ------------------------------------------------------------------------------ unusable files


def test_a_layout_goes_with_all_that_names_it(make):
    """Made anew, it is another one: no row of the old one is its own, and no volume."""
    row = LayoutRow(LAYOUT.fingerprint, b"message", 5, "volume")
    _fill(make())
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
    assert _rows(again) == ([], [])
    again.put_session(LAYOUT.fingerprint, SESSION)
    again.close()
    assert _rows(make()) == ([], [SESSION])


def test_a_layout_that_is_renamed_is_nobody_s(make):
    """Its rows wait under the other name, and come with it."""
    _fill(make())
    manifest = make()
    manifest.rename_layout(LAYOUT.fingerprint, OTHER.fingerprint)
    assert manifest.is_layout_name(OTHER.fingerprint)
    assert not manifest.is_layout_name(LAYOUT.fingerprint)
    manifest.close()
    found = make()
    assert [row.fingerprint for row in found.layouts()] == [OTHER.fingerprint]
    assert _rows(found, OTHER)[0] == [BLOCK]


@pytest.mark.parametrize("offset", [18, 19])
def test_a_header_of_an_unknown_format_is_damage(make, tmp_path, offset):
    """Be it for writing or for reading: SQLite would only refuse to write."""
    _fill(make())
    with (tmp_path / "manifest.db").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x03")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1").exists()


def test_a_file_that_is_no_database_is_moved_aside(make, tmp_path):
    """Nothing is deleted: each damaged file gets a new name, and the start is empty."""
    for number in (1, 2):
        (tmp_path / "manifest.db").write_bytes(b"junk" * 1000)
        manifest = make()
        assert manifest.layouts() == []
        manifest.close()
        aside = tmp_path / f"manifest.db.corrupt-{number}"
        assert aside.read_bytes() == b"junk" * 1000


def test_the_log_of_a_damaged_index_goes_with_it(make, tmp_path):
    """The new one must not be taken for what it is the log of."""
    (tmp_path / "manifest.db").write_bytes(b"junk" * 1000)
    (tmp_path / "manifest.db-wal").write_bytes(b"log")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1-wal").read_bytes() == b"log"


def test_another_release_may_explain_its_tables_otherwise(make, tmp_path):
    """SQLite keeps the comments and blanks of a table's statement: they make no other table."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("PRAGMA writable_schema = ON")
        changed = db.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL,  ', 'NOT NULL, -- once ')"
            " || ' -- of then' || char(10) WHERE sql LIKE '%NOT NULL,  %--%'"
        )
        assert changed.rowcount
    assert _rows(make()) == ([BLOCK], [SESSION])
    assert not list(tmp_path.glob("*.corrupt*"))


def test_foreign_tables_are_damage(make, tmp_path):
    """A table whose columns are not ours cannot be used."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute("ALTER TABLE blocks RENAME COLUMN extent TO eytent")
    assert make().layouts() == []
    assert (tmp_path / "manifest.db.corrupt-1").exists()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_end_the_start(tmp_path_factory, data):
    """Whatever is flipped: the index opens, or says that it is newer; reading it does not fail."""
    directory = tmp_path_factory.mktemp("index")
    path = directory / "manifest.db"
    manifest = Manifest(path, directory / "volumes", NoFaults())
    manifest.open()
    _fill(manifest)
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


def test_there_are_blocks_of_a_layout_or_of_any(make):
    """Who asks about one layout gets nothing of another."""
    manifest = _new(make(), LAYOUT, OTHER)
    assert not manifest.has_blocks()
    manifest.put_block(OTHER.fingerprint, BLOCK, _ignore)
    manifest.close()
    found = make()
    assert found.has_blocks()
    assert found.has_blocks(OTHER.fingerprint)
    assert not found.has_blocks(LAYOUT.fingerprint)


def _rows_or_none(manifest):
    try:
        return _rows(manifest)
    except ValueError:
        return [], []  # the layout's own row is damaged


class KilledBetween(NoFaults):
    """Ends when an older index's volumes are renamed, and it is not."""

    def reach(self, point):
        if point is WritePoint.INDEX_SET_ASIDE:
            raise KeyboardInterrupt


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "after a kill in between"])
def test_an_older_schema_is_set_aside_with_its_volumes(make, tmp_path, killed):
    """Its segments mean nothing to us: both are renamed, together, and the start is empty."""
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


@pytest.mark.parametrize(("version", "lacks"), [(2, ("tenant_keys", "uses")), (3, ("uses",))])
def test_an_older_schema_is_read(make, tmp_path, version, lacks):
    """It lacks tables only; an index of it is taken over as it is, and they are added."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        for table in lacks:
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    found = make()
    assert _rows(found) == ([BLOCK], [SESSION])
    assert (found.salts(), found.tenant_keys()) == ({"tenant": b"s" * 32}, {})
    found.put_use(LAYOUT.fingerprint, KEY, 8)
    found.close()
    assert _rows(make()) == ([BLOCK], [replace(SESSION, last_access_ns=8)])
    assert [path.name for path in tmp_path.glob("manifest.db.*")] == []


def test_the_use_that_was_put_last_counts(make):
    """With the session's row or apart, and also if the boot time has gone back meanwhile."""
    manifest = _new(make(), LAYOUT)
    for put_ns, used_ns in ((7, 9), (8, None), (30, 5), (4, None)):
        manifest.put_session(LAYOUT.fingerprint, replace(SESSION, last_access_ns=put_ns))
        if used_ns is not None:
            manifest.put_use(LAYOUT.fingerprint, KEY, used_ns)
        manifest.close()
        manifest = make()
        assert _rows(manifest)[1][0].last_access_ns == (used_ns or put_ns)


def test_no_commit_has_an_older_use_beside_a_row(make, tmp_path):
    """A kill between any two commits leaves the last use of a session that was reported by then."""
    found, released = [], threading.Event()

    class Watched(NoFaults):
        def reach(self, point):
            if point is WritePoint.INDEX_ROWS:
                released.wait(DEADLINE_S)
            elif point is WritePoint.INDEX_COMMITTED:
                with closing(sqlite3.connect(tmp_path / "manifest.db")) as db:
                    found.extend(db.execute(_USES_OF_SESSIONS))

    manifest = _new(make(Watched()), LAYOUT)
    for time_ns in range(1, 4 * MAX_BATCH, 2):  # commits end at each place among these rows
        manifest.put_use(LAYOUT.fingerprint, KEY, time_ns)
        session = replace(SESSION, last_access_ns=time_ns + 1)
        manifest.put_session(LAYOUT.fingerprint, session)
    released.set()
    manifest.close()
    assert len(found) > 3
    assert [row for row in found if row[0] > (row[1] or row[0])] == []


def test_a_use_goes_with_its_session(make):
    """One that comes back under its name is as old as it says."""
    manifest = _new(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.put_use(LAYOUT.fingerprint, KEY, 99)
    manifest.drop_session(LAYOUT.fingerprint, KEY)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.close()
    assert _rows(make()) == ([], [SESSION])


def test_a_use_writes_few_bytes(make, tmp_path):
    """However long the session is: its spans are not written again."""
    manifest = _new(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, replace(SESSION, spans=SPANS[:1] + SPANS[1:] * 4096))
    manifest.close()
    manifest, log = make(), tmp_path / "manifest.db-wal"
    before = log.stat().st_size if log.exists() else 0
    manifest.put_use(LAYOUT.fingerprint, KEY, 9)
    done = threading.Event()
    manifest.when_committed(done.set)
    assert done.wait(DEADLINE_S)
    assert log.stat().st_size - before < len(SPANS) * 4096 // 4
    assert _rows(manifest)[1][0].last_access_ns == 9


def test_a_tenants_key_takes_the_place_of_its_salt(make):
    """The salt is in it: in plain it is there no more."""
    _fill(make())
    manifest = make()
    manifest.put_tenant_key("tenant", b"w" * 112)
    manifest.close()
    assert (make().salts(), make().tenant_keys()) == ({}, {"tenant": b"w" * 112})


def test_a_key_that_is_dropped_is_in_no_file(make, tmp_path):
    """Neither in a free page nor in the write-ahead log, once that is said; the other is there."""
    manifest = make()
    manifest._db.execute("PRAGMA secure_delete = OFF")  # some builds of SQLite begin with it on
    manifest.zero_removed()
    secrets = [bytes([byte]) * 112 for byte in b"xyz"]
    for secret in secrets[:2]:
        manifest.put_tenant_key("tenant", secret)
    manifest.put_tenant_key("other", secrets[2])
    committed = threading.Event()
    manifest.when_committed(committed.set)
    assert committed.wait(DEADLINE_S)
    assert _files_with(tmp_path, secrets[1])
    dropped = threading.Event()
    manifest.drop_tenant_keys(["tenant"], dropped.set)
    assert dropped.wait(DEADLINE_S)
    assert [bool(_files_with(tmp_path, secret)) for secret in secrets] == [False, False, True]


def test_what_no_cache_knows_goes_with_the_key(make, tmp_path):
    """Rows of sessions that could not be read, or whose layout could not, name the tenant, too."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        sql = "INSERT INTO sessions VALUES (?, ?, 'unread', x'', 0, NULL, ?, 0)"
        db.executemany(sql, [(99, "tenant", 0), (1, "tenant", 99), (99, "other", 0)])
        uses = [(99, "tenant"), (99, "other")]
        db.executemany("INSERT INTO uses VALUES (?, ?, 'unread', 0)", uses)
    db.close()
    manifest = make()
    dropped = threading.Event()
    manifest.drop_tenant_keys(["tenant"], dropped.set)
    assert dropped.wait(DEADLINE_S)
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        for table in ("sessions", "uses"):
            assert db.execute(f"SELECT tenant FROM {table}").fetchall() == [("other",)]  # noqa: S608
    db.close()


def test_a_reader_delays_the_end_of_a_key(make, tmp_path):
    """While somebody reads what was in the index before, it is not said that the key is gone."""
    tried = threading.Event()
    manifest = make(Told(WritePoint.KEYS_DROPPED, tried))
    manifest.zero_removed()
    manifest.put_tenant_key("tenant", b"x" * 112)
    committed = threading.Event()
    manifest.when_committed(committed.set)
    assert committed.wait(DEADLINE_S)
    reader = sqlite3.connect(tmp_path / "manifest.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM tenant_keys").fetchone()
    dropped = threading.Event()
    manifest.drop_tenant_keys(["tenant"], dropped.set)
    assert tried.wait(DEADLINE_S)
    assert not dropped.is_set()
    reader.execute("COMMIT")
    assert dropped.wait(DEADLINE_S)
    assert not _files_with(tmp_path, b"x" * 112)
    reader.close()


def _files_with(directory, secret):
    return [path.name for path in directory.glob("manifest.db*") if secret in path.read_bytes()]


def test_a_newer_schema_is_left_alone(make, tmp_path):
    """A newer release's index is neither used nor moved."""
    _fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(NewerManifestError, match=f"schema {SCHEMA_VERSION + 1}"):
        make()
    assert [path.name for path in tmp_path.glob("manifest.db.*")] == []


def test_a_directory_that_is_not_there(tmp_path):
    """What cannot be opened is not damaged."""
    with pytest.raises(UnusableManifestError, match="writable"):
        Manifest(tmp_path / "nowhere" / "manifest.db", tmp_path / "volumes", NoFaults()).open()


# --------------------------------------------------------------------------------- commits


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


def test_a_failed_commit_is_tried_again(make):
    """What the disk refuses is kept until it does not; each try passes its write points."""
    faults = Recorder(num_failures=1)
    manifest = make(faults)
    done = threading.Event()
    manifest.put_meta("a", "1")
    manifest.when_committed(done.set)
    assert done.wait(30)
    manifest.close()
    assert make().meta("a") == "1"
    begun, rows, committed = (
        WritePoint.INDEX_BEGUN,
        WritePoint.INDEX_ROWS,
        WritePoint.INDEX_COMMITTED,
    )
    expected = [WritePoint.INDEX_CREATED, begun, rows, begun, rows, committed]
    assert faults.points[:6] == expected
    assert WritePoint.CLOCK_SAVED in faults.points


def test_a_disk_that_takes_nothing_does_not_keep_the_index_open(tmp_path):
    """What cannot be committed is lost at the end, which comes all the same."""
    faults = Recorder(num_failures=1 << 30)

    def live():
        manifest = Manifest(tmp_path / "manifest.db", tmp_path / "volumes", faults)
        manifest.open()
        manifest.put_meta("a", "1")
        manifest.close()

    living = threading.Thread(target=live)
    living.start()
    living.join(DEADLINE_S)
    has_ended = not living.is_alive()
    faults.num_failures = 0  # or the thread would try for ever
    assert has_ended


def test_what_is_not_committed_is_counted(make):
    """Rows count with what they hold, until they are committed, also while commits fail."""
    released = threading.Event()

    class Held(NoFaults):
        def reach(self, point):
            if point is WritePoint.INDEX_ROWS:
                released.wait(DEADLINE_S)

    manifest = make(Held())
    assert (manifest.queued_bytes, manifest.room_bytes) == (0, MAX_QUEUED_BYTES)
    _new(manifest, LAYOUT)
    spans = SPANS[:1] + SPANS[1:] * 4096
    for number in range(200):
        key = SessionKey("tenant", LAYOUT.model, str(number))
        manifest.put_session(LAYOUT.fingerprint, SessionRecord(key, spans, 1))
    assert manifest.queued_bytes > 200 * len(spans) > MAX_QUEUED_BYTES
    assert manifest.room_bytes == 0
    released.set()
    done = threading.Event()
    manifest.when_committed(done.set)
    assert done.wait(DEADLINE_S)
    assert (manifest.queued_bytes, manifest.room_bytes) == (0, MAX_QUEUED_BYTES)


def test_a_rollback_that_fails_is_tried_again(make):
    """The writer's thread outlives it, and commits once it can."""
    manifest = make(Recorder(num_failures=1))
    _new(manifest, LAYOUT)
    refused = []

    def authorize(action, name, *_):
        if action == sqlite3.SQLITE_TRANSACTION and name == "ROLLBACK" and not refused:
            refused.append(name)
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    manifest._db.set_authorizer(authorize)
    committed = threading.Event()
    manifest.put_block(LAYOUT.fingerprint, BLOCK, committed.set)
    assert committed.wait(30)
    assert refused


def test_a_commit_outlives_the_power(tmp_path):
    """SQLite is asked to sync its log at each commit: what was committed is said to be durable."""
    names = ("journal_mode", "synchronous")
    with closing(open_database(tmp_path / "manifest.db", tmp_path / "v", NoFaults())) as db:
        settings = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert settings == ["wal", 2]  # 2: FULL


def test_a_database_that_cannot_be_opened_is_not_taken_for_a_damaged_one(make, tmp_path):
    """Who is in SQLite's way may go; the rows stay where they are."""
    _fill(make())
    in_the_way = tmp_path / "manifest.db-wal"
    in_the_way.mkdir()
    with pytest.raises(UnusableManifestError):
        open_database(tmp_path / "manifest.db", tmp_path / "volumes", NoFaults())
    assert not list(tmp_path.glob("*.corrupt*"))
    in_the_way.rmdir()
    assert _rows(make()) == ([BLOCK], [SESSION])
