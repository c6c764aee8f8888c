"""Stored conversations, in a real file, and exclusive changes of one."""

import contextlib
import sqlite3
from dataclasses import replace

import pytest

from inference_svc.core.errors import InputTooLongError, SessionBusyError
from inference_svc.http_api.errors import ConversationsFullError, UnknownConversationError
from inference_svc.http_api.sessions.conversations import (
    MAX_UNREAD,
    PAGE_CHARACTERS,
    ROW_BYTES,
    Holds,
)
from inference_svc.http_api.sessions.lookup import (
    Conversation,
    ConversationTurn,
    Point,
    ResponseInfo,
    Route,
    StoredRequest,
    StoredResponse,
)
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.http_api.sessions.store_file import FILE_NAME

BOUND = 16 * ROW_BYTES
MADE = Conversation("conv_a", 1.0, {"for": "é"}, session_id="conv_a")


@pytest.fixture
def store(tmp_path):
    store = ApiStore(tmp_path, 1000, conversation_bytes=BOUND)
    yield store
    store.close()


@pytest.fixture
def kept(store):
    return store.conversations


def items(names, text=""):
    return [{"id": f"msg_{name}", "type": "message", "text": text} for name in names]


def names(found):
    return "".join(item["id"].removeprefix("msg_") for item in found)


def end(turns, session_id="conv_a"):
    return Point(session_id, turns, f"r-{turns}", is_named=True)


def goes_on(before, at=None, instructions=""):
    return ConversationTurn(before, at, instructions, (), lambda _: (), lambda: None)


async def all_of(kept, name="conv_a"):
    found, has_more = await kept.page(name, 100, "", is_ascending=True)
    assert not has_more
    return names(found)


async def size(kept, tenant="acme"):
    return kept._db.execute(
        "SELECT sum(size) FROM conversations WHERE tenant = ?", (tenant,)
    ).fetchone()[0]


async def delete(kept, item_id, turns, request_id):
    """Delete an item; return how many turns are left."""
    found = await kept.find("acme", "conv_a")
    await kept.delete_item(replace(found, turns=turns, request_id=request_id), item_id)


async def turn(kept, brought, at=None, to=None, **options):
    """Record the next turn of the conversation; return whether it was added."""
    before = await kept.find("acme", "conv_a")
    where = to or end((at.turns if at else 0) + 1)
    return await kept.record("acme", goes_on(before, at, **options), where, items(brought))


async def test_a_conversation_belongs_to_its_tenant(kept):
    """It is found as it was made."""
    await kept.create("acme", MADE, items("ab"))
    assert await kept.find("acme", "conv_a") == MADE
    assert await kept.find("other", "conv_a") is None
    await kept.delete("other", "conv_a")
    assert await all_of(kept) == "ab"
    await kept.delete("acme", "conv_a")
    assert await kept.find("acme", "conv_a") is None
    assert await all_of(kept) == ""


async def test_pages_go_both_ways(kept):
    """After an item, or from an end; behind an unknown item there is none."""
    await kept.create("acme", MADE, items("abcde"))
    await kept.create("acme", replace(MADE, conversation_id="conv_b"), items("xy"))

    async def page(*options, is_ascending):
        found, has_more = await kept.page("conv_a", *options, is_ascending=is_ascending)
        return names(found), has_more

    assert await page(2, "", is_ascending=True) == ("ab", True)
    assert await page(2, "msg_b", is_ascending=True) == ("cd", True)
    assert await page(2, "msg_c", is_ascending=True) == ("de", False)
    assert await page(2, "", is_ascending=False) == ("ed", True)
    assert await page(9, "msg_b", is_ascending=False) == ("a", False)
    assert await page(9, "msg_e", is_ascending=True) == ("", False)
    assert await kept.page("conv_a", 9, "msg_x", is_ascending=True) is None


async def test_the_size_of_a_page_is_limited(tmp_path):
    """It has at least one item: the next page has the next."""
    store = ApiStore(tmp_path, 1000, conversation_bytes=2**30)
    kept = store.conversations
    third, whole = "x" * (PAGE_CHARACTERS // 3), "x" * PAGE_CHARACTERS
    await kept.create("acme", MADE, [*items("abc", third), *items("d", whole), *items("e")])
    found, after = [], ""
    has_more = True
    while has_more:
        page, has_more = await kept.page("conv_a", 9, after, is_ascending=True)
        found.append(names(page))
        after = page[-1]["id"]
    assert found == ["ab", "c", "d", "e"]
    store.close()


async def test_a_turn_reads_a_limited_amount(tmp_path):
    """By number of items, and by bytes."""
    store = ApiStore(tmp_path, 1000, conversation_bytes=2**30)
    kept = store.conversations
    await kept.create("acme", MADE, items(map(str, range(MAX_UNREAD))))
    assert len(await kept.unread("conv_a", 0, 2**30)) == MAX_UNREAD
    with pytest.raises(InputTooLongError):
        await kept.unread("conv_a", 0, MAX_UNREAD)
    await kept.add("acme", "conv_a", items(["last"]))
    with pytest.raises(InputTooLongError):
        await kept.unread("conv_a", 0, 2**30)
    store.close()


async def test_calls_belong_to_one_turn(kept):
    """Results are named by them; results are no calls."""
    await kept.create("acme", MADE, ())
    calls = [{"id": "fc_a"}, {"id": "fco_a"}, {"id": "msg_a"}, {"id": "fc_b"}]
    before = await kept.find("acme", "conv_a")
    await kept.record("acme", goes_on(before), end(1), calls)
    await turn(kept, "x", end(1))
    assert [one["id"] for one in await kept.calls("conv_a", 1)] == ["fc_a", "fc_b"]
    assert await kept.calls("conv_a", 2) == []


async def test_a_turn_reads_unread_items(kept):
    """And adds its own input and output."""
    await kept.create("acme", MADE, items("ab"))
    assert names(await kept.unread("conv_a", 0, BOUND)) == "ab"
    assert await turn(kept, "cd")
    assert names(await kept.unread("conv_a", 1, BOUND)) == ""
    await kept.add("acme", "conv_a", items("e"))
    assert names(await kept.unread("conv_a", 1, BOUND)) == "e"
    assert await turn(kept, "fg", end(1), instructions="Be brief.")
    assert await all_of(kept) == "abcdefg"
    found = await kept.find("acme", "conv_a")
    assert (found.turns, found.request_id, found.instructions) == (2, "r-2", "Be brief.")
    assert [await kept.turn_of("conv_a", f"msg_{name}") for name in "adeg"] == [1, 1, 2, 2]


async def test_a_turn_is_added_once(kept):
    """A repeat that followed it to its end adds nothing."""
    await kept.create("acme", MADE, items("a"))
    before = await kept.find("acme", "conv_a")
    for is_first in (True, False):
        added = await kept.record("acme", goes_on(before), end(1), items("bc"))
        assert added == is_first
    assert await all_of(kept) == "abc"


async def test_items_behind_a_deleted_one_are_not_read(kept):
    """Where the conversation's turns do not count any more."""
    await kept.create("acme", MADE, items("a"))
    await turn(kept, "bc")
    await turn(kept, "de", end(1))
    await turn(kept, "fg", end(2))
    await delete(kept, "msg_d", 1, "r-1")
    assert names(await kept.unread("conv_a", 1, BOUND)) == "efg"
    assert await kept.item("conv_a", "msg_d") is None
    assert await kept.turn_of("conv_a", "msg_d") is None
    moved = end(2, "conv_a-2")
    assert await turn(kept, "hi", end(1), to=moved)
    assert await all_of(kept) == "abcefghi"
    assert names(await kept.unread("conv_a", 1, BOUND)) == "efghi"
    assert names(await kept.unread("conv_a", 2, BOUND)) == ""


async def test_a_left_session_is_marked_for_removal(store, kept):
    """The ids of its first turns stay valid in the session that replaces it."""
    info = ResponseInfo(1.0, "m", conversation_id="conv_a")
    await kept.create("acme", MADE, ())
    await turn(kept, "ab")
    await turn(kept, "cd", end(1))
    for number in (1, 2):
        name = f"resp_{number}"
        await store.keep_response("acme", name, StoredResponse(end(number), None, info))
        route = Route("conv_a", number - 1, 0, None, is_named=True)
        await store.keep_request("acme", name.encode(), StoredRequest(b"", route))
    await delete(kept, "msg_c", 1, "r-1")
    await store.record_temporary("acme", "conv_a-2")
    await turn(kept, "ef", end(1), to=end(2, "conv_a-2"))
    assert await store.temporary_sessions() == [("acme", "conv_a")]
    sessions = [(await store.find_response("acme", f"resp_{n}")).at.session_id for n in (1, 2)]
    assert sessions == ["conv_a-2", "conv_a"]
    assert (await store.find_request(b"resp_1")).route.session_id == "conv_a-2"
    assert await store.find_request(b"resp_2") is None
    assert (await kept.find("acme", "conv_a")).session_id == "conv_a-2"


async def test_a_tenant_has_its_own_limit(kept):
    """It counts bytes of items, notes and instructions; deletions make room."""
    await kept.create("acme", MADE, ())
    assert await size(kept) == ROW_BYTES + len('{"for": "é"}'.encode())
    large = items("b", "é" * ((BOUND - ROW_BYTES) // 2))
    with pytest.raises(ConversationsFullError):
        await kept.add("acme", "conv_a", large)
    with pytest.raises(ConversationsFullError):
        await kept.check_room("acme", large)
    with pytest.raises(ConversationsFullError):
        await kept.create("acme", replace(MADE, conversation_id="conv_b"), large)
    await kept.check_room("other", items("c", "x" * (BOUND - ROW_BYTES)))
    await turn(kept, "d", instructions="é" * 100)
    await kept.set_metadata("acme", "conv_a", {"a": "b"})
    (text,) = kept._db.execute("SELECT item FROM items").fetchone()
    assert await size(kept) == ROW_BYTES + len('{"a": "b"}') + 200 + len(text)
    await delete(kept, "msg_d", 0, "")
    assert await size(kept) == ROW_BYTES + len('{"a": "b"}') + 200
    for number in range(16):
        name = f"conv_{number}"
        with contextlib.suppress(ConversationsFullError):
            await kept.create("acme", Conversation(name, 1.0, {}, session_id=name), ())
    assert BOUND - ROW_BYTES < await size(kept) <= BOUND
    await kept.delete("acme", "conv_a")
    assert await size(kept) <= BOUND - ROW_BYTES - 200


async def test_nothing_is_added_to_a_deleted_conversation(kept):
    """Its session may have been deleted by another API."""
    with pytest.raises(UnknownConversationError):
        await kept.add("acme", "conv_a", items("a"))
    assert await all_of(kept) == ""


async def test_an_older_file_gets_the_missing_tables(tmp_path):
    """Its contents stay."""
    store = ApiStore(tmp_path, 100, conversation_bytes=BOUND)
    await store.record_temporary("acme", "s-1")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        db.executescript("DROP TABLE conversations; DROP TABLE items;")
    again = ApiStore(tmp_path, 100, conversation_bytes=BOUND)
    assert await again.temporary_sessions() == [("acme", "s-1")]
    await again.conversations.create("acme", MADE, items("a"))
    again.close()
    last = ApiStore(tmp_path, 100, conversation_bytes=BOUND)
    assert await last.conversations.find("acme", "conv_a") == MADE
    assert await all_of(last.conversations) == "a"
    last.close()


def test_one_request_at_a_time_changes_a_conversation():
    """Others are refused until it has ended; another conversation is independent."""
    holds = Holds()
    with holds.hold("acme", "conv_a"):
        with pytest.raises(SessionBusyError), holds.hold("acme", "conv_a"):
            pass
        with pytest.raises(SessionBusyError), holds.hold("acme", "conv_a", b"key"):
            pass
        with holds.hold("acme", "conv_b"), holds.hold("other", "conv_a"):
            pass
    with holds.hold("acme", "conv_a") as release:
        release()
        with holds.hold("acme", "conv_a"):
            release()
            with pytest.raises(SessionBusyError), holds.hold("acme", "conv_a"):
                pass
    assert holds._holders == {}


def test_repeats_of_a_request_share_the_right_to_change():
    """It is free when the last of them has ended."""
    holds = Holds()
    with holds.hold("acme", "conv_a", b"key") as first, holds.hold("acme", "conv_a", b"key"):
        first()
        with pytest.raises(SessionBusyError), holds.hold("acme", "conv_a", b"other"):
            pass
    with holds.hold("acme", "conv_a"):
        pass
