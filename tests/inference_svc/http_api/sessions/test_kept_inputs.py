"""The inputs of responses: what is kept of them within a bound of bytes."""

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


def kept(db):
    return {name for (name,) in db.execute("SELECT id FROM inputs")}


def size_of(db):
    return db.execute("SELECT sum(length(CAST(items AS BLOB))) FROM inputs").fetchone()[0]


def test_the_oldest_go_at_the_bound(db):
    """And some more, that not every input has to make room; the newest stays."""
    inputs = inputs_of(db)
    for number in range(16):
        inputs.keep("acme", f"r{number}", "x" * 100)
    assert len(kept(db)) == 16
    inputs.keep("acme", "r16", "x" * 100)
    assert kept(db) == {f"r{number}" for number in range(2, 17)}
    for number in range(17, 60):
        inputs.keep("acme", f"r{number}", "x" * 100)
        assert size_of(db) <= BOUND
        assert f"r{number}" in kept(db)


def test_bytes_count_and_not_characters(db):
    """As they lie on the disk."""
    inputs = inputs_of(db)
    for number in range(4):
        inputs.keep("acme", f"r{number}", "é" * 300)
    assert kept(db) == {"r2", "r3"}


def test_a_tenant_pushes_out_its_own_only(db):
    """Who has the most gives up its oldest, though another's are older."""
    inputs = inputs_of(db)
    for number in range(4):
        inputs.keep("quiet", f"q{number}", "x" * 100)
    for number in range(100):
        inputs.keep("loud", f"l{number}", "x" * 150)
    assert {name for name in kept(db) if name.startswith("q")} == {"q0", "q1", "q2", "q3"}
    assert "l99" in kept(db)
    for number in range(100):
        inputs.keep("third", f"t{number}", "x" * 100)
    sizes = dict(db.execute("SELECT tenant, sum(size) FROM inputs GROUP BY tenant"))
    assert sizes["quiet"] == 400
    assert max(sizes.values()) - min(sizes["loud"], sizes["third"]) <= 300


def test_what_is_deleted_makes_room(db):
    """Nothing else goes for what comes in its place."""
    inputs = inputs_of(db)
    for number in range(16):
        inputs.keep("acme", f"r{number}", "x" * 100)
    db.execute("DELETE FROM inputs WHERE id = 'r3'")
    inputs.keep("acme", "r16", "x" * 100)
    assert kept(db) == {f"r{number}" for number in range(17)} - {"r3"}


def test_what_is_deleted_is_overwritten(db, tmp_path):
    """In the file, too, when the database puts it in order."""
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


def test_a_repeat_takes_the_place_of_the_first(db):
    """It is the same response."""
    inputs = inputs_of(db)
    for _ in range(40):
        inputs.keep("acme", "r", "x" * 100)
    assert inputs.find("acme", "r") == "x" * 100
    assert size_of(db) == 100


def test_a_smaller_bound_holds_at_the_next_input(db):
    """What an earlier start has kept counts."""
    for number in range(16):
        inputs_of(db).keep("acme", f"r{number}", "x" * 100)
    KeptInputs(db, BoundedTables(db, 1000), 320).keep("acme", "last", "x" * 100)
    assert kept(db) == {"r14", "r15", "last"}


def test_a_bound_of_nothing_keeps_nothing(db):
    """Nor what was kept before."""
    inputs_of(db).keep("acme", "r", "x")
    KeptInputs(db, BoundedTables(db, 1000), 0).keep("acme", "last", "x")
    assert kept(db) == set()
