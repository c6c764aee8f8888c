"""A small typed client of the inference service, for the chat, the demo and the tests.

Every method raises a ReportedError: the service's own, NotRunningError if nobody answers,
SocketDeniedError if this user may not open the socket, or TurnTimeoutError if a turn takes longer
than it was given.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from shared.access.addresses import UNIX, is_unix
from shared.access.channels import ClientCredentials, aio_channel_of
from shared.access.denials import denial_of
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.process.runtime_dir import MAX_MESSAGE_BYTES
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    ReportedError,
    UnavailableError,
)
from shared.types.session_key import is_name

CALL_S = 30.0  # deadline of everything but a turn
TURN_S = 600.0
MAX_WHY = 300  # of gRPC's own words about a connection
RETRY_S = 1.0  # without a hint: gRPC's own refusal, when a great many ask at once; nobody there
SESSION_BUSY = "session_busy"
# Metadata of every call about a session: a balancer sends all of one name to one server. Ray Serve
# reads this key, too; the service reads what the request says.
SESSION_METADATA = "session_id"


class NotRunningError(UnavailableError):
    """Nobody answers at the address, or not in time."""

    reason = "not_running"


class SocketDeniedError(DeniedError):
    """This user may not open the service's socket."""

    reason = "socket_denied"


class TurnTimeoutError(DeadlineError):
    """The turn was not over in the time that this client gave it."""

    reason = "deadline_exceeded"


TurnContent: TypeAlias = str | Sequence[pb.ChatMessage] | Sequence[int]


@dataclass(frozen=True)
class TurnResult:
    """A finished turn: its events put together."""

    accepted: pb.Accepted
    started: pb.Started
    tokens: Sequence[pb.Token] = field(repr=False)
    finished: pb.Finished

    @property
    def token_ids(self) -> list[int]:
        """The answer."""
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        """The answer."""
        return self.finished.text

    @property
    def usage(self) -> pb.Usage:
        """What it cost."""
        return self.finished.usage


def turn_request(given: TurnContent, session_id: str = "", **fields: Any) -> pb.SubmitTurnRequest:
    """Build a SubmitTurn from text, chat messages or token ids and the proto's other fields."""
    request = pb.SubmitTurnRequest(session_id=session_id, **fields)
    if isinstance(given, str):
        request.text = given
        return request
    messages = [item for item in given if isinstance(item, pb.ChatMessage)]
    if messages:
        request.chat.messages.extend(messages)
    else:
        request.tokens.ids.extend(item for item in given if isinstance(item, int))
    return request


class InferenceClient:
    """A connection to one service; use it as an async context manager.

    Args:
        address: "unix:/path" or "host:port".
        credentials: token or certificate for a TCP port.

    Raises:
        InvalidInputError: the address is none.
    """

    def __init__(self, address: str, credentials: ClientCredentials | None = None) -> None:
        self.address = address
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # a restarted service is not backed off from
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        self._channel = aio_channel_of(address, credentials, options)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close(None)

    async def stream_turn(
        self, request: pb.SubmitTurnRequest, timeout_s: float = TURN_S
    ) -> AsyncGenerator[pb.TurnEvent, None]:
        """Yield the events of a turn; closing the iterator early cancels the turn.

        A new session is named here, not by the service: its next turn finds the same server again.
        """
        named = _named(request)
        metadata = _metadata(named)
        call = self._stub.SubmitTurn(named, timeout=timeout_s, metadata=metadata)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            reported = self._reported(error)
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if is_late and isinstance(reported, NotRunningError):  # the service took the turn
                raise TurnTimeoutError(
                    f"the turn was not over in {timeout_s:g} s",
                    "submit it again with more time; the session is as it was",
                ) from error
            raise reported from error
        finally:
            call.cancel()

    async def submit(
        self,
        request: pb.SubmitTurnRequest,
        timeout_s: float = TURN_S,
        on_event: Callable[[pb.TurnEvent], None] = lambda _: None,
    ) -> TurnResult:
        """Run a turn to its end."""
        seen: dict[str, Any] = {"accepted": pb.Accepted(), "started": pb.Started()}
        tokens: list[pb.Token] = []
        async with aclosing(self.stream_turn(request, timeout_s)) as events:
            async for event in events:
                on_event(event)
                kind = event.WhichOneof("event")
                if kind == "tokens":
                    tokens += event.tokens.tokens
                else:
                    seen[str(kind)] = getattr(event, str(kind))
        return TurnResult(tokens=tokens, **seen)

    async def submit_patiently(
        self,
        request: pb.SubmitTurnRequest,
        timeout_s: float = TURN_S,
        on_refused: Callable[[ReportedError], None] = lambda _: None,
    ) -> TurnResult:
        """Run a turn to its end, and retry as hinted while the service is full or not there.

        It is the same turn each time, by its session and its request id, which it is given if it
        has none: it is answered once, and an answer that was lost on the way comes again.

        Raises:
            ReportedError: something else is wrong, or it is no better after `timeout_s`.
        """
        same, end_s = _identifiable(request), time.monotonic() + timeout_s
        was_lost = False
        while True:
            left_s = end_s - time.monotonic()
            try:
                return await self.submit(same, timeout_s=left_s)
            except (ConflictError, ExhaustedError, UnavailableError) as error:
                retry_s = RETRY_S if error.retry_after_s is None else error.retry_after_s
                if not _passes(error, was_lost=was_lost) or retry_s >= left_s:
                    raise
                was_lost |= isinstance(error, UnavailableError)
                on_refused(error)
            await asyncio.sleep(retry_s)

    async def cancel(self, session_id: str, request_id: str = "", tenant: str = "") -> int:
        """Stop a session's turns; return how many."""
        request = pb.CancelTurnRequest(tenant=tenant, session_id=session_id, request_id=request_id)
        response: pb.CancelTurnResponse = await self._call(self._stub.CancelTurn, request)
        return response.cancelled

    async def get_session(
        self, session_id: str, *, with_turns: bool = False, tenant: str = ""
    ) -> pb.Session:
        """Return a session's state."""
        request = pb.GetSessionRequest(tenant=tenant, session_id=session_id, with_turns=with_turns)
        session: pb.Session = await self._call(self._stub.GetSession, request)
        return session

    async def explain_miss(
        self, session_id: str, turn: int | None = None, tenant: str = ""
    ) -> pb.ExplainMissResponse:
        """Say why a turn missed the cache; None: the last one of the session that did."""
        request = pb.ExplainMissRequest(tenant=tenant, session_id=session_id, turn=turn)
        explained: pb.ExplainMissResponse = await self._call(self._stub.ExplainMiss, request)
        return explained

    async def delete_session(self, session_id: str, tenant: str = "") -> None:
        """Remove a session."""
        request = pb.DeleteSessionRequest(tenant=tenant, session_id=session_id)
        await self._call(self._stub.DeleteSession, request)

    async def end_session(self, session_id: str, tenant: str = "") -> None:
        """End a session: it can be read and forked, and takes no further turn."""
        request = pb.EndSessionRequest(tenant=tenant, session_id=session_id)
        await self._call(self._stub.EndSession, request)

    async def expect_session(
        self,
        session_id: str,
        awaited_tools: Iterable[str] = (),
        *,
        superseded: bool = False,
        tenant: str = "",
    ) -> None:
        """Tell what is likely to become of a session after its turn; hints for the cache.

        `awaited_tools` are names of tools that its answer calls; `superseded` says that another
        session goes on in its place.
        """
        request = pb.ExpectSessionRequest(
            tenant=tenant,
            session_id=session_id,
            awaited_tools=awaited_tools,
            superseded=superseded,
        )
        await self._call(self._stub.ExpectSession, request)

    async def fork_session(
        self,
        session_id: str,
        at_turn: int | None = None,
        new_session_id: str = "",
        tenant: str = "",
    ) -> pb.Session:
        """Start a session from another's first turns."""
        request = pb.ForkSessionRequest(
            tenant=tenant, session_id=session_id, at_turn=at_turn, new_session_id=new_session_id
        )
        session: pb.Session = await self._call(self._stub.ForkSession, request)
        return session

    async def discard(
        self,
        session_id: str,
        ranges: Iterable[tuple[int, int]] = (),
        positions: Iterable[int] = (),
        tenant: str = "",
        **expected: int,
    ) -> pb.DiscardResponse:
        """Drop tokens of a session's context, by positions in it (half-open ranges, or single).

        `expected` are the request's expected_turn and expected_context_tokens.
        """
        request = pb.DiscardRequest(
            tenant=tenant,
            session_id=session_id,
            ranges=(pb.TokenRange(start=start, end=end) for start, end in ranges),
            positions=positions,
            **expected,
        )
        response: pb.DiscardResponse = await self._call(self._stub.Discard, request)
        return response

    async def get_model(self) -> pb.Model:
        """Return a description of what is served."""
        model: pb.Model = await self._call(self._stub.GetModel, pb.GetModelRequest())
        return model

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=CALL_S, metadata=_metadata(request))
        except grpc.aio.AioRpcError as error:
            raise self._reported(error) from error

    def _reported(self, error: grpc.aio.AioRpcError) -> ReportedError:
        reported = error_from_rpc(error)
        if isinstance(reported, UnavailableError) and not reported.remedy:  # not the service's word
            return _no_answer(self.address, reported)
        return reported


def _no_answer(address: str, reported: ReportedError) -> ReportedError:
    if is_unix(address):
        denial = denial_of(Path(address.removeprefix(UNIX)))
        if denial is not None:
            return SocketDeniedError(*denial)
        return NotRunningError(
            f"no inference service answers at {address}",
            "start one with: inference-svc serve --model DIR (or name its --address)",
        )
    return NotRunningError(
        f"no inference service answers at {address} ({reported.message[:MAX_WHY]})",
        "check its --listen, and --tls-ca, --tls-cert and --token-file",
    )


def _identifiable(request: pb.SubmitTurnRequest) -> pb.SubmitTurnRequest:
    """Return the request with ids, so that the service recognises a repeat."""
    same = _named(request)
    same.request_id = request.request_id or f"r-{uuid.uuid4().hex}"
    return same


def _named(request: pb.SubmitTurnRequest) -> pb.SubmitTurnRequest:
    """Return a copy of the request that names its session."""
    named = pb.SubmitTurnRequest()
    named.CopyFrom(request)
    if not request.session_id:
        named.session_id = f"s-{uuid.uuid4().hex}"
        named.expected_turn = request.expected_turn  # 0 if it has none: nobody has had a turn of it
    return named


def _metadata(request: Any) -> tuple[tuple[str, str], ...]:
    """Say of which session a call is; nothing, if of none, or of a name that is to be refused."""
    session_id = getattr(request, "session_id", "")
    return ((SESSION_METADATA, session_id),) if is_name(session_id) else ()


def _passes(error: ReportedError, *, was_lost: bool) -> bool:
    """Whether the same turn may be accepted later."""
    if isinstance(error, ConflictError):  # our earlier try is being stopped
        return was_lost and error.reason == SESSION_BUSY
    return error.retryable
