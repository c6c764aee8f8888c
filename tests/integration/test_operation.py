"""The real service as an operator runs it: supervised, limited, reloaded, drained.

One service for the whole module, on a socket of three tenants; the last test ends it. "Endless"
turns run until their streams are closed: no result depends on speed.
"""

import asyncio
import json
import shutil
import signal
import socket
import tempfile
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import DeniedError, ExhaustedError, UnavailableError
from tests.inference_processes import InferenceProcess

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Each test continues with the service as the previous one has left it.
    pytest.mark.random_order(disabled=True),
]

SERVICE = "inference.v1.Inference"
MAX_STREAMS = 6
SETTINGS = f"""
[server]
socket_tenants = ["default", "acme", "small"]
[overflow]
split_frames = true
[scheduler]
max_running = 2
kv_tokens = 20000
[limits]
max_streams_per_client = {MAX_STREAMS}
[tenants.small]
max_turns = 1
max_sessions = 2
"""
SHORT = pb.Sampling(max_tokens=4, ignore_eos=True)
ENDLESS = pb.Sampling(max_tokens=1_000_000, ignore_eos=True)
NOTIFY_S = 60.0


class Operated:
    """A service, its settings file, and the socket of its supervisor."""

    def __init__(self, model, directory, settings=SETTINGS, watchdog_s=2.0):
        self.settings = directory / "settings.toml"
        self.settings.write_text(settings)
        self.supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.supervisor.bind(str(directory / "notify"))
        self.supervisor.setblocking(False)
        environ = {
            "NOTIFY_SOCKET": str(directory / "notify"),
            "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
        }
        self.service = InferenceProcess(
            model, directory, flags=("--config", str(self.settings)), environ=environ
        )

    async def receives(self, state):
        """Return once the supervisor has received this state; skip others before it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(NOTIFY_S):
            while True:
                lines = (await loop.sock_recv(self.supervisor, 1000)).decode().split("\n")
                if state in lines[0]:
                    return lines

    async def reload(self, settings):
        """Write new settings and have them reloaded; return the log line about it."""
        self.settings.write_text(settings)
        self.service.send_signal(signal.SIGHUP)
        begun, stamp = await self.receives("RELOADING=1")
        assert (begun, stamp.split("=")[0]) == ("RELOADING=1", "MONOTONIC_USEC")
        await self.receives("READY=1")
        lines = self.service.log_path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if "reloaded" in line][-1]

    async def health(self, name):
        """Return the gRPC health of a service."""
        async with grpc.aio.insecure_channel(self.service.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operated(tiny_model):
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    operated = Operated(tiny_model, directory)
    async with operated.service:
        yield operated
    operated.supervisor.close()
    shutil.rmtree(directory)


@pytest_asyncio.fixture(loop_scope="module")
async def client(operated):
    async with operated.service.client() as connected:
        yield connected


def short(session_id="", **fields):
    return turn_request("Hi ", session_id, sampling=SHORT, **fields)


@asynccontextmanager
async def endless(client, names, until="accepted", **fields):
    """Run turns until the exit, each followed up to its first event of a kind."""
    async with AsyncExitStack() as streams:
        turns = []
        for name in names:
            request = turn_request("Go ", name, sampling=ENDLESS, **fields)
            turns.append(await streams.enter_async_context(aclosing(client.stream_turn(request))))
            async for event in turns[-1]:
                if event.WhichOneof("event") == until:
                    break
        yield turns


async def expect_refusal(awaitable, kind, reason):
    with pytest.raises(kind) as caught:
        await awaitable
    assert caught.value.reason == reason
    assert caught.value.remedy
    return caught.value


async def test_the_supervisor_is_notified_of_readiness_and_life(operated):
    """READY is sent when turns are accepted; then watchdog messages while the event loop runs."""
    await operated.receives("READY=1")
    for _ in range(2):
        await operated.receives("WATCHDOG=1")
    assert await operated.health("") == await operated.health(SERVICE) == "SERVING"


async def test_the_identity_determines_the_tenant(client):
    """The same id of another tenant is another session; a stranger learns nothing of either."""
    first = await client.submit(short("shared"))
    assert (await client.submit(short("shared", tenant="acme"))).accepted.turn == 0
    assert (await client.submit(short("shared", tenant="default"))).accepted.turn == 1
    for call in (
        lambda **whose: client.submit(short("shared", **whose)),
        partial(client.get_session, "shared"),
        partial(client.get_session, "unknown"),
        partial(client.fork_session, "shared"),
        partial(client.delete_session, "shared"),
        partial(client.end_session, "shared"),
        partial(client.discard, "shared", [(0, 1)]),
        partial(client.cancel, "shared"),
    ):
        error = await expect_refusal(call(tenant="other"), DeniedError, "tenant_denied")
        assert "shared" not in str(error)
    assert first.accepted.session_id == "shared"


async def test_a_tenant_at_its_limit_does_not_affect_others(client):
    """It gets a time to retry at, and others' turns are accepted and answered meanwhile."""
    async with endless(client, ["one"], tenant="small"):
        error = await expect_refusal(
            client.submit(short("two", tenant="small")), ExhaustedError, "too_many_turns"
        )
        assert error.retry_after_s > 0
        result = await client.submit(short("others"))
        assert len(result.token_ids) == 4
    # The previous turn is being stopped: its place is free soon.
    result = await client.submit_patiently(short("two", tenant="small"))
    assert len(result.token_ids) == 4
    await client.delete_session("two", tenant="small")


async def test_a_client_that_does_not_read_occupies_no_place(client):
    """Its turn ends without it, and its tenant may have the next."""
    request = turn_request("Go ", "unread", tenant="small", sampling=SHORT)
    async with aclosing(client.stream_turn(request)) as unread:
        assert (await anext(unread)).WhichOneof("event") == "accepted"
        result = await client.submit_patiently(short("read", tenant="small"))
        assert len(result.token_ids) == 4
        kinds = [event.WhichOneof("event") async for event in unread]
    assert kinds[-1] == "finished"
    for name in ("unread", "read"):
        await client.delete_session(name, tenant="small")


async def test_the_number_of_a_tenants_sessions_is_limited(client):
    """Waiting does not help, deleting does; forks count, others' sessions do not."""
    for name in ("a", "b"):
        await client.submit(short(name, tenant="small"))
    full = "too_many_sessions"
    error = await expect_refusal(client.submit(short("c", tenant="small")), ExhaustedError, full)
    assert not error.retryable
    await expect_refusal(client.fork_session("a", tenant="small"), ExhaustedError, full)
    await client.submit(short("a", tenant="small"))
    await client.submit(short("c"))
    await client.delete_session("b", tenant="small")
    await client.submit(short("c", tenant="small"))
    for name in ("a", "c"):
        await client.delete_session(name, tenant="small")


async def test_the_number_of_turns_that_a_client_follows_is_limited(client):
    """A repeat of a turn counts as well; after one has ended another may be followed."""
    names = [f"stream-{number}" for number in range(MAX_STREAMS - 1)]
    async with (
        endless(client, names, request_id="same"),
        endless(client, names[:1], request_id="same"),
    ):
        error = await expect_refusal(
            client.submit(short("more")), ExhaustedError, "too_many_streams"
        )
        assert error.retry_after_s
    result = await client.submit_patiently(short("more"))
    assert len(result.token_ids) == 4


async def test_a_reload_changes_limits_and_defaults_of_later_turns(operated, client):
    """It applies at once and as a whole; keys that need a restart are named, and do not change."""
    assert len((await client.submit(turn_request("Hi ", sampling=SHORT))).token_ids) == 4
    bad = await operated.reload(SETTINGS + "\n[log]\nlevel = 'loud'\n")
    assert bad["event"] == "settings_not_reloaded"
    assert "log.level" in bad["error"]
    changed = SETTINGS.replace("max_running = 2", "max_running = 3\ndefault_max_tokens = 7")
    changed = changed.replace("[overflow]", "[overflow]\npolicy = 'sinks'\nsink_tokens = 9")
    model_sinks = (await client.get_model()).sink_tokens
    changed += "[tenants.acme]\nturns_per_minute = 2\n"
    good = await operated.reload(changed)
    assert good["event"] == "settings_reloaded"
    assert set(good["applied"]) == {
        "overflow.policy",
        "overflow.sink_tokens",
        "scheduler.default_max_tokens",
        "tenants.acme.turns_per_minute",
    }
    model = await client.get_model()
    assert (model.overflow, model.sink_tokens) == ("sinks", 9)
    assert model_sinks != 9
    assert good["needs_restart"] == ["scheduler.max_running"]
    sampling = pb.Sampling(ignore_eos=True)
    assert len((await client.submit(turn_request("Hi ", sampling=sampling))).token_ids) == 7
    for _ in range(2):
        await client.submit(short(tenant="acme"))
    error = await expect_refusal(
        client.submit(short(tenant="acme")), ExhaustedError, "rate_limited"
    )
    assert 0 < error.retry_after_s <= 60
    await operated.reload(SETTINGS)
    await client.submit(short(tenant="acme"))
    assert (await client.get_model()).sink_tokens == model_sinks


async def test_a_drain_hands_back_and_a_second_signal_ends_it(operated, client):
    """Waiting turns are handed back at once, running ones later, at the second signal."""
    service = operated.service
    await client.submit(short("waiting"))
    before = await client.get_session("waiting", with_turns=True)
    async with endless(client, ["runs", "runs-too"], until="tokens") as running:
        accepted = asyncio.Semaphore(0)
        tasks = [
            asyncio.create_task(client.submit(short(name), on_event=lambda _: accepted.release()))
            for name in ("waiting", "waiting-too")
        ]
        tasks.append(asyncio.create_task(client.submit(short("runs", wait=True))))
        for _ in range(2):
            await accepted.acquire()
        service.send_signal(signal.SIGTERM)
        await operated.receives("STOPPING=1")
        for task in tasks:
            error = await expect_refusal(task, UnavailableError, "draining")
            assert error.retryable
        await expect_refusal(client.submit(short("new")), UnavailableError, "draining")
        assert (await operated.health(""), await operated.health(SERVICE)) == (
            "SERVING",
            "NOT_SERVING",
        )
        after = await client.get_session("waiting", with_turns=True)
        assert after.turn_records == before.turn_records
        async for event in running[0]:
            assert event.WhichOneof("event") == "tokens"
            break
        service.send_signal(signal.SIGTERM)
        for events in running:
            with pytest.raises(UnavailableError) as ended:
                async for _ in events:
                    pass
            assert ended.value.reason == "draining"
    assert await service.exit_code() == 0
