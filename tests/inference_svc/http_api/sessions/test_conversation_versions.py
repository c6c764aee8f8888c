"""Versions of conversations: every change is noted, whatever makes it."""

from dataclasses import replace

import pytest

from inference_svc.http_api.sessions.conversation_versions import ABSENT, SyncState
from inference_svc.http_api.sessions.lookup import Conversation, ConversationTurn, Point
from inference_svc.http_api.sessions.store import ApiStore
from shared.blobs.conversation_entry import ConversationEntry, EntryItem

MADE = Conversation("conv_a", 1.0, {"for": "é"}, session_id="conv_a")
ITEMS = [{"id": f"msg_{name}", "text": "é"} for name in "ab"]


@pytest.fixture
async def store(tmp_path):
    store = ApiStore(tmp_path, 1000, conversation_bytes=2**20)
    await store.conversations.create("acme", MADE, ITEMS)
    yield store
    store.close()


def rows(store, table):
    return store._db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()  # noqa: S608


async def test_a_new_conversation_is_behind_until_it_is_agreed(store):
    """Others' conversations have no rows."""
    assert await store.versions.sync_state("acme", "conv_a") == SyncState(0, is_behind=True)
    assert await store.versions.list_behind(9) == [("acme", "conv_a")]
    assert await store.versions.list_shared() == []
    await store.versions.mark_in_step("conv_a", 3)
    assert await store.versions.sync_state("acme", "conv_a") == SyncState(3, is_behind=False)
    assert await store.versions.list_behind(9) == []
    assert await store.versions.list_shared() == [("acme", "conv_a")]
    for tenant, name in (("other", "conv_a"), ("acme", "conv_b")):
        assert await store.versions.sync_state(tenant, name) == ABSENT
        assert await store.versions.read(tenant, name) is None
    await store.versions.mark_lost("conv_a")
    assert await store.versions.sync_state("acme", "conv_a") == SyncState(0, is_behind=True)


async def test_every_change_is_noted(store):
    """By the database: changing code need not know."""
    kept = store.conversations
    at = Point("conv_a", 1, "r-1", is_named=True)
    turn = ConversationTurn(MADE, None, "Be brief.", (), lambda _: (), lambda: None)
    for change in (
        kept.add("acme", "conv_a", [{"id": "msg_c"}]),
        kept.set_metadata("acme", "conv_a", {}),
        kept.record("acme", turn, at, ()),
        kept.delete_item(replace(MADE, turns=1, request_id="r-1"), "msg_a"),
        kept.delete_item(MADE, "msg_none"),
    ):
        await store.versions.mark_in_step("conv_a", 3)
        await change
        assert await store.versions.sync_state("acme", "conv_a") == SyncState(3, is_behind=True)
    assert (await store.versions.read("acme", "conv_a")).gone == ("msg_a",)


async def test_a_conversation_is_read_and_replaced_as_a_whole(store):
    """With deletions and sizes; it is behind if the store has another version."""
    found = await store.versions.read("acme", "conv_a")
    items = tuple(map(EntryItem, ITEMS))
    assert found == ConversationEntry(
        "acme", "conv_a", 1.0, {"for": "é"}, "", "conv_a", 0, "", items
    )
    other = replace(
        found,
        metadata={"for": "bob"},
        instructions="Sei kürzer.",
        turns=1,
        request="r-1",
        items=(EntryItem({"id": "msg_x", "text": "é"}, 1), items[1]),
        gone=("msg_z", "msg_a"),
    )
    await store.versions.replace(other, other, 5)
    assert await store.versions.read("acme", "conv_a") == other
    assert await store.versions.sync_state("acme", "conv_a") == SyncState(5, is_behind=False)
    unread = await store.conversations.unread("conv_a", 1, 2**20)
    assert [item["id"] for item in unread] == ["msg_b"]
    await store.versions.replace(other, found, 6)
    assert await store.versions.sync_state("acme", "conv_a") == SyncState(6, is_behind=True)
    size = store._db.execute("SELECT size FROM conversations").fetchone()
    await store.conversations.delete("acme", "conv_a")
    again = replace(MADE, metadata=other.metadata)
    await store.conversations.create("acme", again, [one.item for one in other.items])
    turn = ConversationTurn(again, None, "Sei kürzer.", (), lambda _: (), lambda: None)
    at = Point("conv_a", 1, "r-1", is_named=True)
    await store.conversations.record("acme", turn, at, ())
    assert store._db.execute("SELECT size FROM conversations").fetchone() == size


async def test_a_left_session_is_marked_for_removal_and_a_used_one_is_not(store):
    found = await store.versions.read("acme", "conv_a")
    moved = replace(found, session="conv_a-2")
    await store.record_temporary("acme", "conv_a-2")
    await store.versions.replace(moved, moved, 5)
    assert await store.temporary_sessions() == [("acme", "conv_a")]
    await store.versions.replace(found, found, 6)
    assert await store.temporary_sessions() == [("acme", "conv_a-2")]


async def test_a_deleted_conversation_leaves_nothing(store):
    """Another one is not affected."""
    await store.conversations.create("acme", replace(MADE, conversation_id="conv_b"), ITEMS)
    await store.conversations.delete_item(MADE, "msg_a")
    await store.conversations.delete("acme", "conv_a")
    assert rows(store, "versions") == [("conv_b", 0, 1)]
    assert rows(store, "gone") == []
    assert len(rows(store, "items")) == 2
