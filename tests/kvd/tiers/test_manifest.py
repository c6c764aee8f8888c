"""The index: committed rows are found by the next start."""

import errno
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from kvd.core.records.entries import Pin, SessionRecord
from kvd.tiers import manifest as manifest_module
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.index_database import open_database
from kvd.tiers.manifest import MAX_BATCH, MAX_QUEUED_BYTES, LayoutRow, Manifest
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey
from tests.kvd.tiers.indexes import (
    BLOCK,
    KEY,
    LAYERS,
    LAYOUT,
    OTHER,
    SESSION,
    SPANS,
    fill,
    ignore,
    new_layouts,
    rows_of,
)

DEADLINE_S = 30.0

_USES_OF_SESSIONS = (
    "SELECT sessions.last_access_ns, uses.last_access_ns "
    "FROM sessions LEFT JOIN uses USING (layout, tenant, session_id)"
)


_RETENTIONS_OF_SESSIONS = (
    "SELECT retain_ns FROM sessions LEFT JOIN retentions USING (layout, tenant, session_id)"
)


class Recorder(NoFaults):
    """Records write points; fails the first commits."""

    def __init__(self, num_failures=0):
        self.points, self.num_failures = [], num_failures

    def reach(self, point):
        self.points.append(point)
        if point is WritePoint.INDEX_ROWS and self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.ENOSPC, "injected")


class RecordingFaults(NoFaults):
    """Sets an event at a write point."""

    def __init__(self, point, event):
        self.point, self.event = point, event

    def reach(self, point):
        if point is self.point:
            self.event.set()


def test_everything_is_restored(make):
    """Layouts, salts, values, blocks and sessions are read as they were written."""
    fill(make())
    found = make()
    assert found.layouts() == [LayoutRow(LAYOUT.fingerprint, b"message", 5)]
    assert found.salts() == {"tenant": b"s" * 32}
    assert (found.meta("clock"), found.meta("nothing")) == ("text", "")
    assert rows_of(found) == ([BLOCK], [SESSION])


@pytest.mark.parametrize(
    "setting", [{"ttl_ns": 5}, {"pin": Pin.SOFT}, {"ended": True}, {"retain_ns": 5}]
)
def test_a_session_with_one_setting_keeps_it(make, setting):
    """Even if no other session has one."""
    plain = SessionRecord(KEY, SPANS, last_access_ns=7)
    sessions = [plain, replace(plain, key=KEY._replace(session_id="b"), **setting)]
    manifest = new_layouts(make(), LAYOUT)
    for session in sessions:
        manifest.put_session(LAYOUT.fingerprint, session)
    manifest.close()
    assert rows_of(make())[1] == sessions


def test_rows_are_replaced_and_removed(make):
    """A later row replaces an earlier one; dropped rows are gone."""
    manifest = new_layouts(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    changed = SessionRecord(KEY, b"\0", last_access_ns=9)
    manifest.put_session(LAYOUT.fingerprint, changed)
    manifest.put_block(LAYOUT.fingerprint, BLOCK, ignore)
    manifest.drop_block(LAYOUT.fingerprint, BLOCK.key)
    manifest.close()
    found = make()
    assert rows_of(found) == ([], [changed])
    found.drop_session(LAYOUT.fingerprint, KEY)
    found.close()
    assert rows_of(make()) == ([], [])


def test_a_retention_is_stored_beside_its_sessions_row(make):
    """A later row without one ends it, and so does the end of the session."""
    retained = replace(SESSION, retain_ns=30)
    manifest = new_layouts(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, retained)
    manifest.put_use(LAYOUT.fingerprint, KEY, 70)
    manifest.close()
    found = make()
    assert rows_of(found)[1] == [replace(retained, last_access_ns=70)]
    found.put_session(LAYOUT.fingerprint, SESSION)
    found.close()
    again = make()
    assert rows_of(again)[1] == [SESSION]
    again.put_session(LAYOUT.fingerprint, retained)
    again.drop_session(LAYOUT.fingerprint, KEY)
    again.put_session(LAYOUT.fingerprint, SESSION)
    again.close()
    assert rows_of(make())[1] == [SESSION]


def test_commits_are_reported_when_they_are_durable(make, tmp_path):
    """When a drop is reported, another connection does not see the row any more."""
    manifest = new_layouts(make(), LAYOUT)
    manifest.put_block(LAYOUT.fingerprint, BLOCK, ignore)
    seen = []
    done = threading.Event()

    def committed():
        with sqlite3.connect(tmp_path / "manifest.db") as other:
            seen.extend(other.execute("SELECT * FROM blocks").fetchall())
        done.set()

    manifest.drop_block(LAYOUT.fingerprint, BLOCK.key, committed)
    assert done.wait(30)
    assert seen == []


def test_layouts_are_separate(make):
    """Rows belong to their layout, also after it was stored again and others were added."""
    manifest = new_layouts(make(), LAYOUT, OTHER)
    manifest.put_block(OTHER.fingerprint, BLOCK, ignore)
    manifest.close()
    found = new_layouts(make(), OTHER)
    other_session = SessionRecord(SessionKey("tenant", OTHER.model, "a"), SPANS, 1)
    found.put_session(OTHER.fingerprint, other_session)
    found.put_session(LAYOUT.fingerprint, SESSION)
    found.close()
    found = make()
    assert rows_of(found) == ([], [SESSION])
    assert rows_of(found, OTHER) == ([BLOCK], [other_session])
    with pytest.raises(ValueError, match="not in the index"):
        found.rows(KVLayout("ef" * 16, LAYERS, block_tokens=16))


def test_blocks_can_be_queried_by_layout(make):
    """A query about one layout returns nothing of another."""
    manifest = new_layouts(make(), LAYOUT, OTHER)
    assert not manifest.has_blocks()
    manifest.put_block(OTHER.fingerprint, BLOCK, ignore)
    manifest.close()
    found = make()
    assert found.has_blocks()
    assert found.has_blocks(OTHER.fingerprint)
    assert not found.has_blocks(LAYOUT.fingerprint)


def test_the_last_use_counts(make):
    """With the session's row or separately, also if the boot time has gone back since."""
    manifest = new_layouts(make(), LAYOUT)
    for put_ns, used_ns in ((7, 9), (8, None), (30, 5), (4, None)):
        manifest.put_session(LAYOUT.fingerprint, replace(SESSION, last_access_ns=put_ns))
        if used_ns is not None:
            manifest.put_use(LAYOUT.fingerprint, KEY, used_ns)
        manifest.close()
        manifest = make()
        assert rows_of(manifest)[1][0].last_access_ns == (used_ns or put_ns)


def test_no_commit_has_an_older_use_beside_a_row(make, tmp_path):
    """A kill between two commits leaves the last reported use of a session."""
    found, released = [], threading.Event()

    class Watched(NoFaults):
        def reach(self, point):
            if point is WritePoint.INDEX_ROWS:
                released.wait(DEADLINE_S)
            elif point is WritePoint.INDEX_COMMITTED:
                with closing(sqlite3.connect(tmp_path / "manifest.db")) as db:
                    found.extend(db.execute(_USES_OF_SESSIONS))

    manifest = new_layouts(make(Watched()), LAYOUT)
    for time_ns in range(1, 4 * MAX_BATCH, 2):  # commits end at each place among these rows
        manifest.put_use(LAYOUT.fingerprint, KEY, time_ns)
        session = replace(SESSION, last_access_ns=time_ns + 1)
        manifest.put_session(LAYOUT.fingerprint, session)
    released.set()
    manifest.close()
    assert len(found) > 3
    assert [row for row in found if row[0] > (row[1] or row[0])] == []


def test_no_commit_has_a_session_without_its_retention(make, tmp_path):
    """A kill between any two commits leaves it protected from eviction."""
    found, released = [], threading.Event()

    class Watched(NoFaults):
        def reach(self, point):
            if point is WritePoint.INDEX_ROWS:
                released.wait(DEADLINE_S)
            elif point is WritePoint.INDEX_COMMITTED:
                with closing(sqlite3.connect(tmp_path / "manifest.db")) as db:
                    found.extend(db.execute(_RETENTIONS_OF_SESSIONS))

    manifest = new_layouts(make(Watched()), LAYOUT)
    for retain_ns in range(1, 3 * MAX_BATCH):  # the first commit has any number of rows
        manifest.put_session(LAYOUT.fingerprint, replace(SESSION, retain_ns=retain_ns))
        if retain_ns % 2:
            manifest.put_use(LAYOUT.fingerprint, KEY, 1)
    released.set()
    manifest.close()
    assert len(found) > 3
    assert (None,) not in found


def test_a_use_goes_with_its_session(make):
    """One that comes back under its name is as old as it says."""
    manifest = new_layouts(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.put_use(LAYOUT.fingerprint, KEY, 99)
    manifest.drop_session(LAYOUT.fingerprint, KEY)
    manifest.put_session(LAYOUT.fingerprint, SESSION)
    manifest.close()
    assert rows_of(make()) == ([], [SESSION])


def test_a_use_writes_few_bytes(make, tmp_path):
    """However long the session is: its spans are not written again."""
    manifest = new_layouts(make(), LAYOUT)
    manifest.put_session(LAYOUT.fingerprint, replace(SESSION, spans=SPANS[:1] + SPANS[1:] * 4096))
    manifest.close()
    manifest, log = make(), tmp_path / "manifest.db-wal"
    before = log.stat().st_size if log.exists() else 0
    manifest.put_use(LAYOUT.fingerprint, KEY, 9)
    done = threading.Event()
    manifest.when_committed(done.set)
    assert done.wait(DEADLINE_S)
    assert log.stat().st_size - before < len(SPANS) * 4096 // 4
    assert rows_of(manifest)[1][0].last_access_ns == 9


def test_a_tenants_key_replaces_its_salt(make):
    """The salt is wrapped with it: its plain form is removed."""
    fill(make())
    manifest = make()
    manifest.put_tenant_key("tenant", b"w" * 112)
    manifest.close()
    assert (make().salts(), make().tenant_keys()) == ({}, {"tenant": b"w" * 112})


def test_a_dropped_key_is_in_no_file(make, tmp_path):
    """Neither in a free page nor in the write-ahead log, once reported; the other key stays."""
    manifest = make()
    manifest._db.execute("PRAGMA secure_delete = OFF")  # the default of some builds of SQLite
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


def test_rows_that_no_cache_has_are_dropped_with_the_key(make, tmp_path):
    """Unreadable sessions, and those of unreadable layouts, name the tenant, too."""
    fill(make())
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        sql = "INSERT INTO sessions VALUES (?, ?, 'unread', x'', 0, NULL, ?, 0)"
        db.executemany(sql, [(99, "tenant", 0), (1, "tenant", 99), (99, "other", 0)])
        uses = [(99, "tenant"), (99, "other")]
        for table in ("uses", "retentions"):
            db.executemany(f"INSERT INTO {table} VALUES (?, ?, 'unread', 0)", uses)  # noqa: S608
    db.close()
    manifest = make()
    dropped = threading.Event()
    manifest.drop_tenant_keys(["tenant"], dropped.set)
    assert dropped.wait(DEADLINE_S)
    with sqlite3.connect(tmp_path / "manifest.db") as db:
        for table in ("sessions", "uses", "retentions"):
            assert db.execute(f"SELECT tenant FROM {table}").fetchall() == [("other",)]  # noqa: S608
    db.close()


def test_a_reader_delays_the_report_of_a_dropped_key(make, tmp_path):
    """While a reader has a snapshot from before, the key is not reported as gone."""
    tried = threading.Event()
    manifest = make(RecordingFaults(WritePoint.KEYS_DROPPED, tried))
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


def test_a_locked_database_is_retried(make, tmp_path):
    """While another process holds the write lock rows wait; then they are committed, in order."""
    manifest = make()
    other = sqlite3.connect(tmp_path / "manifest.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    manifest.put_meta("a", "1")
    manifest.put_meta("a", "2")
    other.execute("COMMIT")
    other.close()
    manifest.close()
    assert make().meta("a") == "2"


def test_a_failed_commit_is_retried(make, monkeypatch):
    """Rows that the disk refuses are kept until it accepts them; each try passes the points."""
    monkeypatch.setattr(manifest_module, "RETRY_S", 0.1)
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


def test_a_failing_disk_does_not_keep_the_index_open(tmp_path):
    """Uncommitted rows are lost at the end, which comes all the same."""
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
    faults.num_failures = 0  # otherwise the thread would retry for ever
    assert has_ended


def test_uncommitted_rows_are_counted(make):
    """With their bytes, until they are committed, also while commits fail."""
    released = threading.Event()

    class Held(NoFaults):
        def reach(self, point):
            if point is WritePoint.INDEX_ROWS:
                released.wait(DEADLINE_S)

    manifest = make(Held())
    assert (manifest.queued_bytes, manifest.room_bytes) == (0, MAX_QUEUED_BYTES)
    new_layouts(manifest, LAYOUT)
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


def test_a_failed_rollback_is_retried(make, monkeypatch):
    """The writer's thread survives it, and commits once it can."""
    monkeypatch.setattr(manifest_module, "RETRY_S", 0.1)
    manifest = make(Recorder(num_failures=1))
    new_layouts(manifest, LAYOUT)
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


def test_commits_are_durable(tmp_path):
    """SQLite is told to sync its log at each commit: committed rows are reported as durable."""
    names = ("journal_mode", "synchronous")
    with closing(open_database(tmp_path / "manifest.db", tmp_path / "v", NoFaults())) as db:
        settings = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert settings == ["wal", 2]  # 2: FULL
