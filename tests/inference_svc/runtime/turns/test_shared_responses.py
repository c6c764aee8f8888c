"""Responses in the object store that services share."""

from dataclasses import replace
from random import Random

import pytest

from inference_svc.core.transcript_format import TranscriptSealedError
from inference_svc.runtime.turns import shared_responses
from inference_svc.runtime.turns.shared_responses import SharedResponses, Standing
from inference_svc.runtime.turns.store_calls import StoreCalls, StoreSilentError
from shared.blobs.release import RESPONSES, TRANSCRIPTS
from shared.blobs.response_entry import (
    DELETED,
    MAX_ENTRY_BYTES,
    ResponseEntry,
    decode_response,
    encode_response,
)
from shared.encryption.key_file import new_key
from shared.encryption.sealer import PLAIN, Sealer
from shared.process.backoff import Backoff
from tests.faulty_store import FaultyStore, Odds, View

ENTRY = ResponseEntry(f"{TRANSCRIPTS}/tenant/digest", "s-1", 1, "r-1", False, {"model": "m"})
SILENT = Odds(fails=1.0)


class World:
    """A store, and services that share it."""

    def __init__(self):
        self.blobs = FaultyStore(Random(5))  # noqa: S311
        self.calls = []

    def service(self, sealer=PLAIN):
        backoff = Backoff(Random(1), first_s=0.0, longest_s=0.0)  # noqa: S311
        self.calls.append(StoreCalls(View(self.blobs), 60.0, backoff))
        return SharedResponses(self.calls[-1], sealer)

    def silence(self, *, is_silent=True):
        self.blobs.odds = SILENT if is_silent else Odds()

    @property
    def values(self):
        """Return the store's values of responses."""
        there = self.blobs.blobs.items()
        return [data for name, (data, _) in there if name.startswith(f"{RESPONSES}/")]


@pytest.fixture
def world():
    world = World()
    yield world
    for calls in world.calls:
        calls.close()


async def test_a_response_is_found_by_its_id_and_tenant(world):
    """At any server; names in the store reveal nothing."""
    here, there = world.service(), world.service()
    await here.keep("acme", "resp_1", ENTRY)
    assert await there.find("acme", "resp_1") == ENTRY
    assert await there.find("other", "resp_1") is None
    assert await there.find("acme", "resp_2") is None
    assert world.calls[0].ended.counts == {("told",): 1}
    assert world.calls[1].ended.counts == {("asked",): 3}
    names = [name for name in world.blobs.blobs if name.startswith(RESPONSES)]
    assert not [name for name in names if "acme" in name or "resp_1" in name]


async def test_a_deleted_response_never_comes_back(world):
    """Not even if a repeat of its request stores it again; deleting an unknown one is allowed."""
    here, there = world.service(), world.service()
    await here.keep("acme", "resp_1", ENTRY)
    await there.delete("acme", "resp_1")
    await here.keep("acme", "resp_1", ENTRY)
    assert await here.find("acme", "resp_1") is None
    await there.delete("acme", "resp_2")
    await here.keep("acme", "resp_3", ENTRY)
    asked = ["resp_1", "resp_2", "resp_3", "resp_4"]
    found = await here.standing("acme", asked)
    deleted, there_is, absent = Standing.DELETED, Standing.THERE, Standing.ABSENT
    assert found == dict(zip(asked, (deleted, deleted, there_is, absent), strict=True))


async def test_a_response_stored_again_does_not_change(world):
    """The first counts: its client has got it."""
    here = world.service()
    await here.keep("acme", "resp_1", ENTRY)
    await here.keep("acme", "resp_1", replace(ENTRY, turns=7))
    assert await here.find("acme", "resp_1") == ENTRY


async def test_damaged_responses_are_missing(world):
    """To whoever asks for the response."""
    here = world.service()
    await here.keep("acme", "resp_1", ENTRY)
    ((name, (data, stored_s)),) = [
        found for found in world.blobs.blobs.items() if found[0].startswith(RESPONSES)
    ]
    world.blobs.blobs[name] = (data[:-1], stored_s)
    assert await here.find("acme", "resp_1") is None


async def test_all_responses_of_a_session_are_deleted(world):
    """As many as there are."""
    here = world.service()
    ids = [f"resp_{number}" for number in range(40)]
    for one in ids:
        await here.keep("acme", one, ENTRY)
    await here.delete_all("acme", ids)
    assert world.values == [DELETED] * len(ids)


async def test_a_silent_store_gets_missing_responses_later(world):
    """Storing does not fail; looking up and deleting report that the result is unknown."""
    here = world.service()
    world.silence()
    for number in range(3):
        await here.keep("acme", f"resp_{number}", ENTRY)
    await here.delete_all("acme", ["resp_7"])
    for asked in (
        here.find("acme", "resp_0"),
        here.standing("acme", ["resp_0"]),
        here.delete("acme", "resp_0"),
        here.catch_up(),
    ):
        with pytest.raises(StoreSilentError):
            await asked
    world.silence(is_silent=False)
    await here.delete("acme", "resp_1")
    await here.catch_up()
    assert await here.find("acme", "resp_0") == ENTRY
    assert await here.find("acme", "resp_1") is None
    assert await here.find("acme", "resp_2") == ENTRY
    num_told = world.calls[0].ended.counts[("told",)]
    await here.catch_up()
    assert world.calls[0].ended.counts[("told",)] == num_told, "nothing is left to be told"


async def test_the_backlog_of_a_silent_store_is_bounded(world, monkeypatch):
    """In bytes: the oldest are dropped."""
    here, size = world.service(), len(encode_response(ENTRY))
    monkeypatch.setattr(shared_responses, "MAX_BEHIND_BYTES", 2 * size)
    world.silence()
    for number in (0, 1, 1, 2):
        await here.keep("acme", f"resp_{number}", ENTRY)
    world.silence(is_silent=False)
    await here.catch_up()
    found = await here.standing("acme", ["resp_0", "resp_1", "resp_2"])
    assert list(found.values()) == [Standing.ABSENT, Standing.THERE, Standing.THERE]


async def test_an_overlong_response_is_not_shared(world):
    """That is no error."""
    here = world.service()
    long = replace(ENTRY, info={"text_format": "x" * MAX_ENTRY_BYTES})
    await here.keep("acme", "resp_1", long)
    assert world.values == []


async def test_a_sealed_response_shows_its_transcripts_place_and_opens_with_its_key(world):
    """A sweep has to know that; the contents are hidden."""
    sealer = Sealer([new_key()])
    said = replace(ENTRY, session="holidays", items='["to the coast"]')
    await world.service(sealer).keep("acme", "resp_1", said)
    (value,) = world.values
    assert decode_response(value).transcript == said.transcript
    assert not [word for word in (b"holidays", b"coast", b"model", b"r-1") if word in value]
    assert await world.service(sealer).find("acme", "resp_1") == said
    for other in (PLAIN, Sealer([new_key()])):
        with pytest.raises(TranscriptSealedError, match="old_key_files"):
            await world.service(other).find("acme", "resp_1")


async def test_a_sealed_response_in_anothers_place_is_refused(world):
    sealer = Sealer([new_key()])
    await world.service(sealer).keep("acme", "resp_1", ENTRY)
    await world.service(sealer).keep("acme", "resp_2", replace(ENTRY, request="r-2"))
    one, two = (name for name in world.blobs.blobs if name.startswith(RESPONSES))
    world.blobs.blobs[one], world.blobs.blobs[two] = world.blobs.blobs[two], world.blobs.blobs[one]
    assert await world.service(sealer).find("acme", "resp_1") is None
    assert await world.service(sealer).find("acme", "resp_2") is None


@pytest.mark.parametrize(
    "change", [{"turns": 2}, {"named": True}, {"transcript": f"{TRANSCRIPTS}/tenant/other"}]
)
async def test_the_visible_part_of_a_sealed_response_cannot_be_changed(world, change):
    sealer = Sealer([new_key()])
    await world.service(sealer).keep("acme", "resp_1", ENTRY)
    (name,) = (name for name in world.blobs.blobs if name.startswith(RESPONSES))
    forged = encode_response(replace(decode_response(world.values[0]), **change))
    View(world.blobs).put(name, forged)
    assert await world.service(sealer).find("acme", "resp_1") is None


@pytest.mark.parametrize("words", ["", "W10=", "bnVsbA==", "not base64", 7])
async def test_a_forged_seal_is_refused(world, words):
    """Even if plain responses are accepted."""
    forged = replace(ENTRY, info={"sealed": words})
    await world.service().keep("acme", "resp_1", forged)
    assert await world.service(Sealer([new_key()])).find("acme", "resp_1") is None


async def test_a_plain_response_is_accepted_unless_disabled(world):
    await world.service().keep("acme", "resp_1", ENTRY)
    key = new_key()
    assert await world.service(Sealer([key])).find("acme", "resp_1") == ENTRY
    assert await world.service(Sealer([key], takes_plain=False)).find("acme", "resp_1") is None


async def test_a_sealed_response_is_stored_without_an_overlong_input(world):
    sealer = Sealer([new_key()])
    await world.service(sealer).keep("acme", "resp_1", replace(ENTRY, items="x" * MAX_ENTRY_BYTES))
    assert await world.service(sealer).find("acme", "resp_1") == ENTRY
