"""A small typed gRPC client of the inference service, for the chat, the demo and the tests.

Every method raises a ReportedError: the service's own error, NotRunningError if no service answers,
SocketDeniedError if this user may not open the socket, or TurnTimeoutError if a turn takes longer
than its timeout.
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

CALL_S = 30.0  # deadline of every call but a turn
TURN_S = 600.0
MAX_WHY = 300  # characters that are shown of gRPC's own message about a connection
RETRY_S = 1.0  # without a hint: gRPC refuses too many calls at once, or no service answers
SESSION_BUSY = "session_busy"
# Metadata of every call about a session, by which a balancer sends all calls of one session to the
# same server. Ray Serve reads this key, too; the service itself reads the request's field.
SESSION_METADATA = "session_id"


class NotRunningError(UnavailableError):
    """No service answers at the address in time."""

    reason = "not_running"


class SocketDeniedError(DeniedError):
    """This user may not open the service's socket."""

    reason = "socket_denied"


class TurnTimeoutError(DeadlineError):
    """The turn took longer than this client's timeout."""

    reason = "deadline_exceeded"


TurnContent: TypeAlias = str | Sequence[pb.ChatMessage] | Sequence[int]


@dataclass(frozen=True)
class TurnResult:
    """A finished turn: its events put together, and the tokens of all of its `tokens` events."""

    accepted: pb.Accepted
    started: pb.Started
    tokens: Sequence[pb.Token] = field(repr=False)
    finished: pb.Finished

    @property
    def token_ids(self) -> list[int]:
        """The answer's token ids."""
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.finished.text

    @property
    def usage(self) -> pb.Usage:
        """The turn's usage: tokens, times, and from where the history came."""
        return self.finished.usage


def turn_request(content: TurnContent, session_id: str = "", **fields: Any) -> pb.SubmitTurnRequest:
    """Build a SubmitTurnRequest.

    Args:
        content: the turn's input: text, chat messages or token ids.
        session_id: the session's id; "": a new session.
        **fields: other fields of the message.
    """
    request = pb.SubmitTurnRequest(session_id=session_id, **fields)
    if isinstance(content, str):
        request.text = content
        return request
    messages = [item for item in content if isinstance(item, pb.ChatMessage)]
    if messages:
        request.chat.messages.extend(messages)
    else:
        request.tokens.ids.extend(item for item in content if isinstance(item, int))
    return request


class InferenceClient:
    """A connection to one service; use it as an async context manager.

    Args:
        address: "unix:/path" or "host:port".
        credentials: token or certificate for a TCP port; None: none.

    Raises:
        InvalidInputError: the address is invalid.
    """

    def __init__(self, address: str, credentials: ClientCredentials | None = None) -> None:
        self.address = address
        options = [
            # Channels share subchannels, and their back-off: a new client would wait for it, too.
            ("grpc.use_local_subchannel_pool", 1),
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

        A new session gets its id here, not from the service, so that a balancer sends its next turn
        to the same server.

        Args:
            request: the turn.
            timeout_s: most seconds that the turn may take.
        """
        named = _with_session_id(request)
        metadata = _metadata(named)
        call = self._stub.SubmitTurn(named, timeout=timeout_s, metadata=metadata)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            reported = self._reported(error)
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if is_late and isinstance(reported, NotRunningError):  # the service had accepted it
                raise TurnTimeoutError(
                    f"the turn did not finish within {timeout_s:g} s",
                    "submit it again with a longer timeout; the session is unchanged",
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
        """Run a turn to its end.

        Args:
            request: the turn.
            timeout_s: most seconds that the turn may take.
            on_event: callback for each event.
        """
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
        """Run a turn to its end; retry while the service is full or away, after its hinted time.

        Each attempt has the same session and request id, which are made if the request has none. So
        the turn is answered once, and an answer that was lost on the way is sent again.

        Args:
            request: the turn.
            timeout_s: most seconds for all attempts together.
            on_refused: callback for each error after which the turn is retried.

        Raises:
            ReportedError: an error that retrying does not help, or the last one before the timeout.
        """
        same, end_s = _with_ids(request), time.monotonic() + timeout_s
        was_lost = False
        while True:
            left_s = end_s - time.monotonic()
            try:
                return await self.submit(same, timeout_s=left_s)
            except (ConflictError, ExhaustedError, UnavailableError) as error:
                retry_s = RETRY_S if error.retry_after_s is None else error.retry_after_s
                if not _is_temporary(error, was_lost=was_lost) or retry_s >= left_s:
                    raise
                was_lost |= isinstance(error, UnavailableError)
                on_refused(error)
            await asyncio.sleep(retry_s)

    async def cancel(self, session_id: str, request_id: str = "", tenant: str = "") -> int:
        """Stop a session's turns, or the one of a request id; return how many."""
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
        """Explain why a turn missed the cache; `turn` None: the last one that did."""
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
        """Report how soon a session is likely to return after its turn; a hint for the cache.

        Args:
            session_id: the session's id.
            awaited_tools: names of tools that its answer calls.
            superseded: whether another session continues the conversation in its place.
            tenant: the session's tenant; "": the caller's first.
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
        """Start a session from another's first turns; `at_turn` None: from all of them."""
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
        """Drop tokens of a session's context.

        Args:
            session_id: the session's id.
            ranges: half-open ranges of positions in the context.
            positions: single positions in the context.
            tenant: the session's tenant; "": the caller's first.
            **expected: the request's expected_turn and expected_context_tokens.
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
        """Return a description of the model and the service's state."""
        model: pb.Model = await self._call(self._stub.GetModel, pb.GetModelRequest())
        return model

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=CALL_S, metadata=_metadata(request))
        except grpc.aio.AioRpcError as error:
            raise self._reported(error) from error

    def _reported(self, error: grpc.aio.AioRpcError) -> ReportedError:
        """Return the ReportedError of a failed call."""
        reported = error_from_rpc(error)
        # Errors of the service have a remedy: without one it is gRPC's own error.
        if isinstance(reported, UnavailableError) and not reported.remedy:
            return _no_answer(self.address, reported)
        return reported


def _no_answer(address: str, reported: ReportedError) -> ReportedError:
    """Return the error that says why no service answers at an address."""
    if is_unix(address):
        denial = denial_of(Path(address.removeprefix(UNIX)))
        if denial is not None:
            return SocketDeniedError(*denial)
        return NotRunningError(
            f"no inference service is running at {address}",
            "start one with: inference-svc serve --model DIR; or give its address with --address",
        )
    return NotRunningError(
        f"no inference service answers at {address} ({reported.message[:MAX_WHY]})",
        "check server.listen in its settings, and --tls-ca, --tls-cert and --token-file",
    )


def _with_ids(request: pb.SubmitTurnRequest) -> pb.SubmitTurnRequest:
    """Return a copy of the request with ids, by which the service recognises a repeat."""
    copy = _with_session_id(request)
    copy.request_id = request.request_id or f"r-{uuid.uuid4().hex}"
    return copy


def _with_session_id(request: pb.SubmitTurnRequest) -> pb.SubmitTurnRequest:
    """Return a copy of the request that names its session."""
    named = pb.SubmitTurnRequest()
    named.CopyFrom(request)
    if not request.session_id:
        named.session_id = f"s-{uuid.uuid4().hex}"
        named.expected_turn = request.expected_turn  # 0 if not set: the session must be new
    return named


def _metadata(request: Any) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names a call's session; () without a session or a valid name."""
    session_id = getattr(request, "session_id", "")
    return ((SESSION_METADATA, session_id),) if is_name(session_id) else ()


def _is_temporary(error: ReportedError, *, was_lost: bool) -> bool:
    """Whether the same turn may be accepted later; `was_lost`: an attempt lost its connection."""
    if isinstance(error, ConflictError):  # the lost attempt may still be stopping
        return was_lost and error.reason == SESSION_BUSY
    return error.retryable
