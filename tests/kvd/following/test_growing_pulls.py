"""Pulls of a real kvd: the arrived part of a session is usable at once, and nothing else is."""

import asyncio

import pytest

from kvd.client.operator_client import connect_to
from kvd.core.operations.growing import NOT_FETCHED
from kvd.following.agenda import Push
from kvd.following.transfers import Transfers
from kvd.remote.pushing import Outcome
from shared.encryption.key_file import new_key, write_key
from shared.kvd_client.messages import key_message
from shared.types.granted_slots import Lookup
from tests.kvd_polling import counters_of
from tests.moved_session import (
    CHUNK_TOKENS,
    HERE,
    KEY,
    TOKENS,
    moved_session,
    refusal,
)
from tests.synthetic_engine import attached_engine, encode, small_layout

BLOCK_TOKENS = small_layout().block_tokens


@pytest.fixture(autouse=True)
def grows_at_once(monkeypatch):
    """Let sessions grow with each chunk, however small."""
    monkeypatch.setattr("kvd.remote.pulling.GROW_BYTES", 1)


async def load_with_wait(place, wait_s):
    """Load the session as a turn that may wait for it; return how many tokens it has."""
    grant = await place.engine.client.prepare_load(
        KEY, encode(TOKENS), 0, 30.0, fetch_wait_s=wait_s, history_tokens=len(TOKENS)
    )
    await place.engine.client.complete_load(grant)
    return grant.end_token if grant.lookup is not Lookup.MISS else 0


async def test_a_turn_that_stops_waiting_has_the_arrived_part(tmp_path):
    """It has half of the session; the rest arrives for the next turn."""
    async with moved_session(tmp_path) as place:
        await asyncio.to_thread(place.client.answer_wanted, key_message(KEY), coming=False)
        await load_with_wait(place, 0.001)  # it is asked for
        await asyncio.to_thread(place.client.answer_wanted, key_message(KEY), coming=True)
        async with place.pulling(3) as pull:
            assert await load_with_wait(place, 0.05) == 3 * CHUNK_TOKENS
            assert (await place.engine.load(KEY, TOKENS)).num_tokens == 3 * CHUNK_TOKENS
            assert await place.here() == (3 * CHUNK_TOKENS, NOT_FETCHED)
        info, pulled = await pull
        assert (info.num_tokens, info.lost, pulled.num_tokens) == (len(TOKENS), "", len(TOKENS))
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


async def test_a_waiting_turn_continues_as_soon_as_its_history_is_complete(tmp_path):
    """It loads while the rest of the session still arrives."""
    async with moved_session(tmp_path) as place:
        await asyncio.to_thread(place.client.answer_wanted, key_message(KEY), coming=True)
        history = TOKENS[: 4 * CHUNK_TOKENS]
        waiting = asyncio.create_task(
            place.engine.client.prepare_load(
                KEY, encode(history), 0, 30.0, fetch_wait_s=50.0, history_tokens=len(history)
            )
        )
        async with place.pulling(2) as pull:
            assert not waiting.done()
            place.store.allow(5)
            grant = await waiting
            assert grant.end_token == len(history)
            assert not pull.done()
            await place.engine.client.complete_load(grant)
            assert (await counters_of(place.kvd))["fetch_waits_fetched"] == 1
        assert (await pull)[1].num_tokens == len(TOKENS)


async def test_damage_leaves_the_chunks_before_it(tmp_path):
    """The third chunk is damaged: two stay, and do not replace what the store has."""
    async with moved_session(tmp_path) as place:
        place.damage(2)
        assert await refusal(asyncio.create_task(place.pull())) == "damaged_remote"
        assert await place.here() == (2 * CHUNK_TOKENS, NOT_FETCHED)
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == 2 * CHUNK_TOKENS
        _, pushed = await asyncio.to_thread(place.transfers.push, Push(KEY))
        assert (pushed.outcome, pushed.num_tokens) == (Outcome.LONGER, len(TOKENS))
        place.damage(2)
        assert await place.pull() is not None
        assert await place.here() == (len(TOKENS), "")
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


async def test_a_session_that_continues_here_during_the_pull_stays(tmp_path):
    """A turn has loaded the arrived part, computed the rest and more: the pull ends quietly."""
    longer = [*TOKENS, 7, 8, 9]
    async with moved_session(tmp_path) as place:
        async with place.pulling(2) as pull:
            await place.engine.store(KEY, longer, from_token=2 * CHUNK_TOKENS)
        assert await pull is None
        assert await place.here() == (len(longer), "")
        assert (await place.engine.load(KEY, longer)).num_tokens == len(longer)
        _, pushed = await asyncio.to_thread(place.transfers.push, Push(KEY))
        assert (pushed.outcome, pushed.num_tokens) == (Outcome.PUSHED, len(longer))


async def test_a_sealed_session_is_usable_when_complete(tmp_path):
    """Only the end proves that no chunk is missing."""
    write_key(tmp_path / "key", new_key())
    async with moved_session(tmp_path, KVD_ENCRYPTION__KEY_FILE=str(tmp_path / "key")) as place:
        place.damage(4)
        assert await refusal(asyncio.create_task(place.pull())) == "damaged_remote"
        assert await place.here() is None
        place.damage(4)
        await place.pull()
        assert await place.here() == (len(TOKENS), "")


async def test_kvd_is_killed_during_a_pull(tmp_path):
    """The part it finds is sound, and known to be incomplete: the store keeps the rest."""
    async with moved_session(tmp_path) as place:
        async with place.pulling(3) as pull:
            await place.kvd.kill()
        assert await refusal(pull)
        await place.kvd.start()
        found = await place.here()
        num_here = found[0] if found else 0
        assert num_here in range(0, 3 * CHUNK_TOKENS + 1, BLOCK_TOKENS)  # blocks that were hashed
        assert found is None or found[1]
        with connect_to(f"unix:{place.kvd.runtime_dir}/operator.sock") as client:
            transfers = Transfers(place.store, client, HERE)
            if found:
                _, pushed = await asyncio.to_thread(transfers.push, Push(KEY))
                assert pushed.outcome is Outcome.LONGER
            place.client, place.transfers = client, transfers
            async with attached_engine(place.kvd.runtime_dir) as engine:
                num_loaded = (await engine.load(KEY, TOKENS)).num_tokens
                assert num_here <= num_loaded <= 3 * CHUNK_TOKENS  # the import may have had more
                await place.pull()
                assert (await engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)
