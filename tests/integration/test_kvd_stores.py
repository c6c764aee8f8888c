"""Sessions move through the servers of object stores as they do through a directory."""

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.blob_servers import SERVERS, MooncakeServer, S3Server
from tests.following_process import Following, remote_settings, until_there
from tests.kvd_polling import eventually
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of

SIZES = ("--dram", "4MB", "--ssd", "8MB")
TOKENS = list(range(100, 1150))
NOT_THERE, UNAVAILABLE, STORE_FAILS = 3, 69, 1


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[S3Server | MooncakeServer]:
    with SERVERS[request.param]() as started:
        yield started


async def _json(kvd: KvdProcess, *arguments: str) -> dict:
    code, stdout, stderr = await run_cli(
        *arguments, "--json", "--runtime-dir", str(kvd.runtime_dir)
    )
    assert code == 0, stderr
    return json.loads(stdout)


async def _code(kvd: KvdProcess, *arguments: str) -> tuple[int, str]:
    code, _, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    return code, stderr


async def _status(kvd: KvdProcess) -> tuple[int, bool | None]:
    """Return the exit code of `kvd remote status`, and whether it says that the store answers."""
    code, stdout, _ = await run_cli(
        *("remote", "status", "--json"), "--runtime-dir", str(kvd.runtime_dir)
    )
    return code, json.loads(stdout)["store_up"] if stdout else None


@asynccontextmanager
async def _following(kvd: KvdProcess):
    """Run `kvd remote follow` beside a kvd."""
    following = Following(kvd)
    following.start()
    try:
        yield following
    finally:
        await following.end(9)


async def test_a_session_moves_by_commands(tmp_path: Path, server) -> None:
    """It is pushed, listed, pulled, removed and swept; an unreachable server is reported."""
    url = server.url
    async with (
        running_kvd(tmp_path / "1", *SIZES) as one,
        running_kvd(tmp_path / "2", *SIZES) as two,
        attached_engine(one.runtime_dir) as engine,
        attached_engine(two.runtime_dir) as other,
    ):
        await engine.store(key_of("a"), TOKENS)
        [pushed] = (await _json(one, "push", "a", "--to", url))["sessions"]
        assert (pushed["outcome"], pushed["num_tokens"]) == ("pushed", 1050)
        assert pushed["sent_bytes"] == pushed["num_bytes"] > 0
        [again] = (await _json(one, "push", "a", "--to", url))["sessions"]
        assert (again["outcome"], again["sent_bytes"]) == ("unchanged", 0)
        [listed] = (await _json(one, "remote", "ls", url))["sessions"]
        assert (listed["session"], listed["num_tokens"]) == ("a", 1050)
        [pulled] = (await _json(two, "pull", "a", "--from", url))["sessions"]
        assert (pulled["num_tokens"], pulled["epoch"]) == (1050, 2)
        assert (await other.load(key_of("a"), TOKENS)).num_tokens == 1050
        assert (await _json(one, "remote", "sweep", url))["num_sessions"] == 1
        assert (await _json(one, "remote", "rm", url, "--all", "--yes"))["num_sessions"] == 1
        assert (await _code(two, "pull", "a", "--from", url))[0] == NOT_THERE
        server.interrupt()
        code, said = await _code(one, "push", "a", "--to", url)
        assert (code, "check that" in said) == (UNAVAILABLE, True), said
        server.resume()


@pytest.mark.parametrize(
    "server", ["mooncake", pytest.param("s3", marks=pytest.mark.long)], indirect=True
)
async def test_a_session_survives_its_server(tmp_path: Path, server) -> None:
    """It is pushed after its turns, and the next server gets it when its own is dead."""
    settings = remote_settings(server.url)
    async with (
        AsyncExitStack() as first,
        running_kvd(tmp_path / "2", *SIZES, environ=settings) as two,
    ):
        one = await first.enter_async_context(running_kvd(tmp_path / "1", *SIZES, environ=settings))
        engine = await first.enter_async_context(attached_engine(one.runtime_dir))
        followed = await first.enter_async_context(_following(one))
        await engine.store(key_of("s"), TOKENS)
        await until_there(server.url, "s", 1050)
        await followed.end(9)
        assert (await _status(one))[0] == UNAVAILABLE
        await one.kill()
        async with attached_engine(two.runtime_dir) as other, _following(two) as following:
            await following.until_said("kvd_followed")
            other.queue.on_wait((0, 0.0, 1), key_of("s"), len(TOKENS))
            await following.until_said("session_pulled")
            assert (await other.load(key_of("s"), TOKENS)).num_tokens == 1050
            await until_there(server.url, "s", 1050, epoch=2)


@pytest.mark.parametrize(
    "server", ["s3", pytest.param("mooncake", marks=pytest.mark.long)], indirect=True
)
async def test_a_store_server_that_goes_and_comes_back(tmp_path: Path, server) -> None:
    """Turns are not affected; afterwards the store gets new sessions, and those it has lost."""
    environ = remote_settings(server.url)
    async with (
        running_kvd(tmp_path, *SIZES, environ=environ) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
        _following(kvd) as following,
    ):
        await engine.store(key_of("before"), TOKENS[:40])
        await until_there(server.url, "before", 40)
        server.interrupt()
        await engine.store(key_of("s"), TOKENS)
        await following.until_said("remote_store_fails")
        await eventually(lambda: _status(kvd), (STORE_FAILS, False))
        assert (await engine.load(key_of("s"), TOKENS)).num_tokens == 1050
        server.resume()
        await until_there(server.url, "s", 1050)
        await following.until_said("remote_store_answers")
        assert following.said("remote_store_fails") == 1
        await eventually(lambda: _status(kvd), (0, True))
        assert (await _json(kvd, "stats"))["remote"]["requests"]["put"] > 0
        await until_there(server.url, "before", 40)
