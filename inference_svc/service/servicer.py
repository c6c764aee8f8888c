"""The gRPC servicer: decode a request, call the gateway, encode its answers.

Raises ReportedErrors; `shared.serving.grpc_status` turns them into statuses.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

from inference_svc.core.submission import TurnNames
from inference_svc.service.gateway import Gateway
from inference_svc.service.submissions import new_session_id
from inference_svc.service.turn_messages import (
    decode_discard,
    decode_submission,
    encode_event,
    encode_miss,
    encode_session,
)
from shared.access.identity import current_identity
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.types.session_key import SessionKey

Context: TypeAlias = Any  # grpc.aio.ServicerContext; its stubs are generic in a useless way


class NamesSession(Protocol):
    """A request about one session."""

    tenant: str
    session_id: str


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """Serves `inference.v1.Inference`.

    Args:
        gateway: the gateway that gRPC and HTTP share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def SubmitTurn(  # noqa: N802  # the proto's name
        self, request: pb.SubmitTurnRequest, context: Context
    ) -> AsyncIterator[pb.TurnEvent]:
        """Stream one turn; it is cancelled when its last client disconnects."""
        rpc_left_s = context.time_remaining()
        stream = await self._gateway.submit(
            current_identity(),
            TurnNames(request.tenant, request.session_id, request.request_id),
            lambda key, defaults: decode_submission(request, key, defaults, rpc_left_s),
        )
        # A callback, not `finally`: a generator that is left at a yield is not closed in time.
        context.add_done_callback(lambda _: stream.leave())
        async for event in stream.events:
            yield encode_event(event)

    async def CancelTurn(  # noqa: N802
        self, request: pb.CancelTurnRequest, context: Context
    ) -> pb.CancelTurnResponse:
        """Stop a session's turns, or the one of a request id."""
        del context
        cancelled = self._gateway.turns.cancel(self._key(request), request.request_id)
        return pb.CancelTurnResponse(cancelled=cancelled)

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.Session:
        """Return a session's state and, if requested, its turns."""
        del context
        sessions, key = self._gateway.turns.sessions, self._key(request)
        transcript, is_busy = await sessions.get(key, is_fresh=True)
        return encode_session(transcript, is_busy=is_busy, with_turns=request.with_turns)

    async def DeleteSession(  # noqa: N802
        self, request: pb.DeleteSessionRequest, context: Context
    ) -> pb.DeleteSessionResponse:
        """Remove a session, and drop its KV from kvd."""
        del context
        await self._gateway.delete_session(self._key(request))
        return pb.DeleteSessionResponse()

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """End a session: it takes no further turn, and its end is reported to kvd."""
        del context
        await self._gateway.turns.sessions.end(self._key(request))
        return pb.EndSessionResponse()

    async def ExpectSession(  # noqa: N802
        self, request: pb.ExpectSessionRequest, context: Context
    ) -> pb.ExpectSessionResponse:
        """Report to kvd how soon a session is likely to return, as the client says."""
        del context
        await self._gateway.turns.sessions.expect(
            self._key(request), request.awaited_tools, superseded=request.superseded
        )
        return pb.ExpectSessionResponse()

    async def ForkSession(  # noqa: N802
        self, request: pb.ForkSessionRequest, context: Context
    ) -> pb.Session:
        """Start a session from another's first turns."""
        del context
        new_id = request.new_session_id or new_session_id()
        forked = await self._gateway.turns.sessions.fork(
            self._key(request),
            request.at_turn if request.HasField("at_turn") else None,
            self._gateway.key(current_identity(), request.tenant, new_id).session_id,
        )
        return encode_session(forked, is_busy=False, with_turns=False)

    async def Discard(  # noqa: N802
        self, request: pb.DiscardRequest, context: Context
    ) -> pb.DiscardResponse:
        """Drop tokens of a session's context."""
        del context
        key = self._key(request)
        ranges, expected = decode_discard(request)
        left_tokens, dropped_tokens = await self._gateway.turns.sessions.discard(
            key, ranges, expected
        )
        return pb.DiscardResponse(context_tokens=left_tokens, dropped_tokens=dropped_tokens)

    async def ExplainMiss(  # noqa: N802
        self, request: pb.ExplainMissRequest, context: Context
    ) -> pb.ExplainMissResponse:
        """Explain why a turn missed the cache."""
        del context
        turn = request.turn if request.HasField("turn") else None
        return encode_miss(await self._gateway.explain_miss(self._key(request), turn))

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.Model:
        """Describe the model, the defaults and the engine's state."""
        del request, context
        return self._gateway.describe()

    def _key(self, request: NamesSession) -> SessionKey:
        """Return the key of a request's session, checked against the caller's identity."""
        return self._gateway.key(current_identity(), request.tenant, request.session_id)
