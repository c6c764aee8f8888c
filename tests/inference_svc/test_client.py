"""What the typed client makes of refusals and silence, over a real gRPC server."""

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
    """Raises the given errors, one a call, then answers; None: it never does."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.ids = []

    @property
    def num_calls(self):
        """Turns that were submitted."""
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
    """Notes of each call which session its metadata and its message name."""

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
    """Takes turns and says nothing."""

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


async def test_a_refusal_says_how_long_the_queue_is(short_dir):
    """And when to come back; `submit` leaves that to its caller."""
    async with serving(Service(full(2.5)), short_dir) as client:
        with pytest.raises(ExhaustedError) as refused:
            await client.submit(turn_request("Hi"))
    error = refused.value
    assert (error.reason, error.retryable, error.retry_after_s) == ("queue_full", True, 2.5)
    assert error.details == {"queue_length": "64"}


async def test_a_patient_client_comes_back_as_hinted(short_dir):
    """As often as it is refused."""
    service, refusals = Service(full(0.0), full(0.001), full(0.0)), []
    async with serving(service, short_dir) as client:
        result = await client.submit_patiently(turn_request("Hi"), on_refused=refusals.append)
    assert [refusal.retry_after_s for refusal in refusals] == [0.0, 0.001, 0.0]
    assert (result.text, service.num_calls) == ("done", 4)


async def test_patience_ends_with_the_time_it_was_given(short_dir):
    """A hint beyond that is not waited for."""
    service = Service(full(60.0))
    async with serving(service, short_dir) as client:
        with pytest.raises(ExhaustedError):
            await client.submit_patiently(turn_request("Hi"), timeout_s=30)
    assert service.num_calls == 1


async def test_a_turn_that_was_handed_back_is_submitted_again(short_dir, monkeypatch):
    """Under the same ids, also if the client gave none: it is answered once."""
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    service, refusals = Service(DrainingError("the service is about to stop", "again")), []
    async with serving(service, short_dir) as client:
        result = await client.submit_patiently(turn_request("Hi"), on_refused=refusals.append)
    assert ([refusal.reason for refusal in refusals], result.text) == (["draining"], "done")
    first, second = service.ids
    assert first == second
    assert all(first)


async def test_a_lost_turn_may_find_itself_under_way(short_dir, monkeypatch):
    """It waits for its own end; but another's turn in the session is an answer, not a delay."""
    monkeypatch.setattr(client_module, "RETRY_S", 0.1)
    busy = SessionBusyError("busy", "wait")
    service = Service(DrainingError("about to stop", "again"), busy)
    async with serving(service, short_dir) as client:
        assert (await client.submit_patiently(turn_request("Hi"))).text == "done"
        service.errors = [busy]
        with pytest.raises(ConflictError):
            await client.submit_patiently(turn_request("Hi"))


async def test_other_errors_are_not_waited_out(short_dir):
    """Only a service that is full or not there gets better by itself."""
    service = Service(SessionEndedError("over", "fork it"))
    async with serving(service, short_dir) as client:
        with pytest.raises(StateError):
            await client.submit_patiently(turn_request("Hi"))
    assert service.num_calls == 1


async def test_a_turn_that_takes_too_long_is_not_a_service_that_is_not_there(short_dir):
    """The deadline of the call says what to do: give it more time."""
    async with serving(SilentService(), short_dir) as client:
        with pytest.raises(TurnTimeoutError, match="a longer timeout") as late:
            await client.submit(turn_request("Hi"), timeout_s=0.1)
    assert isinstance(late.value, DeadlineError)
    assert late.value.retryable


async def test_nobody_there(short_dir):
    """The address and the remedy are in the line."""
    async with InferenceClient(f"unix:{short_dir}/none") as client:
        with pytest.raises(NotRunningError, match="inference-svc serve"):
            await client.submit(turn_request("Hi"))


async def test_calls_say_of_which_session_they_are(short_dir):
    """In metadata, where a balancer reads it; a new session has its name from its first turn on."""
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
async def test_what_is_no_name_is_left_to_the_service(short_dir, name):
    """Which refuses it in its own words; metadata could not carry all of these."""
    service = RoutedService()
    async with serving(service, short_dir) as client:
        await client.submit(turn_request("Hi", name))
    assert service.named == [(None, name)]
