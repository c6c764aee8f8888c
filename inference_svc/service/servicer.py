"""The gRPC servicer: decode a request, call the front, encode what comes.

Raises ReportedErrors; `shared.serving.grpc_status` turns them into statuses.
"""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from inference_svc.service.gateway import Front
from inference_svc.service.turn_messages import encode_event, encode_session
from shared.access.identity import current_identity
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc

Context: TypeAlias = Any  # grpc.aio.ServicerContext; its stubs are generic in a useless way


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """See the module docstring."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def SubmitTurn(  # noqa: N802  # the proto's name
        self, request: pb.SubmitTurnRequest, context: Context
    ) -> AsyncIterator[pb.TurnEvent]:
        """Stream one turn; the client's leaving cancels it, unless others follow it too."""
        following = await self._front.submit(current_identity(), request, context.time_remaining())
        # A callback, not `finally`: a generator that is left at a yield is not closed in time.
        context.add_done_callback(lambda _: following.leave())
        async for event in following.events():
            yield encode_event(event)

    async def CancelTurn(  # noqa: N802
        self, request: pb.CancelTurnRequest, context: Context
    ) -> pb.CancelTurnResponse:
        """Stop a session's turns."""
        del context
        cancelled = self._front.cancel(
            current_identity(), request.tenant, request.session_id, request.request_id
        )
        return pb.CancelTurnResponse(cancelled=cancelled)

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.Session:
        """A session's state and, if asked for, its turns."""
        del context
        transcript, is_busy = await self._front.get_session(
            current_identity(), request.tenant, request.session_id
        )
        return encode_session(transcript, is_busy=is_busy, with_turns=request.with_turns)

    async def DeleteSession(  # noqa: N802
        self, request: pb.DeleteSessionRequest, context: Context
    ) -> pb.DeleteSessionResponse:
        """Remove a session and let its KV go."""
        del context
        await self._front.delete(current_identity(), request.tenant, request.session_id)
        return pb.DeleteSessionResponse()

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """Take no further turn of a session, and tell kvd that it will not come back."""
        del context
        await self._front.end(current_identity(), request.tenant, request.session_id)
        return pb.EndSessionResponse()

    async def ForkSession(  # noqa: N802
        self, request: pb.ForkSessionRequest, context: Context
    ) -> pb.Session:
        """Start a session from another's first turns."""
        del context
        forked = await self._front.fork(
            current_identity(),
            request.tenant,
            request.session_id,
            request.at_turn if request.HasField("at_turn") else None,
            request.new_session_id,
        )
        return encode_session(forked, is_busy=False, with_turns=False)

    async def Discard(  # noqa: N802
        self, request: pb.DiscardRequest, context: Context
    ) -> pb.DiscardResponse:
        """Drop tokens of a session's context."""
        del context
        left_tokens, dropped_tokens = await self._front.discard(current_identity(), request)
        return pb.DiscardResponse(context_tokens=left_tokens, dropped_tokens=dropped_tokens)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.Model:
        """What is served, and how it goes."""
        del request, context
        return self._front.describe()
