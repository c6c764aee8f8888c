"""Stored chats: found, listed, bounded in bytes, and deleted with their sessions."""

import pytest

from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.http_api.sessions.stored_chats import ChatFilter, StoredChat

BOUND = 8000


@pytest.fixture
def store(tmp_path):
    opened = ApiStore(tmp_path, 1000, chat_bytes=BOUND)
    yield opened
    opened.close()


def chat(name, said="Hello", model="tiny", sessions=("s-1",), **metadata):
    completion = {"id": name, "model": model, "choices": [{"message": {"content": said}}]}
    messages = [{"id": f"{name}-0", "role": "user", "content": "Hi"}]
    return StoredChat(completion, messages, metadata, sessions)


async def ids(store, tenant="acme", **wanted):
    page, has_more = await store.chats.page(tenant, ChatFilter(**wanted))
    return [one["id"] for one in page], has_more


async def test_a_chat_is_found_by_its_tenant(store):
    """With its notes, and its input."""
    await store.chats.keep("acme", chat("c1", kind="first"))
    found = await store.chats.find("acme", "c1")
    assert (found["id"], found["metadata"]) == ("c1", {"kind": "first"})
    assert (await store.chats.messages("acme", "c1"))[0]["content"] == "Hi"
    assert await store.chats.find("other", "c1") is None
    assert await store.chats.messages("other", "c1") is None
    assert not await store.chats.delete("other", "c1")
    assert await store.chats.page("other", ChatFilter(after="c1")) is None
    assert await store.chats.delete("acme", "c1")
    assert await store.chats.find("acme", "c1") is None


async def test_lists_have_pages(store):
    """In order of storage, or reversed; by model, or by notes."""
    for number in range(5):
        notes = {"parity": str(number % 2), "it's": '"'}
        await store.chats.keep("acme", chat(f"c{number}", model=f"m{number // 3}", **notes))
    assert await ids(store, limit=2) == (["c0", "c1"], True)
    assert await ids(store, limit=3, after="c1") == (["c2", "c3", "c4"], False)
    assert await ids(store, limit=2, after="c3", is_ascending=False) == (["c2", "c1"], True)
    assert await ids(store, model="m1") == (["c3", "c4"], False)
    assert await ids(store, metadata={"parity": "1", "it's": '"'}) == (["c1", "c3"], False)
    assert await ids(store, metadata={"parity": "1", "other": ""}) == ([], False)
    assert await ids(store, tenant="other") == ([], False)


async def test_notes_are_replaced_and_a_repeat_changes_nothing(store):
    """A repeat has the same id; later notes of its client stay."""
    await store.chats.keep("acme", chat("c1", a="1"))
    await store.chats.set_metadata("other", "c1", {"b": "2"})
    assert (await store.chats.find("acme", "c1"))["metadata"] == {"a": "1"}
    await store.chats.set_metadata("acme", "c1", {"b": "2"})
    await store.chats.keep("acme", chat("c1", a="1"))
    assert (await store.chats.find("acme", "c1"))["metadata"] == {"b": "2"}


async def test_the_oldest_chats_are_removed_at_the_limit(store):
    """Those of the largest tenant; a chat larger than the limit is not stored."""
    await store.chats.keep("quiet", chat("q"))
    for number in range(30):
        await store.chats.keep("acme", chat(f"c{number}", "x" * 500))
    kept, _ = await ids(store, limit=100)
    assert 0 < len(kept) < 16
    assert kept == [f"c{number}" for number in range(30 - len(kept), 30)]
    assert await ids(store, tenant="quiet") == (["q"], False)
    await store.chats.keep("acme", chat("large", "x" * BOUND))
    assert await store.chats.find("acme", "large") is None
    assert (await ids(store, limit=100))[0] == kept


async def test_a_chat_is_deleted_with_a_session_that_answered_it(store):
    """Any of them, but not another tenant's of that name."""
    await store.chats.keep("acme", chat("c1", sessions=("s-1", "s-2")))
    await store.chats.keep("acme", chat("c2", sessions=("s-3",)))
    await store.forget_texts("other", "s-2")
    assert (await ids(store))[0] == ["c1", "c2"]
    await store.forget_texts("acme", "s-2")
    assert (await ids(store))[0] == ["c2"]


async def test_the_characters_of_a_page_are_limited(tmp_path):
    """A page of long chats has fewer."""
    store = ApiStore(tmp_path, 1000, chat_bytes=2**24)
    try:
        for number in range(4):
            await store.chats.keep("acme", chat(f"c{number}", "x" * 400_000))
        assert await ids(store) == (["c0", "c1"], True)
        assert await ids(store, after="c1") == (["c2", "c3"], False)
    finally:
        store.close()
