"""Conversations in the object store that services share."""

from dataclasses import replace
from random import Random

import pytest

from inference_svc.core.transcript_format import TranscriptDamagedError, TranscriptSealedError
from inference_svc.runtime.turns.shared_conversations import (
    SharedConversation,
    SharedConversations,
    place_of,
)
from inference_svc.runtime.turns.store_calls import StoreCalls, StoreSilentError
from shared.blobs import conversation_entry
from shared.blobs.blob_store import OvertakenError
from shared.blobs.conversation_entry import ConversationEntry, EntryItem
from shared.blobs.release import CONVERSATIONS, DELETED_BYTES
from shared.encryption.key_file import new_key
from shared.encryption.sealer import PLAIN, Sealer
from shared.process.backoff import Backoff
from tests.faulty_store import FaultyStore, Odds, View

SAID = (EntryItem({"id": "msg_1", "text": "to the coast"}, 1),)
ENTRY = ConversationEntry("acme", "conv_a", 1.0, {}, "", "conv_a", 1, "r-1", SAID)


class World:
    """A store, and services that share it."""

    def __init__(self):
        self.blobs = FaultyStore(Random(5))  # noqa: S311
        self.calls = []

    def service(self, sealer=PLAIN):
        backoff = Backoff(Random(1), first_s=0.0, longest_s=0.0)  # noqa: S311
        self.calls.append(StoreCalls(View(self.blobs), 60.0, backoff))
        return SharedConversations(self.calls[-1], sealer)

    @property
    def values(self):
        """Return the store's values of conversations, by the names of their objects."""
        there = self.blobs.blobs.items()
        return {name: data for name, (data, _) in there if name.startswith(CONVERSATIONS)}


@pytest.fixture
def world():
    world = World()
    yield world
    for calls in world.calls:
        calls.close()


async def test_a_conversation_is_found_by_its_id_and_tenant(world):
    """At any server, in its newest version; names in the store reveal nothing."""
    here, there = world.service(), world.service()
    assert await here.look("acme", "conv_a") == 0
    assert await here.replace(0, ENTRY) == 1
    assert await there.read("acme", "conv_a") == SharedConversation(1, ENTRY)
    longer = replace(ENTRY, metadata={"a": "b"})
    assert await there.replace(1, longer) == 2
    assert await here.look("acme", "conv_a") == 2
    assert await here.read("acme", "conv_a") == SharedConversation(2, longer)
    assert await here.read("other", "conv_a") is None
    assert await here.read("acme", "conv_b") is None
    (name,) = world.values
    assert not [word for word in ("acme", "conv_a") if word in name]


async def test_a_stale_version_cannot_be_replaced(world):
    """One that the server has never read, or has read before the latest change."""
    here, there = world.service(), world.service()
    await here.replace(0, ENTRY)
    before = world.values
    with pytest.raises(OvertakenError):
        await there.replace(0, replace(ENTRY, turns=2))
    with pytest.raises(OvertakenError):
        await there.replace(7, replace(ENTRY, turns=2))
    assert world.values == before
    await there.replace(1, replace(ENTRY, turns=2))
    with pytest.raises(OvertakenError):
        await here.replace(1, replace(ENTRY, turns=3))
    assert (await here.read("acme", "conv_a")).entry.turns == 2


async def test_a_known_version_is_replaced_without_reading(world):
    """By a server that has just read or written it."""
    here = world.service()
    await here.look("acme", "conv_a")
    for number in range(3):
        await here.replace(number, replace(ENTRY, turns=number))
    asked = []
    world.blobs.meanwhile = lambda: asked.append(1)
    await here.replace(3, replace(ENTRY, turns=9))
    assert len(asked) == 3, "put, list, delete"
    assert len(world.values) == 1


async def test_a_deleted_conversation_stays_deleted(world):
    """Also for servers without the key: kvd's sweep recognises the mark by its size."""
    here, there = world.service(Sealer([new_key()])), world.service()
    await here.replace(0, ENTRY)
    await there.delete("acme", "conv_a")
    for service in (here, there):
        assert await service.read("acme", "conv_a") == SharedConversation(2, None)
    with pytest.raises(OvertakenError):
        await here.replace(1, replace(ENTRY, turns=2))
    assert list(map(len, world.values.values())) == [DELETED_BYTES]
    assert await here.deleted() == {place_of("acme", "conv_a")}
    await here.delete("acme", "conv_never")
    assert await here.deleted() == {place_of("acme", "conv_a"), place_of("acme", "conv_never")}


async def test_damaged_and_foreign_conversations_are_not_used(world):
    """Nothing is guessed, and other tenants and conversations have their own."""
    here = world.service()
    await here.replace(0, ENTRY)
    ((name, data),) = world.values.items()
    for damaged in (data[:-1], data[:40] + b"x" + data[41:], data[:7], data[:9], b""):
        View(world.blobs).put(name, damaged)
        with pytest.raises(TranscriptDamagedError, match="damaged"):
            await here.read("acme", "conv_a")
    for tenant, conversation in (("other", "conv_a"), ("acme", "conv_b")):
        View(world.blobs).put(f"{place_of(tenant, conversation)}/{1:020d}", data)
        with pytest.raises(TranscriptDamagedError):
            await here.read(tenant, conversation)


async def test_a_sealed_one_opens_with_its_key_and_in_its_place(world):
    """Also where another key is the newest by now."""
    old, new = new_key(), new_key()
    await world.service(Sealer([old])).replace(0, ENTRY)
    (data,) = world.values.values()
    assert not [word for word in (b"acme", b"coast", b"conv_a") if word in data]
    assert (await world.service(Sealer([new, old])).read("acme", "conv_a")).entry == ENTRY
    for other in (PLAIN, Sealer([new])):
        with pytest.raises(TranscriptSealedError, match="old_key_files"):
            await world.service(other).read("acme", "conv_a")
    View(world.blobs).put(f"{place_of('acme', 'conv_b')}/{1:020d}", data)
    with pytest.raises(TranscriptDamagedError):
        await world.service(Sealer([old])).read("acme", "conv_b")


async def test_a_plain_conversation_is_accepted_unless_disabled(world):
    await world.service().replace(0, ENTRY)
    key = new_key()
    assert (await world.service(Sealer([key])).read("acme", "conv_a")).entry == ENTRY
    with pytest.raises(TranscriptDamagedError):
        await world.service(Sealer([key], takes_plain=False)).read("acme", "conv_a")


async def test_an_overlong_conversation_is_not_shared(world, monkeypatch):
    here = world.service()
    monkeypatch.setattr(conversation_entry, "MAX_ENTRY_BYTES", 10)
    assert await here.replace(0, ENTRY) is None
    assert world.values == {}


async def test_a_silent_store_leaves_conversations_unknown(world):
    here = world.service()
    world.blobs.odds = Odds(fails=1.0)
    for asked in (
        here.look("acme", "conv_a"),
        here.read("acme", "conv_a"),
        here.replace(0, ENTRY),
        here.delete("acme", "conv_a"),
        here.deleted(),
    ):
        with pytest.raises(StoreSilentError):
            await asked
