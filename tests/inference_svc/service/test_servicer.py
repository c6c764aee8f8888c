"""The gRPC calls of clients: turns are streamed, sessions read, cut, forked, ended and deleted."""

from contextlib import asynccontextmanager

import pytest

from inference_svc.core.errors import (
    SessionEndedError,
    TurnMismatchError,
    UnknownSessionError,
    UnknownTurnError,
)
from inference_svc.service.servicer import InferenceService
from shared.access.identity import Identity, TenantDeniedError, act_as
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.awaited_tools import InvalidToolNamesError
from tests.inference_svc.service.gateways import gateway_of
from tests.memory_engine import loaded_model

ANN = Identity("ann", "token", ("acme",), frozenset({"client"}))
PROMPT = list(range(20, 30))


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


class Context:
    """A gRPC context."""

    def __init__(self):
        self.done = []

    def time_remaining(self):
        return None

    def add_done_callback(self, callback):
        self.done.append(callback)

    def end(self):
        """End the call: the client has its answer, or has disconnected."""
        for callback in self.done:
            callback(self)


@asynccontextmanager
async def service_of(model, directory):
    async with gateway_of(model, directory) as gateway:
        act_as(ANN)
        yield InferenceService(gateway)


async def turn_of(service, ids, session_id="s", **fields):
    """Return the last event of a turn."""
    request = pb.SubmitTurnRequest(session_id=session_id, tokens=pb.TokenIds(ids=ids), **fields)
    request.sampling.max_tokens = 2
    request.sampling.ignore_eos = True
    context = Context()
    events = [event async for event in service.SubmitTurn(request, context)]
    context.end()
    assert [event.WhichOneof("event") for event in events[:2]] == ["accepted", "started"]
    return events[-1].finished


def make_request(kind, session_id="s", **fields):
    return kind(session_id=session_id, **fields)


async def test_a_turn_is_streamed_and_recorded(model, tmp_path):
    """Without a tenant it is the caller's own; the session can be read."""
    async with service_of(model, tmp_path) as service:
        finished = await turn_of(service, PROMPT)
        assert (finished.turns, finished.finish_reason) == (1, "length")
        session = await service.GetSession(
            make_request(pb.GetSessionRequest, with_turns=True), None
        )
        assert (session.tenant, session.turns, session.busy) == ("acme", 1, False)
        assert list(session.context_ids[: len(PROMPT)]) == PROMPT
        assert session.context_tokens == len(PROMPT) + 2
        brief = await service.GetSession(make_request(pb.GetSessionRequest), None)
        assert (brief.turns, len(brief.turn_records), len(brief.context_ids)) == (1, 0, 0)


async def test_another_tenants_sessions_are_out_of_reach(model, tmp_path):
    """For every call with a session."""
    async with service_of(model, tmp_path) as service:
        with pytest.raises(TenantDeniedError):
            await turn_of(service, PROMPT, tenant="globex")
        theirs = {"tenant": "globex", "session_id": "s"}
        for call, request in (
            (service.GetSession, pb.GetSessionRequest(**theirs)),
            (service.DeleteSession, pb.DeleteSessionRequest(**theirs)),
            (service.EndSession, pb.EndSessionRequest(**theirs)),
            (service.ExpectSession, pb.ExpectSessionRequest(**theirs)),
            (service.ForkSession, pb.ForkSessionRequest(**theirs)),
            (service.Discard, pb.DiscardRequest(**theirs)),
            (service.CancelTurn, pb.CancelTurnRequest(**theirs)),
        ):
            with pytest.raises(TenantDeniedError):
                await call(request, None)


async def test_tokens_are_dropped_by_range_and_by_position(model, tmp_path):
    """If the session is as the client expects."""
    async with service_of(model, tmp_path) as service:
        await turn_of(service, PROMPT)
        request = make_request(pb.DiscardRequest, positions=[7], expected_turn=1)
        request.ranges.add(start=0, end=2)
        answer = await service.Discard(request, None)
        assert (answer.context_tokens, answer.dropped_tokens) == (len(PROMPT) + 2 - 3, 3)
        session = await service.GetSession(
            make_request(pb.GetSessionRequest, with_turns=True), None
        )
        assert list(session.context_ids[:6]) == [22, 23, 24, 25, 26, 28]
        assert session.dropped_tokens == 3
        request.expected_turn = 0
        with pytest.raises(TurnMismatchError):
            await service.Discard(request, None)


async def test_a_fork_is_named_or_gets_a_name(model, tmp_path):
    """It has the first turns of the original; 0 of them is valid, too."""
    async with service_of(model, tmp_path) as service:
        await turn_of(service, PROMPT)
        named = await service.ForkSession(
            make_request(pb.ForkSessionRequest, new_session_id="f"), None
        )
        assert (named.session_id, named.turns) == ("f", 1)
        made_up = await service.ForkSession(make_request(pb.ForkSessionRequest, at_turn=0), None)
        assert made_up.session_id not in {"", "s", "f"}
        assert made_up.turns == 0


async def test_a_session_ends_and_is_deleted(model, tmp_path):
    """An ended session accepts no turn; a deleted one does not exist."""
    async with service_of(model, tmp_path) as service:
        await turn_of(service, PROMPT)
        await service.EndSession(make_request(pb.EndSessionRequest), None)
        with pytest.raises(SessionEndedError):
            await turn_of(service, [1])
        assert (await service.GetSession(make_request(pb.GetSessionRequest), None)).ended
        await service.DeleteSession(make_request(pb.DeleteSessionRequest), None)
        with pytest.raises(UnknownSessionError):
            await service.GetSession(make_request(pb.GetSessionRequest), None)


async def test_a_client_reports_expected_tools(model, tmp_path):
    """One that parses calls itself."""
    async with service_of(model, tmp_path) as service:
        await turn_of(service, PROMPT)
        hint = make_request(pb.ExpectSessionRequest, awaited_tools=["bash"])
        await service.ExpectSession(hint, None)
        await service.ExpectSession(make_request(pb.ExpectSessionRequest, superseded=True), None)
        with pytest.raises(UnknownSessionError):
            await service.ExpectSession(make_request(pb.ExpectSessionRequest, session_id="x"), None)
        with pytest.raises(InvalidToolNamesError):
            await service.ExpectSession(
                make_request(pb.ExpectSessionRequest, awaited_tools=[""]), None
            )


async def test_a_client_that_disconnects_frees_its_stream(model, tmp_path):
    """A gateway for two streams accepts a third one once a first has ended."""
    async with service_of(model, tmp_path) as service:
        for number in range(4):
            await turn_of(service, PROMPT, session_id=f"s-{number}")


async def test_an_ended_turn_cannot_be_cancelled(model, tmp_path):
    """A running one can; its stream ends with the tokens so far."""
    async with service_of(model, tmp_path) as service:
        await turn_of(service, PROMPT)
        with pytest.raises(UnknownTurnError):
            await service.CancelTurn(make_request(pb.CancelTurnRequest), None)
        request = pb.SubmitTurnRequest(session_id="s", tokens=pb.TokenIds(ids=[1]))
        request.sampling.max_tokens = 60
        request.sampling.ignore_eos = True
        context = Context()
        events = service.SubmitTurn(request, context)
        while (await anext(events)).WhichOneof("event") != "tokens":
            pass
        answer = await service.CancelTurn(make_request(pb.CancelTurnRequest), None)
        assert answer.cancelled == 1
        assert [event async for event in events][-1].finished.finish_reason == "cancelled"
        context.end()
