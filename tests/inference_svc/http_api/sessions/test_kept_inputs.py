"""The stored inputs of responses, within a limit of bytes."""

import pytest

from inference_svc.http_api.sessions.kept_inputs import KeptInputs
from inference_svc.http_api.sessions.store_file import BoundedTables, open_store

BOUND = 1600


@pytest.fixture
def db(tmp_path):
    opened, _ = open_store(tmp_path)
    yield opened
    opened.close()


def inputs_of(db):
    return KeptInputs(db, BoundedTables(db, 1000), BOUND)


def stored_ids(db):
    return {name for (name,) in db.execute("SELECT id FROM inputs")}


def size_of(db):
    return db.execute("SELECT sum(length(CAST(items AS BLOB))) FROM inputs").fetchone()[0]


def test_the_oldest_inputs_are_removed_at_the_limit(db):
    """With some more, so that not every input has to make room; the newest stays."""
    inputs = inputs_of(db)
    for number in range(16):
        inputs.keep("acme", f"r{number}", "x" * 100)
    assert len(stored_ids(db)) == 16
    inputs.keep("acme", "r16", "x" * 100)
    assert stored_ids(db) == {f"r{number}" for number in range(2, 17)}
    for number in range(17, 60):
        inputs.keep("acme", f"r{number}", "x" * 100)
        assert size_of(db) <= BOUND
        assert f"r{number}" in stored_ids(db)


def test_the_limit_counts_bytes_not_characters(db):
    """As they lie on the disk."""
    inputs = inputs_of(db)
    for number in range(4):
        inputs.keep("acme", f"r{number}", "é" * 300)
    assert stored_ids(db) == {"r2", "r3"}


def test_a_tenant_removes_its_own_inputs_only(db):
    """The largest one loses its oldest, though another's are older."""
    inputs = inputs_of(db)
    for number in range(4):
        inputs.keep("quiet", f"q{number}", "x" * 100)
    for number in range(100):
        inputs.keep("loud", f"l{number}", "x" * 150)
    assert {name for name in stored_ids(db) if name.startswith("q")} == {"q0", "q1", "q2", "q3"}
    assert "l99" in stored_ids(db)
    for number in range(100):
        inputs.keep("third", f"t{number}", "x" * 100)
    sizes = dict(db.execute("SELECT tenant, sum(size) FROM inputs GROUP BY tenant"))
    assert sizes["quiet"] == 400
    assert max(sizes.values()) - min(sizes["loud"], sizes["third"]) <= 300


def test_deleted_inputs_make_room(db):
    """Nothing else is removed for the next input."""
    inputs = inputs_of(db)
    for number in range(16):
        inputs.keep("acme", f"r{number}", "x" * 100)
    db.execute("DELETE FROM inputs WHERE id = 'r3'")
    inputs.keep("acme", "r16", "x" * 100)
    assert stored_ids(db) == {f"r{number}" for number in range(17)} - {"r3"}


def test_deleted_inputs_are_overwritten(db, tmp_path):
    """In the file, too, when the database is vacuumed."""
    inputs = inputs_of(db)
    db.execute("INSERT INTO responses VALUES ('r', 'acme', 's', 1, 'q', 0, NULL, '{}', 1)")
    files = list(tmp_path.iterdir())

    def is_there():
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return any(b"a secret" in path.read_bytes() for path in files)

    inputs.keep("acme", "r", "a secret" * 8)
    assert is_there()
    inputs.forget("acme", "s")
    assert not is_there()


def test_a_repeat_replaces_the_first_input(db):
    """It is the same response."""
    inputs = inputs_of(db)
    for _ in range(40):
        inputs.keep("acme", "r", "x" * 100)
    assert inputs.find("acme", "r") == "x" * 100
    assert size_of(db) == 100


def test_a_smaller_limit_applies_at_the_next_input(db):
    """Inputs of an earlier start count."""
    for number in range(16):
        inputs_of(db).keep("acme", f"r{number}", "x" * 100)
    KeptInputs(db, BoundedTables(db, 1000), 320).keep("acme", "last", "x" * 100)
    assert stored_ids(db) == {"r14", "r15", "last"}


def test_a_limit_of_zero_stores_nothing(db):
    """And removes stored inputs."""
    inputs_of(db).keep("acme", "r", "x")
    KeptInputs(db, BoundedTables(db, 1000), 0).keep("acme", "last", "x")
    assert stored_ids(db) == set()
