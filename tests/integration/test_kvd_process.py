"""One kvd process and its engines: attach, store, load, share, restart, stop."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.kvd_client.attachment import KvdUnavailableError
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.types.errors import InvalidInputError, NotFoundError
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import KvdProcess, running_kvd
from tests.synthetic_engine import attached_engine, encode, key_of, small_layout

TOKENS = list(range(100, 150))  # three full blocks and two tokens


async def test_stored_rows_are_loaded_from_dram(tmp_path: Path) -> None:
    """An engine loads its own stored rows, byte for byte, from DRAM."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        assert await engine.store(key_of("a"), TOKENS) == 50
        loaded = await engine.load(key_of("a"), TOKENS)
    assert (loaded.num_tokens, loaded.tiers) == (50, {"dram"})


async def test_turns_grow_a_session(tmp_path: Path) -> None:
    """Each turn loads the history and stores only what it adds."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        stored = 0
        for num_tokens in (5, 16, 40, 41, 100):
            tokens = list(range(num_tokens))
            assert (await engine.load(key_of("a"), tokens)).num_tokens == stored
            # The trailing partial block is replaced, so its tokens are written again.
            stored = await engine.store(key_of("a"), tokens, stored // 16 * 16)
            assert stored == num_tokens


async def test_equal_prefixes_are_shared_between_sessions(tmp_path: Path) -> None:
    """A fork finds its parent's blocks, and another tenant does not."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("parent"), TOKENS)
        fork = await engine.load(key_of("fork"), [*TOKENS[:48], 7, 8])
        stranger = await engine.load(key_of("fork", tenant="other"), TOKENS)
    assert fork.num_tokens == 48
    assert stranger.num_tokens == 0


async def test_changed_tokens_are_not_loaded(tmp_path: Path) -> None:
    """Only the blocks before the first differing token are answered."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        edited = [*TOKENS[:20], 1, *TOKENS[21:]]
        assert (await engine.load(key_of("a"), edited)).num_tokens == 16


async def test_restart_keeps_stored_sessions(tmp_path: Path) -> None:
    """After SIGTERM and a new start the engine, which stayed, loads every session from SSD."""
    async with running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB", keep="none") as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            for name in ("a", "b"):
                await engine.store(key_of(name), TOKENS)
            assert await kvd.stop() == 0
            await kvd.start()
            await engine.client.wait_attached(30)
            loaded = await engine.load(key_of("a"), TOKENS)
            again = await engine.load(key_of("a"), TOKENS)
        stored = await sessions_of(kvd)
    assert (loaded.num_tokens, loaded.tiers) == (50, {"ssd"})
    assert again.tiers == {"dram"}
    assert {info.session.session_id for info in stored} == {"a", "b"}


async def test_more_sessions_than_dram_holds(tmp_path: Path) -> None:
    """Blocks that DRAM cannot keep are read from SSD; every session stays complete."""
    names = [f"s{number}" for number in range(12)]
    async with (
        running_kvd(tmp_path, "--dram", "80KB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for number, name in enumerate(names):
            await engine.store(key_of(name), [token + 1000 * number for token in TOKENS])
        loads = [
            await engine.load(key_of(name), [token + 1000 * number for token in TOKENS])
            for number, name in enumerate(names)
        ]
        stats = await reader_stats(kvd)
    assert [load.num_tokens for load in loads] == [50] * len(names)
    assert any("ssd" in load.tiers for load in loads)
    assert stats.layouts[0].counters["evictions_dram"] > 0


async def test_a_session_larger_than_dram_is_loaded_in_parts(tmp_path: Path) -> None:
    """A load that does not fit into the arena at once continues where it ended."""
    tokens = list(range(16 * 20))
    async with (
        running_kvd(tmp_path, "--dram", "64KB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        assert await engine.store(key_of("long"), tokens) == len(tokens)
        assert (await engine.load(key_of("long"), tokens)).num_tokens == len(tokens)


async def test_without_ssd_a_full_arena_drops_the_coldest(tmp_path: Path) -> None:
    """With DRAM only, new sessions replace old ones and no call fails."""
    async with (
        running_kvd(tmp_path, "--dram", "80KB", "--ssd", "0") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for number in range(6):
            tokens = [token + 1000 * number for token in TOKENS]
            assert await engine.store(key_of(f"s{number}"), tokens) == 50
        oldest = await engine.load(key_of("s0"), TOKENS)
        newest = await engine.load(key_of("s5"), [token + 5000 for token in TOKENS])
    assert oldest.num_tokens < 50
    assert newest.num_tokens == 50


async def test_two_engines_share_one_arena(tmp_path: Path) -> None:
    """An engine loads what another one of the same layout has stored."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="first") as first,
        attached_engine(kvd.runtime_dir, name="second") as second,
    ):
        await first.store(key_of("a"), TOKENS)
        assert (await second.load(key_of("a"), TOKENS)).num_tokens == 50
        stats = await reader_stats(kvd)
    assert {engine.name for engine in stats.engines} == {"first", "second"}


async def test_layouts_are_kept_apart(tmp_path: Path) -> None:
    """Another layout of the same model finds nothing: its bytes would have another meaning."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
        attached_engine(kvd.runtime_dir, small_layout(num_layers=3)) as other,
    ):
        await engine.store(key_of("a"), TOKENS)
        assert (await other.load(key_of("a"), TOKENS)).num_tokens == 0


async def test_a_detached_engine_releases_its_leases(tmp_path: Path) -> None:
    """An engine that detaches during a load has ended it; a store stays while the process lives."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as stays,
    ):
        async with attached_engine(kvd.runtime_dir) as leaves:
            await leaves.store(key_of("a"), TOKENS)
            await leaves.client.prepare_load(key_of("a"), encode(TOKENS), 0, 5)
            await leaves.client.prepare_store(key_of("b"), encode(range(32)), 0, 5)
            assert (await reader_stats(kvd)).layouts[0].leases == 2
        # The process that may still be writing is this one.
        await eventually(lambda: _leases(kvd), 1)
        assert (await stays.load(key_of("b"), list(range(32)))).num_tokens == 0
        await kvd.kill()  # its drain would wait for that store


async def _leases(kvd: KvdProcess) -> int:
    return (await reader_stats(kvd)).layouts[0].leases


async def test_a_cancelled_prepare_leaves_no_lease(tmp_path: Path) -> None:
    """If the caller gives up while kvd answers, the lease is given back."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        for _ in range(20):
            call = asyncio.ensure_future(
                engine.client.prepare_load(key_of("a"), encode(TOKENS), 0, 5)
            )
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: _leases(kvd), 0)
        assert engine.client.attached


async def test_discard_drops_tokens_and_keeps_the_rest(tmp_path: Path) -> None:
    """After dropping the oldest block the others are loaded at their new positions."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        assert await engine.client.discard(key_of("a"), encode(TOKENS), [(0, 16)]) == 34
        grant = await engine.client.prepare_load(key_of("a"), encode(TOKENS[16:]), 0, 5)
        await engine.client.complete_load(grant)
    assert grant.end_token == 34


async def test_queues_ends_and_session_facts_reach_kvd(tmp_path: Path) -> None:
    """The queue snapshot, the end of a session and its facts are visible to operators."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        for number, name in enumerate("ab"):
            engine.queue.on_wait((0, 0.0, number), key_of(name), 50)
        await eventually(lambda: _queue_jobs(kvd), 2)
        await engine.client.end_session(key_of("a"))
        info = await engine.client.get_session(key_of("a"))
        with pytest.raises(NotFoundError):
            await engine.client.get_session(key_of("nobody"))
    assert info.ended
    assert info.num_tokens == 50


async def _queue_jobs(kvd: KvdProcess) -> int:
    return (await reader_stats(kvd)).engines[0].queue_jobs


async def test_an_impossible_layout_is_refused(tmp_path: Path) -> None:
    """Attach checks the layout: the peer's own fingerprint must be the one that kvd computes."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/engine.sock") as channel,
    ):
        stub = kvd_pb2_grpc.EngineStub(channel)
        call = stub.Attach(kvd_pb2.AttachRequest(layout=kvd_pb2.KVLayout()))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_arena_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """A DRAM tier that holds less than two blocks is refused with the setting to raise."""
    layout = small_layout(num_layers=32)
    async with running_kvd(tmp_path, "--dram", "128KB") as kvd:
        with pytest.raises(KvdUnavailableError, match=r"dram\.bytes"):
            async with attached_engine(kvd.runtime_dir, layout, attach_s=1):
                pass


async def test_wrong_token_bytes_are_refused(tmp_path: Path) -> None:
    """Token ids that are not whole uint32 values are the caller's error."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        with pytest.raises(InvalidInputError):
            await engine.client.prepare_load(key_of("a"), b"\0\0\0", 0, 5)
        with pytest.raises(InvalidInputError):
            await engine.client.prepare_load(key_of("no such name"), encode([1]), 0, 5)
        assert engine.client.attached


async def test_draining_is_announced(tmp_path: Path) -> None:
    """SIGTERM is announced to engines: they detach, no lease is granted, the exit code is 0."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        changes: list[bool] = []
        engine.client.on_change.append(changes.append)
        assert await kvd.signal(signal.SIGTERM) == 0
        with pytest.raises(KvdUnavailableError):
            await engine.client.prepare_load(key_of("a"), encode(TOKENS), 0, 5)
    assert changes[0] is False
    assert not [path for path in kvd.runtime_dir.iterdir() if path.suffix == ".sock"]


async def test_health_and_reflection_on_every_socket(tmp_path: Path) -> None:
    """Each socket reports its health and its services."""
    expected = {
        "engine.sock": {"kvd.v1.Engine"},
        "operator.sock": {"kvd.v1.Operator", "kvd.v1.Reader"},
        "reader.sock": {"kvd.v1.Reader"},
    }
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        for socket_name, services in expected.items():
            address = f"unix:{kvd.runtime_dir / socket_name}"
            async with grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                assert {name for name in await _services(channel) if "kvd" in name} == services


async def _services(channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    call.cancel()
    return [service.name for service in answer.list_services_response.service]


async def test_sockets_are_for_owner_and_group(tmp_path: Path) -> None:
    """Directories are the owner's, sockets are mode 0660."""
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        modes = {path.name: path.stat().st_mode & 0o777 for path in kvd.runtime_dir.glob("*.sock")}
        assert kvd.state_dir.stat().st_mode & 0o777 == 0o700
    assert modes == dict.fromkeys(
        ("data.sock", "engine.sock", "files.sock", "operator.sock", "reader.sock"), 0o660
    )


async def test_write_through_reaches_ssd(tmp_path: Path) -> None:
    """Without any eviction everything stored is on SSD soon as well."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        await all_clean(kvd)
        (info,) = await sessions_of(kvd)
    assert info.ssd_bytes == info.bytes == 4 * 8192


async def test_events_are_streamed(tmp_path: Path) -> None:
    """A watcher receives the event of a stored session."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
        grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/reader.sock") as channel,
    ):
        events = kvd_pb2_grpc.ReaderStub(channel).WatchEvents(kvd_pb2.WatchEventsRequest())
        await channel.channel_ready()
        heard = asyncio.ensure_future(events.read())
        number = 0
        while not heard.done():  # the watch begins when kvd has seen the call
            number += 1
            await engine.store(key_of(f"s{number}"), TOKENS)
        event = heard.result()
        events.cancel()
    assert event.name == "session_stored"
    assert event.session.tenant == "default"
