"""Under a real systemd: the inference service with the shipped model, with and without kvd.

The service runs as its unit defines; clients reach its socket through the container's files.
"""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from tests.systemd.container import REPOSITORY
from tests.systemd.machine import VENV

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

KVD = f"{VENV}/bin/kvd"
UNIT = "inference-svc@demo.service"
SOCKET = "/run/inference-svc-demo/inference.sock"
# Room for the histories of this module: see SIZES.
KVD_ROOM = {"KVD_DRAM__BYTES": "64MB", "KVD_SSD__BYTES": "256MB"}
STORY = "Once upon a time there was a small dog who liked to run in the park. " * 20


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service(booted):
    """Run an inference service with the shipped model, started before kvd."""
    if not booted.has_torch:
        pytest.skip("this Python's packages do not fit the container's Python")
    model = booted.path("/var/lib/models/demo")
    shutil.copytree(REPOSITORY / "inference_svc" / "demo" / "model", model)
    await booted.run("systemctl", "stop", "kvd")
    await booted.run("systemctl", "mask", "--runtime", "kvd")
    settings = booted.path("/etc/kvd/inference-svc@demo.env")
    # A history of a thousand tokens is recomputed as fast as it is loaded. The tests must see
    # loads, so load whatever there is.
    settings.write_text(
        "INFERENCE_CACHE__LOAD_POLICY=always\n"
        "INFERENCE_CACHE__RESIDENTS=false\n"
        "INFERENCE_MODEL__THREADS=1\n"
    )
    await booted.run("systemctl", "start", UNIT)
    yield booted
    await booted.run("systemctl", "stop", UNIT)
    await booted.run("systemctl", "unmask", "--runtime", "kvd")


@asynccontextmanager
async def client_of(container):
    """Return a client of the service, outside of the container."""
    async with InferenceClient(f"unix:{container.path(SOCKET)}") as client:
        yield client


async def turn(container, text: str, session: str, max_tokens: int = 16):
    """Run one turn with greedy sampling."""
    sampling = pb.Sampling(max_tokens=max_tokens)
    async with client_of(container) as client:
        return await client.submit(turn_request(text, session, sampling=sampling))


async def start_kvd(container) -> None:
    """Start an empty kvd, and return when the engine is attached."""
    await container.run("systemctl", "unmask", "--runtime", "kvd")
    await container.configure(**KVD_ROOM)
    await container.run("systemctl", "restart", "kvd")
    await until_attached(container)


async def until_attached(container) -> None:
    """Return when kvd has an engine."""

    async def is_attached() -> bool:
        code, said = await container.tried(KVD, "stats", "--json")
        return code == 0 and bool(json.loads(said)["engines"])

    await container.until(is_attached)


async def test_it_starts_and_answers_without_kvd(service):
    """Without kvd the service is ready, and answers by recomputing."""
    assert await service.property("ActiveState", "kvd") == "inactive"
    assert await service.property("SubState", UNIT) == "running"
    first = await turn(service, STORY, "alone")
    second = await turn(service, " And then", "alone")
    assert first.usage.output_tokens > 0
    assert second.usage.reused_tokens == 0
    assert second.usage.recompute_reason == "kvd_unavailable"


async def test_its_socket_is_open_to_clients_only(service):
    """Members of group inference-client may submit turns; only the service reads transcripts."""
    shown = await service.run("stat", "--format=%U %G %a", SOCKET)
    assert shown == "inference inference-client 660"
    kept = await service.run("stat", "--format=%U %a", "/var/lib/inference-svc/demo")
    assert kept == "inference 700"
    pid = await service.property("MainPID", UNIT)
    status = service.path(f"/proc/{pid}/status").read_text()
    assert "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


async def test_it_attaches_when_kvd_comes_and_survives_its_restart(service):
    """In one engine process: history comes from kvd before and after its restart and kill."""
    await start_kvd(service)
    pid = await service.property("MainPID", UNIT)
    await turn(service, STORY, "kept")
    assert (await turn(service, " The end", "kept")).usage.reused_tokens > 0
    for command in (
        ("systemctl", "restart", "kvd"),
        ("systemctl", "kill", "--signal=KILL", "kvd"),
    ):
        kvd = await service.property("MainPID")
        await service.run(*command)
        await service.until_replaced(kvd)
        await until_attached(service)
        usage = (await turn(service, " And then", "kept")).usage
        assert usage.tier_tokens["dram"] == usage.reused_tokens > 0
    assert await service.property("MainPID", UNIT) == pid
    assert await service.property("NRestarts", UNIT) == "0"


async def test_kvd_is_started_first(service):
    """Both are started together; the service begins when kvd is ready, but does not require it."""
    await service.run("systemctl", "stop", UNIT, "kvd")
    await service.run("systemctl", "start", UNIT)
    ready = int(await service.property("ActiveEnterTimestampMonotonic", "kvd"))
    begun = int(await service.property("ExecMainStartTimestampMonotonic", UNIT))
    assert 0 < ready <= begun
    assert "kvd.service" in (await service.property("Wants", UNIT)).split()
    assert "kvd.service" not in (await service.property("Requires", UNIT)).split()
    await service.run("systemctl", "stop", "kvd")
    assert await service.property("SubState", UNIT) == "running"
    await start_kvd(service)


async def test_turns_are_in_the_journal(service):
    """One JSON line per turn, with session and model, under the service's name."""
    await turn(service, STORY, "told")
    entries = await service.journal("--identifier=inference-svc", "MODEL=demo")
    lines = [json.loads(e["MESSAGE"]) for e in entries if e["MESSAGE"].startswith("{")]
    told = [line for line in lines if line["event"] == "turn" and "/told" in line["session"]]
    assert [line["finish_reason"] in ("stop", "length") for line in told] == [True]
    assert told[0]["trace_id"]
    assert STORY[:20] not in json.dumps(lines)


async def test_reload_accepts_good_settings_only(service):
    """`systemctl reload` reads the file again.

    It fails for a bad file, and the service continues.
    """
    pid = await service.property("MainPID", UNIT)
    path = service.path("/etc/kvd/inference-svc.toml")
    before = path.read_text()
    try:
        path.write_text(before.replace('level = "info"', 'level = "debug"'))
        await service.run("systemctl", "reload", UNIT)
        await service.until(lambda: service.journal(f"--unit={UNIT}", "--grep=settings_reloaded"))
        path.write_text(before.replace('level = "info"', 'level = "loud"'))
        assert (await service.tried("systemctl", "reload", UNIT))[0] != 0
    finally:
        path.write_text(before)
    assert (await turn(service, STORY, "after")).usage.output_tokens > 0
    assert await service.property("MainPID", UNIT) == pid


async def test_a_stop_lets_running_turns_finish(service):
    """`systemctl stop` waits for the running turn, refuses new ones, and succeeds."""

    async def is_stopping() -> bool:
        return await service.property("SubState", UNIT) == "stop-sigterm"

    sampling = pb.Sampling(max_tokens=200)
    async with client_of(service) as client:
        events = client.stream_turn(turn_request(STORY, "last", sampling=sampling))
        async for event in events:
            if event.WhichOneof("event") == "tokens":
                break
        stopping = asyncio.ensure_future(service.run("systemctl", "stop", UNIT))
        await service.until(is_stopping)
        with pytest.raises(ReportedError):
            await client.submit(turn_request(STORY, "late"))
        kinds = [event.WhichOneof("event") async for event in events]
        await stopping
    assert kinds[-1] == "finished"
    assert await service.property("Result", UNIT) == "success"
    await service.run("systemctl", "start", UNIT)


async def test_the_watchdog_replaces_a_stuck_service(service):
    """A service that does not answer is killed and restarted."""
    drop_in = service.path(f"/run/systemd/system/{UNIT}.d/watchdog.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nWatchdogSec=5s\nTimeoutAbortSec=1s\n")
    await service.run("systemctl", "daemon-reload")
    await service.run("systemctl", "restart", UNIT)
    pid = await service.property("MainPID", UNIT)
    await service.run("kill", "-STOP", pid)
    await service.until_replaced(pid, UNIT)
    assert await service.property("NRestarts", UNIT) == "1"
    drop_in.unlink()
    await service.run("systemctl", "daemon-reload")
