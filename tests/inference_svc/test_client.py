"""The typed client's handling of refusals and silence, with a real gRPC server."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from inference_svc import client as client_module
from inference_svc.client import InferenceClient, NotRunningError, TurnTimeoutError, turn_request
from inference_svc.core.errors import (
    DrainingError,
    QueueFullError,
    SessionBusyError,
    SessionEndedError,
)
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.types.errors import ConflictError, DeadlineError, ExhaustedError, StateError


class Service(inference_pb2_grpc.InferenceServicer):
    """Raises the given errors, one per call, then answers; None: it never answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.ids = []

    @property
    def num_calls(self):
        """Return the number of submitted turns."""
        return len(self.ids)

    async def SubmitTurn(self, request, context):  # noqa: N802
        self.ids.append((request.session_id, request.request_id))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        yield pb.TurnEvent(finished=pb.Finished(text="done"))

    async def GetModel(self, request, context):  # noqa: N802
        await asyncio.Event().wait()


class RoutedService(Service):
    """Records the session in the metadata and message of each call."""

    def __init__(self):
        super().__init__()
        self.named = []

    def _note(self, request, context):
        told = dict(context.invocation_metadata()).get("session_id")
        self.named.append((told, request.session_id))

    async def SubmitTurn(self, request, context):  # noqa: N802
        self._note(request, context)
        yield pb.TurnEvent(finished=pb.Finished(text="done"))

    async def GetSession(self, request, context):  # noqa: N802
        self._note(request, context)
        return pb.Session()


class SilentService(Service):
    """Accepts turns and sends nothing."""

    async def SubmitTurn(self, request, context):  # noqa: N802
        yield pb.TurnEvent(accepted=pb.Accepted())
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(service, directory):
    server = grpc.aio.server(interceptors=[ReportedErrorInterceptor("inference")])
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{directory}/s")
    await server.start()
    async with InferenceClient(f"unix:{directory}/s") as client:
        yield client
    await server.stop(None)


def full(retry_after_s):
    return QueueFullError("full", "later", queue_length=64, retry_after_s=retry_after_s)


async def test_a_refusal_has_the_length_of_the_queue(short_dir):
    """And a time to retry at; `submit` leaves that to its caller."""
    async with serving(Service(full(2.5)), short_dir) as client:
        with pytest.raises(ExhaustedError) as refused:
            await client.submit(turn_request("Hi"))
    error = refused.value
    assert (error.reason, error.retryable, error.retry_after_s) == ("queue_full", True, 2.5)
    assert error.details == {"queue_length": "64"}


async def test_a_patient_client_retries_as_hinted(short_dir):
    """As often as it is refused."""
    service, refusals = Service(full(0.0), full(0.001), full(0.0)), []
    async with serving(service, short_dir) as client:
        result = await client.submit_patiently(turn_request("Hi"), on_refused=refusals.append)
    assert [refusal.retry_after_s for refusal in refusals] == [0.0, 0.001, 0.0]
    assert (result.text, service.num_calls) == ("done", 4)


async def test_patience_has_a_time_limit(short_dir):
    """A hint beyond it is not waited for."""
    service = Service(full(60.0))
    async with serving(service, short_dir) as client:
        with pytest.raises(ExhaustedError):
            await client.submit_patiently(turn_request("Hi"), timeout_s=30)
    assert service.num_calls == 1


async def test_a_turn_that_was_handed_back_is_submitted_again(short_dir, monkeypatch):
    """With the same ids, even generated ones: it is answered once."""
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    service, refusals = Service(DrainingError("the service is about to stop", "again")), []
    async with serving(service, short_dir) as client:
        result = await client.submit_patiently(turn_request("Hi"), on_refused=refusals.append)
    assert ([refusal.reason for refusal in refusals], result.text) == (["draining"], "done")
    first, second = service.ids
    assert first == second
    assert all(first)


async def test_a_lost_turn_may_still_be_running(short_dir, monkeypatch):
    """The client waits for its own turn's end; another's turn in the session is an error."""
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    busy = SessionBusyError("busy", "wait")
    service = Service(DrainingError("about to stop", "again"), busy)
    async with serving(service, short_dir) as client:
        assert (await client.submit_patiently(turn_request("Hi"))).text == "done"
        service.errors = [busy]
        with pytest.raises(ConflictError):
            await client.submit_patiently(turn_request("Hi"))


async def test_other_errors_are_not_retried(short_dir):
    """Only a full or absent service recovers by itself."""
    service = Service(SessionEndedError("over", "fork it"))
    async with serving(service, short_dir) as client:
        with pytest.raises(StateError):
            await client.submit_patiently(turn_request("Hi"))
    assert service.num_calls == 1


async def test_a_slow_turn_is_distinguished_from_an_absent_service(short_dir):
    """The error names the remedy: a later deadline of the call."""
    async with serving(SilentService(), short_dir) as client:
        with pytest.raises(TurnTimeoutError, match="a longer timeout") as late:
            await client.submit(turn_request("Hi"), timeout_s=0.1)
    assert isinstance(late.value, DeadlineError)
    assert late.value.retryable


async def test_an_absent_service(short_dir):
    """The line has the address and the remedy."""
    async with InferenceClient(f"unix:{short_dir}/none") as client:
        with pytest.raises(NotRunningError, match="inference-svc serve"):
            await client.submit(turn_request("Hi"))


async def test_calls_name_their_session_in_metadata(short_dir):
    """A balancer reads it; a new session has a name from its first turn on."""
    service = RoutedService()
    async with serving(service, short_dir) as client:
        await client.submit(turn_request("Hi", "story-1"))
        await client.get_session("story-1")
        await client.submit(turn_request("Hi"))
        await client.submit_patiently(turn_request("Hi"))
    assert service.named[:2] == [("story-1", "story-1")] * 2
    (told, named), (patiently_told, patiently_named) = service.named[2:]
    assert told == named
    assert patiently_told == patiently_named
    assert len({"", told, patiently_told}) == 3


@pytest.mark.parametrize("name", ["é", "two\nlines", "../up", "x" * 200])
async def test_invalid_names_are_left_to_the_service(short_dir, name):
    """It refuses them in its own words; not all could be metadata."""
    service = RoutedService()
    async with serving(service, short_dir) as client:
        await client.submit(turn_request("Hi", name))
    assert service.named == [(None, name)]
