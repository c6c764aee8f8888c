"""The service of a replica: its address, its owner, and its absence."""

import asyncio

import pytest

from inference_svc.ray_serve.local_service import (
    LocalService,
    ServiceAddress,
    ServiceError,
    claim_one,
)
from shared.routing.session_router import ServerReport
from tests.inference_processes import InferenceProcess


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "a service has no socket: write grpc, http, socket"),
        ({"socket": "unix:/a", "port": "1"}, "'port' is not a key of a service"),
        (
            {"socket": "127.0.0.1:7430"},
            "socket = '127.0.0.1:7430' is not an address: write unix:/path",
        ),
        ({"socket": "unix:/a", "http": "http://a:1"}, "http = 'http://a:1' is not an address"),
    ],
)
def test_invalid_addresses(given, told):
    with pytest.raises(ServiceError) as refused:
        ServiceAddress.from_dict(given)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_each_replica_has_its_own_service(tmp_path):
    """The first free one; one that is given up can be used again."""
    services = [ServiceAddress(f"unix:{tmp_path}/{name}.sock") for name in ("a", "b")]
    (first, held), (second, also_held) = claim_one(services), claim_one(services)
    with held, also_held:
        assert [first, second] == services
        with pytest.raises(ServiceError, match="all 2 services of this machine"):
            claim_one(services)
        held.close()
        again, held_again = claim_one(services)
        held_again.close()
        assert again == services[0]


def test_services_have_to_be_named():
    with pytest.raises(ServiceError, match="no service is configured"):
        claim_one([])


async def test_a_missing_service(tmp_path):
    service = LocalService(ServiceAddress(f"unix:{tmp_path}/none.sock"), most_sessions=4)
    service.sessions.record_use("ann", 5)
    try:
        with pytest.raises(ServiceError) as refused:
            await service.check()
        assert "no inference service is running at" in str(refused.value)
        assert "correct `socket`" in str(refused.value)
        report = await service.report()
        assert report == ServerReport(takes_turns=False, sessions=report.sessions)
        assert len(report.sessions) == 1
    finally:
        await service.close()


async def test_a_running_service(tiny_model, tmp_path):
    """It has the number of turns that it computes at once, and accepts some."""
    async with InferenceProcess(tiny_model, tmp_path, flags=["--max-running", "3"]) as process:
        service = LocalService(ServiceAddress(process.address), most_sessions=4)
        try:
            await service.check()
            assert await service.report() == ServerReport(num_places=3)
            await service.record_session("ann", "s-nobody")
            assert list(service.sessions.as_dict().values()) == [0]
        finally:
            await service.close()


async def test_waiting_for_a_service(tiny_model, tmp_path, caplog):
    """The reason is logged once; a caller that stops waiting gets it, too."""
    process = InferenceProcess(tiny_model, tmp_path)
    service = LocalService(ServiceAddress(process.address), most_sessions=4)
    try:
        with pytest.raises(ServiceError, match="no inference service is running at"):
            await service.wait(0.0)
        assert not caplog.messages
        waiting = asyncio.create_task(service.wait(300.0))
        await process.start()
        await waiting
        assert [message[:32] for message in caplog.messages] == ["Waiting 300 s for the service: n"]
    finally:
        await service.close()
        await process.stop()
