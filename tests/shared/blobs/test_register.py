"""One writer at a time replaces a register, even if results of its calls are wrong."""

from random import Random

import pytest

from shared.blobs.blob_store import OvertakenError, StoreFailedError
from shared.blobs.register import NOTHING, Register
from tests.faulty_store import FaultyStore, Odds, View

PLACE = "v1/sessions/t/s/m"


def _store() -> tuple[FaultyStore, Register]:
    store = FaultyStore(Random(3))  # noqa: S311
    return store, Register(View(store, is_calm=True), PLACE)


def test_versions_follow_each_other() -> None:
    """Each replaces the version read before, and only one is left."""
    store, register = _store()
    assert register.read() is None
    register.replace(NOTHING, b"one")
    for data in (b"two", b"three"):
        register.replace(register.look(), data)
    found = register.read()
    assert found is not None
    assert (found.seen.number, found.data, len(store.blobs)) == (3, b"three", 1)
    register.remove(found.seen)
    assert (register.read(), store.blobs) == (None, {})


def test_of_two_writers_of_one_version_one_wins() -> None:
    """The other fails, and leaves nothing."""
    store, register = _store()
    register.replace(NOTHING, b"one")
    read = register.read()
    register.replace(read.seen, b"two")
    with pytest.raises(OvertakenError):
        register.replace(read.seen, b"late")
    with pytest.raises(OvertakenError):
        register.replace(NOTHING, b"later")
    assert [data for data, _ in store.blobs.values()] == [b"two"]


def test_a_later_writer_of_an_old_version_loses_too() -> None:
    """Also if its number was created and removed meanwhile."""
    store, register = _store()
    register.replace(NOTHING, b"one")
    read = register.read()
    for data in (b"two", b"three", b"four"):
        register.replace(register.look(), data)
    with pytest.raises(OvertakenError):
        register.replace(read.seen, b"late")
    found = register.read()
    assert found is not None
    assert (found.data, len(store.blobs)) == (b"four", 1)


def test_an_unreported_success_is_recognised() -> None:
    """The store reported an error, or, at the repetition, that the name exists: it is ours."""
    store = FaultyStore(Random(3), odds=Odds(lies=1.0))  # noqa: S311
    Register(View(store), PLACE).replace(NOTHING, b"one")
    assert [data for data, _ in store.blobs.values()] == [b"one"]


def test_a_failure_leaves_nothing() -> None:
    """Nothing is there, and nothing is said to be."""
    store = FaultyStore(Random(3), odds=Odds(late=1.0))  # noqa: S311
    with pytest.raises(StoreFailedError):
        Register(View(store), PLACE).replace(NOTHING, b"one")
    assert store.blobs == {}


def test_other_objects_are_ignored() -> None:
    """Other names are no versions."""
    store, register = _store()
    store.put(f"{PLACE}/README", b"x", if_absent=True)
    assert register.read() is None
    register.replace(NOTHING, b"one")
    assert f"{PLACE}/README" in store.blobs
