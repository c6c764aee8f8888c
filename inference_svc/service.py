"""The gRPC servicer: decode and validate a request, call the turns, encode what comes.

Raises ReportedErrors; `shared.grpc_status` turns them into statuses.
"""

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from inference_svc.core.submission import TurnDefaults
from inference_svc.runtime.turns.turns import Turns
from inference_svc.turn_messages import encode_event, encode_session
from inference_svc.turn_requests import decode_discard, decode_submission
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.session_key import SessionKey, session_key

Context: TypeAlias = Any  # grpc.aio.ServicerContext; its stubs are generic in a useless way


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """See the module docstring.

    Args:
        model: fingerprint, part of every session's key.
        describe: answers GetModel.
        defaults: of what turns do not say.
    """

    def __init__(
        self, turns: Turns, model: str, describe: Callable[[], pb.Model], defaults: TurnDefaults
    ) -> None:
        self._turns = turns
        self._model = model
        self._describe = describe
        self._defaults = defaults

    async def SubmitTurn(  # noqa: N802  # the proto's name
        self, request: pb.SubmitTurnRequest, context: Context
    ) -> AsyncIterator[pb.TurnEvent]:
        """Stream one turn; the client's leaving cancels it, unless others follow it too."""
        session_id = request.session_id or f"s-{uuid.uuid4().hex}"
        key = self._key(request.tenant, session_id)
        submission = decode_submission(request, key, self._defaults, context.time_remaining())
        turn = await self._turns.submit(submission)
        turn.join()
        # A callback, not `finally`: a generator that is left at a yield is not closed in time.
        context.add_done_callback(lambda _: turn.leave())
        async for event in turn.follow():
            yield encode_event(event)

    async def CancelTurn(  # noqa: N802
        self, request: pb.CancelTurnRequest, context: Context
    ) -> pb.CancelTurnResponse:
        """Stop a session's turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        return pb.CancelTurnResponse(cancelled=self._turns.cancel(key, request.request_id))

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.Session:
        """A session's state and, if asked for, its turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        transcript, is_busy = await self._turns.get_session(key)
        return encode_session(transcript, is_busy=is_busy, with_turns=request.with_turns)

    async def DeleteSession(  # noqa: N802
        self, request: pb.DeleteSessionRequest, context: Context
    ) -> pb.DeleteSessionResponse:
        """Remove a session and let its KV go."""
        del context
        await self._turns.delete(self._key(request.tenant, request.session_id))
        return pb.DeleteSessionResponse()

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """Take no further turn of a session, and tell kvd that it will not come back."""
        del context
        await self._turns.end(self._key(request.tenant, request.session_id))
        return pb.EndSessionResponse()

    async def ForkSession(  # noqa: N802
        self, request: pb.ForkSessionRequest, context: Context
    ) -> pb.Session:
        """Start a session from another's first turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        new_key = self._key(request.tenant, request.new_session_id or f"s-{uuid.uuid4().hex}")
        at_turn = request.at_turn if request.HasField("at_turn") else None
        forked = await self._turns.fork(key, at_turn, new_key.session_id)
        return encode_session(forked, is_busy=False, with_turns=False)

    async def Discard(  # noqa: N802
        self, request: pb.DiscardRequest, context: Context
    ) -> pb.DiscardResponse:
        """Drop tokens of a session's context."""
        del context
        key = self._key(request.tenant, request.session_id)
        ranges, expected = decode_discard(request)
        left_tokens, dropped_tokens = await self._turns.discard(key, ranges, expected)
        return pb.DiscardResponse(context_tokens=left_tokens, dropped_tokens=dropped_tokens)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.Model:
        """What is served, and how it goes."""
        del request, context
        return self._describe()

    def _key(self, tenant: str, session_id: str) -> SessionKey:
        return session_key(tenant, self._model, session_id)
