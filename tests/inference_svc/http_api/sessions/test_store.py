"""Stored facts between requests, in a real file."""

import asyncio
import contextlib
import sqlite3
import stat

import pytest

from inference_svc.core.errors import TranscriptError
from inference_svc.http_api.sessions import store_file
from inference_svc.http_api.sessions.lookup import (
    Point,
    ResponseInfo,
    Route,
    StoredRequest,
    StoredResponse,
)
from inference_svc.http_api.sessions.store import ApiStore, StoreUnavailableError
from inference_svc.http_api.sessions.store_file import FILE_NAME, PRUNE_EVERY

MIB = 2**20
AT = Point("s-1", 2, "r-1", is_named=False)
INFO = ResponseInfo(1.0, "m", instructions="Be brief.", metadata={"a": "é"})
RESPONSE = StoredResponse(AT, b"h" * 16, INFO)


@pytest.fixture
def store(tmp_path):
    store = ApiStore(tmp_path, 1000)
    yield store
    store.close()


async def test_histories_survive_a_restart(tmp_path):
    """With the key of their digests."""
    store = ApiStore(tmp_path, 1000)
    await store.keep_histories("acme", [(b"a", AT), (b"b", Point("n", 1, "r-2", is_named=True))])
    key = store.key
    store.close()
    again = ApiStore(tmp_path, 1000)
    assert again.key == key
    found = await again.find_histories([b"a", b"b", b"c"])
    assert found == {b"a": AT, b"b": Point("n", 1, "r-2", is_named=True)}
    again.close()


async def test_the_last_session_of_a_history_is_found(store):
    """Until its history is forgotten."""
    await store.keep_histories("acme", [(b"a", AT)])
    await store.keep_histories("acme", [(b"a", Point("s-2", 2, "r-9", is_named=False))])
    assert (await store.find_histories([b"a"]))[b"a"].session_id == "s-2"
    await store.forget_histories([b"a"])
    assert await store.find_histories([b"a"]) == {}


async def test_the_least_recently_used_is_removed_first(tmp_path):
    """The file is bounded; a look-up is a use."""
    store = ApiStore(tmp_path, 100)
    await store.keep_histories("acme", [(b"old", AT), (b"older", AT)])
    for number in range(2 * PRUNE_EVERY):
        await store.keep_histories("acme", [(b"%d" % number, AT)])
        await store.find_histories([b"old"])
    assert set(await store.find_histories([b"old", b"older"])) == {b"old"}
    (rows,) = store._db.execute("SELECT count(*) FROM histories").fetchone()
    assert rows <= 100 + PRUNE_EVERY
    store.close()


async def test_a_response_belongs_to_its_tenant(store):
    """Others cannot find or delete it."""
    await store.keep_response("acme", "resp_1", RESPONSE)
    assert await store.find_response("acme", "resp_1") == RESPONSE
    assert await store.find_response("other", "resp_1") is None
    await store.forget_response("other", "resp_1")
    assert await store.responses_of("acme", "s-1") == {"resp_1"}
    assert await store.responses_of("other", "s-1") == set()
    await store.forget_response("acme", "resp_1")
    assert await store.find_response("acme", "resp_1") is None


async def test_unknown_facts_of_a_newer_release_are_ignored(tmp_path):
    """After going back to this one."""
    store = ApiStore(tmp_path, 100)
    await store.keep_response("acme", "resp_1", RESPONSE)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("UPDATE responses SET facts = json_set(facts, '$.since_2031', json('[1]'))")
    again = ApiStore(tmp_path, 100)
    assert await again.find_response("acme", "resp_1") == RESPONSE
    again.close()


async def test_requests_and_temporary_sessions(store):
    """Each is known until it is not needed."""
    request = StoredRequest(b"body", Route("s-1", 2, 1, None, is_named=True))
    await store.keep_request("acme", b"key", request)
    assert await store.find_request(b"key") == request
    assert await store.find_request(b"other") is None
    await store.record_temporary("acme", "s-9")
    assert await store.temporary_sessions() == [("acme", "s-9")]
    await store.forget_temporary("acme", "s-9")
    assert await store.temporary_sessions() == []


async def test_the_oldest_sessions_are_removed_once(store):
    """Beyond a bound, or a tenant's oldest; a session that is used again is young."""
    for session_id in ("1", "2", "3", "1"):
        await store.use_session("a", session_id)
    await store.touch_session("a", "2")
    await store.touch_session("a", "named-by-a-client")
    assert await store.take_oldest(3) == []
    assert await store.take_oldest(2) == [("a", "3")]
    assert await store.take_oldest_of("b") == ""
    assert [await store.take_oldest_of("a") for _ in range(3)] == ["1", "2", ""]


async def test_a_tenant_removes_its_own_rows_only(tmp_path):
    """The one that adds most rows loses its oldest, though another's are older."""
    store = ApiStore(tmp_path, 100)
    await store.use_session("quiet", "1")
    await store.keep_response("quiet", "resp_1", RESPONSE)
    await store.keep_histories("quiet", [(b"mine", AT)])
    for number in range(PRUNE_EVERY):
        await store.use_session("loud", str(number))
        await store.keep_response("loud", f"resp_loud_{number}", RESPONSE)
        await store.keep_histories("loud", [(b"%d" % number, AT)])
    assert await store.take_oldest(PRUNE_EVERY - 1) == [("loud", "0"), ("loud", "1")]
    assert await store.find_response("quiet", "resp_1") == RESPONSE
    assert await store.find_response("loud", "resp_loud_0") is None
    assert set(await store.find_histories([b"mine", b"0"])) == {b"mine"}
    store.close()


async def test_a_damaged_file_is_set_aside(tmp_path):
    """The service starts without any facts; the file is kept."""
    store = ApiStore(tmp_path, 1000)
    await store.keep_histories("acme", [(b"a", AT)])
    store.close()
    (tmp_path / FILE_NAME).write_bytes(
        b"this is no database, but long enough to be read as one" * 99
    )
    again = ApiStore(tmp_path, 1000)
    assert await again.find_histories([b"a"]) == {}
    again.close()
    assert (tmp_path / f"{FILE_NAME}.unusable-1").exists()


async def test_a_locked_file_is_not_set_aside(tmp_path, monkeypatch):
    """It may be fine: the start is refused, and everything is found at the next one."""
    store = ApiStore(tmp_path, 1000)
    await store.keep_histories("acme", [(b"a", AT)])
    store.close()
    monkeypatch.setattr(store_file, "BUSY_S", 0.01)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TranscriptError, match="locked"):
            ApiStore(tmp_path, 1000)
    again = ApiStore(tmp_path, 1000)
    assert set(await again.find_histories([b"a"])) == {b"a"}
    again.close()


async def test_a_file_of_another_release_is_set_aside(tmp_path):
    """Its tables may have another meaning."""
    ApiStore(tmp_path, 1000).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    ApiStore(tmp_path, 1000).close()
    assert (tmp_path / f"{FILE_NAME}.unusable-1").exists()


async def test_a_file_from_before_inputs_were_stored_is_used(tmp_path):
    """Its contents stay; responses that such a release deletes have no input any more."""
    store = ApiStore(tmp_path, 1000, MIB)
    await store.keep_response("acme", "resp_1", RESPONSE)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.executescript("DROP TRIGGER inputs_go; DROP TABLE inputs;")
    later = ApiStore(tmp_path, 1000, MIB)
    assert await later.find_response("acme", "resp_1") == RESPONSE
    assert await later.find_input("acme", "resp_1") is None
    await later.keep_response("acme", "resp_2", RESPONSE, "[]")
    assert await later.find_input("acme", "resp_2") == "[]"
    later.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("DELETE FROM responses")
        assert db.execute("SELECT count(*) FROM inputs").fetchone() == (0,)


async def test_an_input_belongs_to_its_tenant_and_is_deleted_with_its_response(tmp_path):
    """By a client, a bound, or the end of its session."""
    store = ApiStore(tmp_path, 100, MIB)
    for number in range(3):
        await store.keep_response("acme", f"resp_{number}", RESPONSE, "[]")
    assert await store.find_input("acme", "resp_0") == "[]"
    assert await store.find_input("other", "resp_0") is None
    await store.forget_response("acme", "resp_0")
    assert await store.find_input("acme", "resp_0") is None
    await store.forget_texts("other", "s-1")
    await store.forget_texts("acme", "s-2")
    assert await store.find_input("acme", "resp_1") == "[]"
    await store.forget_texts("acme", "s-1")
    assert await store.find_input("acme", "resp_1") is None
    assert await store.find_response("acme", "resp_1") == RESPONSE
    for number in range(2 * PRUNE_EVERY):
        await store.keep_response("acme", f"resp_next_{number}", RESPONSE, "[]")
    num_inputs, num_responses = (
        store._db.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
        for table in ("inputs", "responses")
    )
    assert num_inputs == num_responses
    store.close()


async def test_only_the_service_can_read_the_file(tmp_path):
    """It has digests, instructions, and the key."""
    store = ApiStore(tmp_path, 1000)
    await store.keep_response("acme", "resp_1", RESPONSE)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    store.close()


def test_an_unusable_directory_refuses_the_start(tmp_path):
    """With a remedy."""
    with pytest.raises(TranscriptError, match="--state-dir"):
        ApiStore(tmp_path / "missing", 1000)


async def test_unreadable_rows_are_unknown(store):
    """A history is a miss; whether a response exists cannot be told."""
    await store.keep_histories("acme", [(b"a", AT)])
    await asyncio.to_thread(store._db.execute, "DROP TABLE histories")
    await asyncio.to_thread(store._db.execute, "DROP TABLE responses")
    assert await store.find_histories([b"a"]) == {}
    await store.keep_histories("acme", [(b"a", AT)])
    with pytest.raises(StoreUnavailableError):
        await store.find_response("acme", "resp_1")
