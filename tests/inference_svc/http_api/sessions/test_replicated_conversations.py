"""Conversations continue at every server that shares them."""

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from inference_svc.core.errors import SessionMovedError, TranscriptUnavailableError
from inference_svc.core.transcript_format import TranscriptDamagedError, TranscriptSealedError
from inference_svc.http_api.errors import ConversationsFullError, UnknownConversationError
from inference_svc.http_api.sessions import replicated_conversations
from inference_svc.http_api.sessions.lookup import Conversation, ConversationTurn, Point
from inference_svc.http_api.sessions.replicated_conversations import ReplicatedConversations
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.shared_conversations import SharedConversations, place_of
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.blobs import conversation_entry
from shared.blobs.conversation_entry import MAX_GONE
from shared.blobs.release import CONVERSATIONS
from shared.encryption.key_file import new_key
from shared.encryption.sealer import Sealer
from shared.process.backoff import Backoff
from tests.faulty_store import FaultyStore, Odds, View

NAME = "conv_a"
MADE = Conversation(NAME, 1.0, {"for": "é"}, session_id=NAME)
BOUND = 2**18


def items(names):
    return [{"id": f"msg_{name}", "text": f"é {name}"} for name in names]


class Server:
    """One server's conversations; each call stands for a client's request.

    Attributes:
        moving: the conversations.
        store: this server's own.
    """

    def __init__(self, directory, calls, sealer, bound=BOUND):
        directory.mkdir(exist_ok=True)
        self.calls = calls
        self.store = ApiStore(directory, 1000, conversation_bytes=bound)
        shared = None if calls is None else SharedConversations(calls, sealer)
        self.moving = ReplicatedConversations(shared, self.store)

    def close(self):
        self.store.close()
        if self.calls is not None:
            self.calls.close()

    async def create(self, names=""):
        await self.moving.create("acme", MADE, items(names))

    async def find(self, **how):
        return await self.moving.find("acme", NAME, **how)

    async def listed(self):
        """Return its items, as a client lists them; None: it does not exist."""
        return await self.here() if await self.find() else None

    async def here(self):
        """Return its items as this server has them."""
        found, _ = await self.store.conversations.page(NAME, 1000, "", is_ascending=True)
        return "".join(item["id"].removeprefix("msg_") for item in found)

    async def add(self, names):
        with self.moving.holds.hold("acme", NAME):
            if await self.find(is_held=True) is None:
                raise UnknownConversationError(NAME, "")
            await self.moving.add("acme", NAME, items(names))

    async def delete_item(self, name):
        with self.moving.holds.hold("acme", NAME):
            left = replace(await self.find(is_held=True), turns=0, request_id="")
            await self.moving.delete_item("acme", left, f"msg_{name}")

    async def begin(self):
        """Begin a turn; return what is needed to end it."""
        hold = self.moving.holds.hold("acme", NAME)
        release = hold.__enter__()  # the turn's end leaves it
        before = await self.find(is_held=True)

        async def end(names, session_id=""):
            at = Point(before.session_id, before.turns, before.request_id, is_named=True)
            turn = ConversationTurn(before, at, "", (), lambda _: (), release)
            name = session_id or before.session_id
            end = Point(name, before.turns + 1, f"r-{names}", is_named=True)
            left = await self.moving.record("acme", turn, end, items(names))
            hold.__exit__(None, None, None)
            return left

        return end

    async def turn(self, names, session_id=""):
        end = await self.begin()
        return await end(names, session_id)

    async def size(self):
        """Return the bytes that count for its tenant."""
        sql = "SELECT size FROM conversations WHERE id = ?"
        return self.store._db.execute(sql, (NAME,)).fetchone()

    async def behind(self):
        return [name for _, name in await self.store.versions.list_behind(1000)]

    def num_calls(self, kind):
        return self.calls.ended.counts[(kind,)]


class Servers:
    """Servers that share a store in memory, by name; each is created at its first use."""

    def __init__(self, directory):
        self.directory = directory
        self.blobs = FaultyStore(Random(7))  # noqa: S311
        self.sealers = defaultdict(Sealer)
        self.bounds = defaultdict(lambda: BOUND)
        self._running = {}

    def __getattr__(self, name):
        if name not in self._running:
            backoff = Backoff(Random(1), first_s=0.0, longest_s=0.0)  # noqa: S311
            calls = StoreCalls(View(self.blobs), 60.0, backoff)
            self._running[name] = Server(
                self.directory / name, calls, self.sealers[name], self.bounds[name]
            )
        return self._running[name]

    def restart(self, name):
        self._running.pop(name).close()

    def silence(self, *, is_silent=True):
        self.blobs.odds = Odds(fails=1.0 if is_silent else 0.0)

    def lose(self):
        """Delete all conversations of the store."""
        for name in [name for name in self.blobs.blobs if name.startswith(CONVERSATIONS)]:
            del self.blobs.blobs[name]

    def close(self):
        for name in list(self._running):
            self.restart(name)


@pytest.fixture
def servers(tmp_path):
    servers = Servers(tmp_path)
    yield servers
    servers.close()


@pytest.fixture
def logged(monkeypatch):
    """Return the logged warnings."""
    lines = []
    monkeypatch.setattr(
        replicated_conversations.log,
        "warning",
        lambda event, **_: lines.append(event),
        raising=False,
    )
    return lines


async def test_a_conversation_is_the_same_everywhere(servers):
    """After it is created, extended, annotated, answered, and cut."""
    await servers.a.create("xy")
    assert await servers.b.find() == MADE
    assert await servers.b.listed() == "xy"
    assert await servers.a.size() == await servers.b.size()
    there = await SharedConversations(servers.b.calls).read("acme", NAME)
    assert [one.turn for one in there.entry.items] == [0, 0]
    await servers.b.add("z")
    assert await servers.a.listed() == "xyz"
    await servers.a.moving.set_metadata("acme", NAME, {"for": "bob"})
    assert (await servers.b.find()).metadata == {"for": "bob"}
    await servers.b.turn("12")
    found = await servers.a.find()
    assert (found.session_id, found.turns, found.request_id) == (NAME, 1, "r-12")
    assert await servers.a.store.conversations.unread(NAME, 1, BOUND) == []
    await servers.a.turn("34", session_id="conv_a-2")
    assert (await servers.b.find()).session_id == "conv_a-2"
    await servers.b.delete_item("x")
    assert await servers.a.listed() == "yz1234"
    assert (await servers.a.find()).turns == 0
    assert not await servers.a.behind() + await servers.b.behind()


async def test_a_server_without_a_store_is_independent(tmp_path):
    """Its conversations are its own."""
    server = Server(tmp_path / "alone", None, Sealer())
    await server.create("x")
    await server.add("y")
    await server.turn("12")
    await server.moving.catch_up()
    await server.moving.forget_deleted()
    assert await server.listed() == "xy12"
    await server.moving.delete("acme", NAME)
    assert await server.find() is None
    server.close()


async def test_requests_to_the_store_are_counted(servers):
    """One before, and three to replace it afterwards; none for a current one."""
    await servers.a.create()
    assert servers.a.calls.ended.counts == {("replaced",): 1}
    await servers.a.turn("12")
    assert servers.a.calls.ended.counts == {("looked",): 1, ("replaced",): 2}
    await servers.b.find()
    assert servers.b.calls.ended.counts == {("looked",): 1, ("read",): 1}
    await servers.b.find()
    assert servers.b.calls.ended.counts == {("looked",): 2, ("read",): 1}
    await servers.b.moving.find("acme", "conv_unknown")
    assert servers.b.num_calls("looked") == 3


async def test_other_tenants_cannot_see_it(servers):
    """Even if they know its id."""
    await servers.a.create("x")
    for server in (servers.a, servers.b):
        assert await server.moving.find("other", NAME) is None
        await server.moving.delete("other", NAME)
        await server.moving.forget_session("other", NAME)
    assert await servers.a.listed() == "x"
    assert await servers.b.listed() == "x"
    assert await servers.a.moving.find("other", NAME) is None
    assert await servers.a.listed() == "x"


async def test_a_deleted_conversation_is_deleted_everywhere(servers):
    """By its id or its session; servers that no client asks forget it, too."""
    await servers.a.create("x")
    for server in (servers.b, servers.c):
        assert await server.listed() == "x"
    await servers.b.moving.delete("acme", NAME)
    assert await servers.a.find() is None
    assert await servers.b.find() is None
    assert await servers.c.here() == "x"
    await servers.c.moving.forget_deleted()
    assert await servers.c.here() == ""
    with pytest.raises(UnknownConversationError):
        await servers.c.add("y")


async def test_a_conversation_is_deleted_with_its_session(servers):
    """Wherever that is deleted; not with one that it has left."""
    await servers.a.create("x")
    await servers.a.turn("12", session_id="conv_a-2")
    for session_id in (NAME, "conv_b-2", "s-1"):
        await servers.b.moving.forget_session("acme", session_id)
    assert servers.b.num_calls("looked") == 2, "others' names are no conversation's"
    assert await servers.b.listed() == "x12"
    await servers.b.moving.forget_session("acme", "conv_a-2")
    assert await servers.a.find() is None


async def test_one_of_two_simultaneous_changes_is_refused(servers):
    """Nothing of it is stored; repeated, it follows the other one."""
    await servers.a.create("x")
    with servers.a.moving.holds.hold("acme", NAME):
        assert await servers.a.find(is_held=True)
        await servers.b.add("b")
        with pytest.raises(SessionMovedError, match="another server"):
            await servers.a.moving.add("acme", NAME, items("a"))
        assert await servers.a.here() == "xb"
        await servers.b.add("c")
        with pytest.raises(SessionMovedError):
            await servers.a.moving.delete_item("acme", MADE, "msg_x")
    await servers.b.add("d")
    with pytest.raises(SessionMovedError):
        await servers.a.moving.set_metadata("acme", NAME, {"a": "b"})
    await servers.a.add("a")
    for server in (servers.a, servers.b):
        assert await server.listed() == "xbcda"
        assert (await server.find()).metadata == MADE.metadata


async def test_a_conversation_deleted_meanwhile_is_not_changed(servers):
    await servers.a.create("x")
    with servers.a.moving.holds.hold("acme", NAME):
        assert await servers.a.find(is_held=True)
        await servers.b.moving.delete("acme", NAME)
        with pytest.raises(UnknownConversationError):
            await servers.a.moving.add("acme", NAME, items("a"))
    assert await servers.a.here() == ""
    assert await servers.b.find() is None


async def test_an_overtaken_turn_is_not_lost(servers, logged):
    """It follows the other server's additions, once; the next turn reads all of it."""
    await servers.a.create("x")
    end = await servers.a.begin()
    await servers.b.add("b")
    assert await end("12") == set()
    assert logged == ["conversation_diverged"]
    for server in (servers.a, servers.b):
        assert await server.listed() == "xb12"
        assert (await server.find()).turns == 0
        assert len(await server.store.conversations.unread(NAME, 0, BOUND)) == 4
    assert not await servers.a.behind()


@pytest.mark.parametrize(("here", "there"), [("conv_a-2", ""), ("", "conv_a-3"), ("conv_a-2",) * 2])
async def test_a_foreign_session_is_left_alone(servers, here, there):
    """The other server's session is in use."""
    await servers.a.create("x")
    await servers.a.turn("1")
    end = await servers.a.begin()
    await servers.b.turn("b", session_id=there)
    left = await end("2", here)
    now = (await servers.a.find()).session_id
    assert now == (there or NAME)
    assert left == {NAME, here or NAME} - {now}
    temporary_sessions = {
        session_id for _, session_id in await servers.a.store.temporary_sessions()
    }
    assert now not in temporary_sessions
    assert {here} - {now, ""} <= temporary_sessions


async def test_a_turn_does_not_restore_a_conversation_deleted_meanwhile(servers, logged):
    await servers.a.create("x")
    end = await servers.a.begin()
    await servers.b.moving.delete("acme", NAME)
    assert await end("12") == {NAME}
    assert logged == ["conversation_diverged"]
    assert await servers.a.find() is None
    assert await servers.b.find() is None


async def test_repeats_of_a_request_find_the_same_conversation(servers):
    """One waits for the other's result."""
    await servers.a.create("x")
    await servers.b.find()
    await servers.a.turn("12")
    with servers.b.moving.holds.hold("acme", NAME, b"key"):
        first = asyncio.create_task(servers.b.find(is_held=True))
        await asyncio.sleep(0)  # it has begun
        with servers.b.moving.holds.hold("acme", NAME, b"key"):
            second = await servers.b.find(is_held=True)
        assert await first == second
    assert second.turns == 1
    assert await servers.b.listed() == "x12"


async def test_a_conversation_is_not_replaced_while_a_request_changes_it(servers):
    """It is shown as it is here, and notes are kept; afterwards everything is merged."""
    await servers.a.create("x")
    end = await servers.a.begin()
    await servers.b.add("b")
    assert await servers.a.listed() == "x"
    await servers.a.moving.set_metadata("acme", NAME, {"a": "b"})
    await servers.a.moving.catch_up()
    await servers.a.moving.forget_deleted()
    assert await servers.a.here() == "x"
    await end("12")
    assert await servers.a.listed() == await servers.b.listed() == "xb12"


async def test_notes_that_change_during_a_turn_do_not_disturb_it(servers, logged):
    await servers.a.create("x")
    end = await servers.a.begin()
    await servers.a.moving.set_metadata("acme", NAME, {"a": "b"})
    await end("12")
    found = await servers.b.find()
    assert (found.metadata, found.turns) == ({"a": "b"}, 1)
    assert not logged


async def test_changes_during_the_stores_silence_are_sent_later(servers):
    """Even after a restart; until then local conversations continue."""
    await servers.a.create("x")
    servers.silence()
    await servers.a.add("y")
    await servers.a.turn("12")
    await servers.a.delete_item("x")
    await servers.a.moving.set_metadata("acme", NAME, {"a": "b"})
    assert await servers.a.listed() == "y12"
    assert await servers.a.behind() == [NAME]
    servers.restart("a")
    servers.silence(is_silent=False)
    assert await servers.b.listed() == "x"
    await servers.a.moving.catch_up()
    assert await servers.a.behind() == []
    assert await servers.b.listed() == "y12"
    assert (await servers.b.find()).metadata == {"a": "b"}


async def test_a_conversation_created_during_the_silence_is_sent_later(servers):
    """Also when a client asks for it at its server."""
    servers.silence()
    await servers.a.create("x")
    servers.silence(is_silent=False)
    assert await servers.b.find() is None
    assert await servers.a.listed() == "x"
    assert await servers.b.listed() == "x"


async def test_changes_on_both_sides_are_merged(servers, logged):
    """One server was away: nothing is lost, deletions stay."""
    await servers.a.create("xyz")
    await servers.b.find()
    servers.silence()
    await servers.a.add("a")
    await servers.a.delete_item("x")
    servers.silence(is_silent=False)
    await servers.b.turn("12")
    await servers.b.delete_item("y")
    await servers.a.moving.catch_up()
    assert logged == ["conversation_diverged"]
    for server in (servers.a, servers.b):
        assert await server.listed() == "z12a"
    assert await servers.a.behind() == []
    servers.silence()
    await servers.a.add("b")
    servers.silence(is_silent=False)
    await servers.b.moving.delete("acme", NAME)
    await servers.a.moving.catch_up()
    assert await servers.a.find() is None
    assert await servers.b.find() is None


async def test_a_change_with_an_unknown_result_is_made_once(servers, logged):
    """The store reported an error, but has it."""
    await servers.a.create("x")
    servers.blobs.odds = Odds(lies=1.0)
    await servers.a.add("y")
    servers.silence(is_silent=False)
    await servers.a.add("z")
    assert await servers.b.listed() == "xyz"
    assert not logged
    assert await servers.a.behind() == []


async def test_a_silent_store_leaves_conversations_unknown(servers):
    """Clients retry later: to find, and to delete."""
    await servers.a.create("x")
    servers.silence()
    for asked in (
        servers.b.find(),
        servers.b.moving.delete("acme", NAME),
        servers.a.moving.delete("acme", NAME),
    ):
        with pytest.raises(TranscriptUnavailableError, match="is not known"):
            await asked
    assert await servers.a.listed() == "x"
    servers.silence(is_silent=False)
    assert await servers.b.listed() == "x"


async def test_conversations_that_the_store_has_lost_are_sent_again(servers):
    await servers.a.create("x")
    await servers.b.find()
    servers.lose()
    assert await servers.a.listed() == "x"
    await servers.b.add("y")
    assert await servers.a.listed() == "xy"
    with servers.a.moving.holds.hold("acme", NAME):
        servers.lose()
        await servers.a.moving.add("acme", NAME, items("z"))
    assert await servers.a.listed() == "xyz"
    assert await servers.b.listed() == "xyz"


async def test_conversations_from_elsewhere_may_exceed_the_tenants_limit(servers):
    """They are accepted; adding to them is refused."""
    await servers.a.create("x")
    await servers.a.moving.add("acme", NAME, [{"id": "msg_y", "text": "y" * (BOUND - 10_000)}])
    full = {"id": "msg_z", "text": "z" * (BOUND - 10_000)}
    await servers.b.moving.create("acme", replace(MADE, conversation_id="conv_b"), [full])
    assert await servers.b.listed() == "xy"
    with pytest.raises(ConversationsFullError):
        await servers.b.add("b")
    assert await servers.b.listed() == "xy"


async def test_a_server_without_conversations_accepts_no_new_ones(servers):
    """Except those that it had before the setting."""
    await servers.b.moving.create("acme", replace(MADE, conversation_id="conv_b"), items("b"))
    servers.restart("b")
    servers.bounds["b"] = 0
    await servers.a.create("x")
    assert await servers.b.find() is None
    assert await servers.b.moving.find("acme", "conv_b")
    await servers.b.moving.delete("acme", "conv_b")
    assert await servers.a.moving.find("acme", "conv_b") is None


async def test_an_overlong_conversation_stays_local(servers, monkeypatch, logged):
    """It is logged once; other servers keep their version."""
    await servers.a.create("x")
    most = max(len(data) for data, _ in servers.blobs.blobs.values())
    monkeypatch.setattr(conversation_entry, "MAX_ENTRY_BYTES", most)
    for names in ("abcdefgh", "i"):
        await servers.a.add(names)
        await servers.a.moving.catch_up()
    assert logged == ["conversation_not_shared"]
    assert await servers.a.listed() == "xabcdefghi"
    assert await servers.b.listed() == "x"
    monkeypatch.undo()
    await servers.a.add("j")
    assert await servers.b.listed() == "xabcdefghij"
    servers.silence()
    await servers.a.add("k")
    servers.silence(is_silent=False)
    await servers.a.moving.catch_up()
    assert await servers.b.listed() == "xabcdefghijk"


async def test_a_server_without_the_key_is_refused(servers, logged):
    """It overwrites nothing, whatever it has itself."""
    servers.sealers["a"] = servers.sealers["b"] = Sealer([new_key()])
    await servers.a.create("x")
    assert await servers.b.listed() == "x"
    with pytest.raises(TranscriptSealedError, match=r"remote\.old_key_files"):
        await servers.c.find()
    servers.silence()
    await servers.b.add("y")
    servers.silence(is_silent=False)
    await servers.a.add("z")
    servers.restart("b")
    servers.sealers["b"] = Sealer([new_key()])
    await servers.b.moving.catch_up()
    with pytest.raises(TranscriptSealedError):
        await servers.b.find()
    assert logged == ["conversation_not_shared"]
    assert await servers.b.here() == "xy"
    assert await servers.a.listed() == "xz"
    servers.restart("b")
    servers.sealers["b"] = servers.sealers["a"]
    await servers.b.moving.catch_up()
    assert await servers.a.listed() == "xzy"


async def test_an_unreadable_conversation_is_logged_once_and_kept(servers, logged):
    """Local changes wait, and other conversations are sent."""
    await servers.a.create("x")
    servers.silence()
    await servers.a.add("y")
    await servers.a.moving.create("acme", replace(MADE, conversation_id="conv_b"), items("z"))
    servers.silence(is_silent=False)
    View(servers.blobs).put(f"{place_of('acme', NAME)}/{2:020d}", b"what is no conversation")
    for _ in range(2):
        await servers.a.moving.catch_up()
    assert logged == ["conversation_not_shared"]
    assert await servers.a.behind() == [NAME]
    assert await servers.b.moving.find("acme", "conv_b")
    with pytest.raises(TranscriptDamagedError, match="damaged"):
        await servers.a.find()
    assert await servers.a.here() == "xy"
    servers.blobs.blobs.pop(f"{place_of('acme', NAME)}/{2:020d}")
    await servers.b.add("z")
    assert await servers.a.listed() == "xzy"
    assert await servers.b.listed() == "xzy"


async def test_an_answered_turn_is_not_refused_for_an_unreadable_conversation(servers, logged):
    await servers.a.create("x")
    end = await servers.a.begin()
    View(servers.blobs).put(f"{place_of('acme', NAME)}/{2:020d}", b"what is no conversation")
    assert await end("12") == set()
    assert await servers.a.here() == "x12"
    assert logged == ["conversation_not_shared"]


async def test_the_last_deleted_items_are_remembered(servers):
    """However many there were."""
    names = [chr(0x4E00 + number) for number in range(MAX_GONE + 3)]
    await servers.a.create()
    await servers.a.store.conversations.add("acme", NAME, [{"id": name} for name in names])
    for name in names:
        servers.a.store._db.execute("DELETE FROM items WHERE id = ?", (name,))
    assert (await servers.a.store.versions.read("acme", NAME)).gone == tuple(names[3:])
    await servers.a.find()
    await servers.b.find()
    assert (await servers.b.store.versions.read("acme", NAME)).gone == tuple(names[3:])


async def test_conversations_of_an_older_release_are_sent(servers, monkeypatch):
    """Some at a time."""
    monkeypatch.setattr(replicated_conversations, "MOST_AT_ONCE", 2)
    db = servers.a.store._db
    db.executescript("DROP TABLE versions; DROP TABLE gone;")
    for (trigger,) in db.execute(
        "SELECT name FROM sqlite_master WHERE type = 'trigger' AND sql LIKE '%gone%'"
        " OR sql LIKE '%versions%'"
    ).fetchall():
        db.execute(f"DROP TRIGGER {trigger}")
    for number in range(3):
        made = replace(MADE, conversation_id=f"conv_{number}")
        await servers.a.store.conversations.create("acme", made, items(f"{number}"))
    servers.restart("a")
    for left in (1, 0):
        await servers.a.moving.catch_up()
        assert len(await servers.a.behind()) == left
    for number in range(3):
        assert await servers.b.moving.find("acme", f"conv_{number}")


# ---------------------------------------------------------------------------------- random scenes


REFUSALS = SessionMovedError, TranscriptUnavailableError, UnknownConversationError


class Scene:
    """Two servers change one conversation at random, over a store with faults.

    Attributes:
        said: added items that were confirmed to a client.
        deleted: deleted items, likewise.
        may_go: items that may be deleted: the result is unknown.
    """

    def __init__(self, servers, random):
        self.servers = servers
        self.random = random
        self._names = map(chr, count(0x4E00))
        self.said = set()
        self.deleted = set()
        self.may_go = set()

    async def step(self):
        """Send one request to one of them; some are killed afterwards."""
        one, other = self.random.choice(["ab", "ba"])
        server = getattr(self.servers, one)
        do = self.random.choice([self._add, self._add, self._turn, self._delete, self._note])
        with suppress(*REFUSALS):
            await do(server, getattr(self.servers, other))
        if self.random.random() < 0.3:
            self.servers.blobs.settle()
        if self.random.random() < 0.1:
            self.servers.restart(one)

    async def _add(self, server, _other):
        name = next(self._names)
        await server.add(name)
        self.said.add(name)

    async def _turn(self, server, other):
        """Run a turn, during which the other server may act."""
        name, end = next(self._names), await server.begin()
        if self.random.random() < 0.5:
            with suppress(*REFUSALS):
                await self.random.choice([self._add, self._delete])(other, server)
        await end(name)
        self.said.add(name)

    async def _delete(self, server, _other):
        found = await server.listed()
        if found:
            name = self.random.choice(found)
            self.may_go.add(name)
            await server.delete_item(name)
            self.deleted.add(name)

    async def _note(self, server, _other):
        await server.moving.set_metadata("acme", NAME, {"at": str(self.random.random())})

    async def settle(self):
        """End all faults: both have the same, and all confirmed changes."""
        self.servers.blobs.settle()
        self.servers.blobs.odds = Odds()
        for _ in range(2):
            for server in (self.servers.a, self.servers.b):
                await server.moving.catch_up()
        assert not await self.servers.a.behind() + await self.servers.b.behind()
        found = await self.servers.a.listed()
        assert await self.servers.b.listed() == found
        assert (await self.servers.a.find()) == (await self.servers.b.find())
        assert len(set(found)) == len(found), "nothing is there twice"
        assert not self.deleted & set(found), "what was deleted stays so"
        assert self.said - self.may_go <= set(found), "nothing is lost"


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 6))]
)
async def test_no_fault_of_the_store_loses_or_restores_items(seed, servers):
    """Forty requests with faults, then time to settle."""
    random = Random(seed)  # noqa: S311
    scene = Scene(servers, random)
    await servers.a.create()
    await servers.b.find()
    servers.blobs.odds = Odds(fails=0.05, lies=0.05, late=0.05)
    for _ in range(40):
        await scene.step()
    await scene.settle()
    assert scene.said
    assert scene.deleted
