"""kvd remote follow beside real daemons: sessions move automatically; loads may wait for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvd.client.operator_client import connect_to
from kvd.errors import NotRunningError
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.kv_layout import KVLayout
from tests.following_process import Following, manifest_of, remote_settings, until_there
from tests.kvd_polling import counters_of, eventually, sessions_of
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import (
    SyntheticEngine,
    attached_engine,
    encode,
    key_of,
    layout_with_states,
    layout_with_windows,
    small_layout,
)

SIZES = ("--dram", "4MB", "--ssd", "8MB")
TOKENS = list(range(100, 1150))


class Server:
    """A kvd, its engine and its follower."""

    def __init__(self, kvd: KvdProcess, engine: SyntheticEngine, following: Following) -> None:
        self.kvd, self.engine, self.following = kvd, engine, following


@asynccontextmanager
async def server(
    directory: Path,
    store: Path,
    sizes: tuple[str, ...] = SIZES,
    layout: KVLayout | None = None,
    **settings: str,
) -> AsyncIterator[Server]:
    """Run a server whose follower pushes to, and fetches from, a directory."""
    environ = remote_settings(store, **settings)
    async with (
        running_kvd(directory, *sizes, environ=environ) as kvd,
        attached_engine(kvd.runtime_dir, layout) as engine,
    ):
        following = Following(kvd)
        following.start()
        try:
            yield Server(kvd, engine, following)
        finally:
            await following.end(9)


async def test_sessions_follow_their_turns(tmp_path: Path) -> None:
    """Stored at A, fetched at B in time, A fenced off.

    A session that continues at A is A's again.
    """
    store = tmp_path / "store"
    async with server(tmp_path / "1", store) as a, server(tmp_path / "2", store) as b:
        await a.engine.store(key_of("s"), TOKENS)
        await until_there(store, "s", 1050)
        await b.following.until_said("kvd_followed")
        b.engine.queue.on_wait((0, 0.0, 1), key_of("s"), len(TOKENS))
        b.engine.queue.on_wait((0, 1.0, 2), key_of("nowhere"), 50)
        await until_there(store, "s", 1050, epoch=2)
        await b.following.until_said("session_pulled")
        assert (await b.engine.load(key_of("s"), TOKENS)).num_tokens == 1050
        await a.engine.store(key_of("s"), [*TOKENS, 1])
        await a.following.until_said("session_fenced")
        await a.engine.store(key_of("s"), [*TOKENS, 1, 2])
        await until_there(store, "s", 1052, epoch=3)


async def wait_for(engine: SyntheticEngine, name: str, history_tokens: int = 0) -> int:
    """Load a session that may be fetched first; return how many tokens are granted."""
    tokens, key, history = encode(TOKENS), key_of(name), history_tokens
    grant = await engine.client.prepare_load(
        key, tokens, 0, 30.0, fetch_wait_s=30.0, history_tokens=history
    )
    await engine.client.complete_load(grant)
    return grant.end_token


async def until_answered(one: Server) -> None:
    """Return when a follower is known to answer: a load has waited in vain.

    From now on the follower receives requests directly. Otherwise it would have to catch up with
    all requests of its start, and the last one might wait for too long.
    """
    await one.following.until_said("kvd_followed")
    number = 0
    while not (await counters_of(one.kvd))["fetch_waits_absent"]:
        number += 1
        assert await wait_for(one.engine, f"nowhere-{number}") == 0


async def waits_of(one: Server) -> dict[str, int]:
    """Return how waits of loads have ended."""
    names = ("fetched", "absent", "unanswered", "late")
    counters = await counters_of(one.kvd)
    return {name: n for name in names if (n := counters[f"fetch_waits_{name}"])}


async def test_a_load_waits_for_a_session_that_is_fetched(tmp_path: Path) -> None:
    """It waits however slow that is; for a session that is nowhere it does not wait."""
    store = tmp_path / "store"
    async with (
        server(tmp_path / "1", store) as a,
        server(tmp_path / "2", store, rate="300KB") as b,
    ):
        await a.engine.store(key_of("s"), TOKENS)
        await until_there(store, "s", 1050)
        await until_answered(b)
        assert await wait_for(b.engine, "s") == 1050
        assert await wait_for(b.engine, "s") == 1050
        assert await waits_of(b) == {"absent": 1, "fetched": 1}


@pytest.mark.parametrize(
    "layout",
    [small_layout(), layout_with_states(), layout_with_windows()],
    ids=["plain", "states", "windows"],
)
async def test_a_session_that_continued_elsewhere_comes_back(
    tmp_path: Path, layout: KVLayout
) -> None:
    """It continued at B: A has an older part, waits for all of it, and continues.

    Its settings at A stay in force; only B is fenced off by that.
    """
    store, key = tmp_path / "store", key_of("s")

    def ends(num_tokens: int) -> tuple[int, ...]:
        return (num_tokens,) if layout.state_bytes or layout.window else ()

    async with (
        server(tmp_path / "1", store, layout=layout) as a,
        server(tmp_path / "2", store, layout=layout) as b,
    ):
        await until_answered(a)
        await until_answered(b)
        await a.engine.store(key, TOKENS[:500], states=ends(500))
        await until_there(store, "s", 500)
        assert await wait_for(b.engine, "s", 500) == 500
        await b.engine.store(key, TOKENS, from_token=500, states=ends(1050))
        await until_there(store, "s", 1050, epoch=2)
        assert (await run_cli("pin", "s", "--runtime-dir", str(a.kvd.runtime_dir)))[0] == 0
        assert await wait_for(a.engine, "s", 500) == 500
        assert await wait_for(a.engine, "s", 1050) == 1050
        assert await waits_of(a) == {"absent": 1, "fetched": 1}
        assert (await a.engine.load(key, TOKENS)).num_tokens == 1050
        (info,) = await sessions_of(a.kvd)
        assert (info.num_tokens, info.lost, info.pin) == (1050, "", pb.PIN_HARD)
        longer = [*TOKENS, 1]
        await a.engine.store(key, longer, from_token=1050, states=ends(1051))
        await until_there(store, "s", 1051, epoch=3)
        assert a.following.said("session_fenced") == 0


async def test_a_session_that_has_lost_its_end_is_fetched(tmp_path: Path) -> None:
    """The end comes from the copy that this server has pushed."""
    store, sizes = tmp_path / "store", ("--dram", "1MB", "--ssd", "0")
    async with server(tmp_path / "1", store, sizes) as one:
        await until_answered(one)
        await one.engine.store(key_of("s"), TOKENS)
        await until_there(store, "s", 1050)
        await one.engine.store(key_of("other"), [7] * 1400)
        left = (await one.engine.load(key_of("s"), TOKENS)).num_tokens
        assert 0 < left < 900
        assert await wait_for(one.engine, "s", 1050) == 1050
        assert await waits_of(one) == {"absent": 1, "fetched": 1}
        assert (await one.engine.load(key_of("s"), TOKENS)).num_tokens == 1050
        await until_there(store, "s", 1050)


async def test_a_follower_that_is_killed_costs_one_wait(tmp_path: Path) -> None:
    """It answers no more; loads wait for the next follower from its first answer on."""
    store = tmp_path / "store"
    async with server(tmp_path / "1", store) as one:
        await until_answered(one)
        await one.following.end(9)
        for number in range(3):
            assert await wait_for(one.engine, f"unheard-{number}") == 0
        assert await waits_of(one) == {"absent": 1, "unanswered": 1}
        one.following.start()
        await one.following.until_said("kvd_followed", 2)
        while (await waits_of(one))["absent"] == 1:
            number += 1
            assert await wait_for(one.engine, f"unheard-{number}") == 0
        assert (await waits_of(one))["unanswered"] == 1


async def test_without_a_follower_loads_do_not_wait(tmp_path: Path) -> None:
    """The settings say that sessions are fetched, but requests have no answer."""
    async with server(tmp_path / "1", tmp_path / "store") as one:
        await one.following.end(9)
        await one.kvd.stop()
        await one.kvd.start()
        async with attached_engine(one.kvd.runtime_dir) as engine:
            for name in ("a", "b", "c"):
                assert await wait_for(engine, name) == 0
        assert await waits_of(one) == {}
        assert (await counters_of(one.kvd))["sessions_wanted"] == 3
        one.following.start()


async def test_a_kvd_without_the_answering_call_is_not_called_again(tmp_path: Path) -> None:
    """An older kvd, and the readers' socket, lack the call; that is no failure."""

    def answer(kvd: KvdProcess) -> None:
        with connect_to(f"unix:{kvd.runtime_dir}/reader.sock") as client:
            client.answer_wanted(key_message(key_of("s")), coming=True)

    async with running_kvd(tmp_path, *SIZES) as kvd:
        await asyncio.to_thread(answer, kvd)
        await kvd.stop()
        with pytest.raises(NotRunningError):
            await asyncio.to_thread(answer, kvd)


async def test_dropped_sessions_are_removed_from_the_store(tmp_path: Path) -> None:
    """Flushes and ends remove them, even if kvd has no blocks any more; evicted sessions stay."""
    store, sizes = tmp_path / "store", ("--dram", "1MB", "--ssd", "0")
    async with server(tmp_path / "1", store, sizes) as one:
        for name in ("flushed", "ended", "evicted", "ended-elsewhere"):
            await one.engine.store(key_of(name), TOKENS[:40])
            await until_there(store, name, 40)
        code, _, said = await run_cli("flush", "flushed", "--runtime-dir", str(one.kvd.runtime_dir))
        assert code == 0, said
        await one.engine.client.end_session(key_of("ended"))
        for name in ("flushed", "ended"):
            await until_there(store, name, None)
        await one.engine.store(key_of("large"), [7] * 2040)  # evicts all others
        await until_there(store, "large", 2040)
        names = {info.session.session_id for info in await sessions_of(one.kvd)}
        assert "ended-elsewhere" not in names, names
        assert manifest_of(store, "evicted") is not None
        await one.engine.client.end_session(key_of("ended-elsewhere"))
        await until_there(store, "ended-elsewhere", None)


async def test_a_follower_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """It is killed in the middle of a push, too; it catches up with stores and flushes.

    Then kvd ends, and is followed again when it is back.
    """
    store = tmp_path / "store"
    async with server(tmp_path / "1", store, rate="1MB") as one:
        await one.engine.store(key_of("early"), TOKENS[:40])
        await until_there(store, "early", 40)
        await one.engine.store(key_of("s"), TOKENS)
        await one.following.end(9)  # in whichever state the push is
        await one.engine.store(key_of("late"), TOKENS[:50])
        code, _, _ = await run_cli("flush", "early", "--runtime-dir", str(one.kvd.runtime_dir))
        assert code == 0
        assert (await one.engine.load(key_of("s"), TOKENS)).num_tokens == 1050
        one.following.start()
        await until_there(store, "s", 1050)
        await until_there(store, "late", 50)
        await until_there(store, "early", None)

        await one.kvd.kill()
        await one.following.until_said("kvd_not_followed")
        num_followed = one.following.said("kvd_followed")
        await one.kvd.start()
        await one.following.until_said("kvd_followed", num_followed + 1)
        async with attached_engine(one.kvd.runtime_dir) as engine:
            await engine.store(key_of("after"), TOKENS[:60])
            await until_there(store, "after", 60)
        assert one.following.said("session_not_pushed") == 0


async def test_a_failing_store_does_not_affect_turns(tmp_path: Path) -> None:
    """Stores and loads continue; once it works it gets what it lacks, and settings are followed."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    async with server(tmp_path / "1", store) as one:
        await one.engine.store(key_of("before"), TOKENS[:40])
        await until_there(store, "before", 40)
        store.rename(elsewhere)
        store.touch()  # a file in the place of the directory
        await one.engine.store(key_of("s"), TOKENS)
        await one.following.until_said("remote_store_fails")
        assert (await one.engine.load(key_of("s"), TOKENS)).num_tokens == 1050
        store.unlink()
        elsewhere.rename(store)
        await until_there(store, "s", 1050)
        await one.following.until_said("remote_store_answers")
        assert one.following.said("remote_store_fails") == 1


@pytest.mark.parametrize("write", ["drain", "none"])
async def test_drain_pushes_the_rest_at_the_end(tmp_path: Path, write: str) -> None:
    """With "drain" everything is pushed then, and not earlier."""
    store = tmp_path / "store"
    async with server(tmp_path / "1", store, write=write) as one:
        await one.engine.store(key_of("s"), TOKENS)
        await one.following.until_said("kvd_followed")
        assert await one.following.end(15) == 0
        there = manifest_of(store, "s") if store.exists() else None
        assert (there is not None) is (write == "drain")
        one.following.start()


async def test_evicted_sessions_were_pushed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "evicted" only those are pushed until the end.

    An evicted session comes back unchanged.
    """
    # so that learned return times do not change the order
    monkeypatch.setenv("KVD_EVICTION__POLICY", "lru")
    store, names = tmp_path / "store", [f"s{number}" for number in range(10)]
    conversations = {
        name: list(range(2000 * number, 2000 * number + 1050)) for number, name in enumerate(names)
    }
    # SSD holds four sessions, and half of the headroom
    sizes = ("--dram", "2MB", "--ssd", "3300KB")
    async with server(tmp_path / "1", store, sizes, write="evicted") as one:
        await one.following.until_said("kvd_followed")
        for number, name in enumerate(names):
            await one.engine.store(key_of(name), conversations[name])
            if number >= 3:
                await eventually(partial(is_headroom_there, one, store, name), wanted=True)
        await eventually(lambda: is_there_what_goes(one, store, names), wanted=True)
        there = [name for name in names if manifest_of(store, name)]
        assert there == names[: len(there)] != names
        assert {manifest_of(store, name).num_tokens for name in there} == {1050}
        assert "s0" not in {info.session.session_id for info in await sessions_of(one.kvd)}
        one.engine.queue.on_wait((0, 0.0, 1), key_of("s0"), 1050)
        await one.following.until_said("session_pulled")
        assert (await one.engine.load(key_of("s0"), conversations["s0"])).num_tokens == 1050
        assert await one.following.end(15) == 0
        assert {n: manifest_of(store, n).num_tokens for n in names} == dict.fromkeys(names, 1050)
        one.following.start()


async def is_headroom_there(one: Server, store: Path, newest: str) -> bool:
    """Return whether the newest session and the next one have room, counting pushed sessions."""
    infos = {info.session.session_id: info for info in await sessions_of(one.kvd)}
    near = [name for name, info in infos.items() if info.near_eviction]
    is_enough = sum(infos[name].num_blocks for name in near) > 66 and not infos[newest].dirty_bytes
    return is_enough and all(manifest_of(store, name) for name in near)


async def is_there_what_goes(one: Server, store: Path, names: list[str]) -> bool:
    """Return whether the store has just the sessions that kvd lacks, in part or soon."""
    infos = {info.session.session_id: info for info in await sessions_of(one.kvd)}
    stays = {name for name, one in infos.items() if not (one.lost or one.near_eviction)}
    return all((name in stays) is (manifest_of(store, name) is None) for name in names)


async def test_a_follower_that_has_lost_kvd_drains_at_its_end(tmp_path: Path) -> None:
    """It connects once more: kvd may be back."""
    store = tmp_path / "store"
    async with server(tmp_path / "1", store, write="drain") as one:
        await one.following.until_said("kvd_followed")
        await one.kvd.stop()
        await one.following.until_said("kvd_not_followed")
        await one.kvd.start()
        async with attached_engine(one.kvd.runtime_dir) as engine:
            await engine.store(key_of("s"), TOKENS)
            assert await one.following.end(15) == 0
        assert manifest_of(store, "s") is not None
        one.following.start()
