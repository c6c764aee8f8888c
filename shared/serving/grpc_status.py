"""The one place that turns our errors into gRPC statuses and back.

A status carries google.rpc.ErrorInfo: `reason` (slug), `domain` ("kvd", "inference"), metadata
"retryable", "remedy", "message" and the error's own details; and google.rpc.RetryInfo if the error
says when to come back. Servers install ReportedErrorInterceptor, so that servicers simply raise;
clients pass what they caught to error_from_rpc.

*Source:* https://google.aip.dev/193 (errors).
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from shared.serving.grpc_handlers import CallInterceptor, Handler, behaviour_of, made_handler
from shared.types.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
    StateError,
    UnauthenticatedError,
    UnavailableError,
)
from shared.types.units import NS_PER_S

DETAILS_KEY = "grpc-status-details-bin"  # where gRPC carries google.rpc.Status
MAX_TEXT = 1000  # of a message or remedy: trailing metadata is bounded (8 KB by default)
MAX_DETAIL_TEXT = 100  # of a detail, for the same reason
MAX_RETRY_S = 86400.0  # a hint to come back later than tomorrow is not sent
GRPC_TOO_LARGE = "message larger than max"  # gRPC's words, on either side
NO_ANSWER = frozenset({DeadlineError.grpc_code, "UNKNOWN"})  # codes of a peer that said nothing
OUR_METADATA = frozenset({"retryable", "remedy", "message"})  # the rest is the error's details


class InternalError(ReportedError):
    """The peer failed in a way it did not expect itself."""

    reason = "internal"
    grpc_code = "INTERNAL"
    exit_code = 70


class MessageTooLargeError(InvalidInputError):
    """gRPC has refused to send, or to take, a message of this size; it says so in words only."""

    reason = "message_too_large"


_BY_CODE: Mapping[str, type[ReportedError]] = {
    base.grpc_code: base
    for base in (
        InvalidInputError,
        NotFoundError,
        ConflictError,
        StateError,
        ExhaustedError,
        DeniedError,
        UnauthenticatedError,
        DeadlineError,
        UnavailableError,
    )
} | {"CANCELLED": UnavailableError}


def details_of(error: ReportedError, domain: str) -> bytes:
    """Serialised google.rpc.Status for `error`, the value of the trailing metadata DETAILS_KEY."""
    status = status_pb2.Status(code=_code(error).value[0], message=str(error)[:MAX_TEXT])
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=domain)
    for name, value in error.details.items():
        info.metadata[name] = value[:MAX_DETAIL_TEXT]
    info.metadata["retryable"] = "true" if error.retryable else "false"
    info.metadata["remedy"] = error.remedy[:MAX_TEXT]
    info.metadata["message"] = error.message[:MAX_TEXT]
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        status.details.add().Pack(_retry_info(error.retry_after_s))
    serialised: bytes = status.SerializeToString()
    return serialised


async def abort_with(
    context: "grpc.aio.ServicerContext[Any, Any]", error: ReportedError, domain: str
) -> NoReturn:
    """End the running RPC with the status of `error`."""
    await context.abort(
        _code(error), str(error)[:MAX_TEXT], ((DETAILS_KEY, details_of(error, domain)),)
    )
    raise AssertionError("abort returned")


def error_from_rpc(rpc_error: grpc.RpcError) -> ReportedError:
    """Rebuild the error a server raised; statuses without our details become the nearest class.

    The result is an instance of the base class for its code (StateError for every
    FAILED_PRECONDITION), with the original reason, message, remedy, retryable, details and
    retry_after_s.
    """
    # grpc.RpcError is an empty base: what is raised is always a call, with these methods.
    call: Any = rpc_error
    code = call.code().name
    info = error_details_pb2.ErrorInfo()
    if not _find_detail(call.trailing_metadata(), info):
        # Nobody's word: a deadline that passed on this side says that the peer did not answer, and
        # UNKNOWN that it ended without a status, as a balancer has it whose server is killed.
        text = f"{code}: {call.details() or 'no details'}"[:MAX_TEXT]
        if GRPC_TOO_LARGE in text:
            return MessageTooLargeError(text, "send less at once")
        base = UnavailableError if code in NO_ANSWER else _base(code)
        return base(text, "")
    base = _base(code)
    kind = type(
        base.__name__,
        (base,),
        {
            "reason": info.reason,
            "retryable": info.metadata.get("retryable") == "true",
            "__doc__": base.__doc__,
        },
    )
    error: ReportedError = kind(
        info.metadata.get("message", call.details()),
        info.metadata.get("remedy", ""),
        details={k: v for k, v in info.metadata.items() if k not in OUR_METADATA},
        retry_after_s=_retry_after_s(call.trailing_metadata()),
    )
    return error


class ReportedErrorInterceptor(CallInterceptor):
    """Turns a ReportedError raised by a servicer into its status, and anything else into INTERNAL.

    Attributes:
        domain: domain of ErrorInfo: "kvd" or "inference".
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Handler:
        """See CallInterceptor."""
        method = details.method
        wrap = self._streaming if handler.response_streaming else self._single
        return made_handler(
            wrap(method, behaviour_of(handler)),
            _reading(handler.request_deserializer),
            handler.response_serializer,
            takes_stream=handler.request_streaming,
            gives_stream=handler.response_streaming,
        )

    def _single(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            try:
                return await behaviour(_readable(request), context)
            except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
                await self._abort(method, context, error)

        return answer

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                responses = behaviour(_readable(request), context)
                if inspect.isawaitable(responses):  # health's Watch writes to the context itself
                    await responses
                    return
                async for response in responses:
                    yield response
            except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
                await self._abort(method, context, error)

        return answer

    async def _abort(self, method: str, context: Any, error: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):  # the servicer has ended the RPC itself
            raise error
        if not isinstance(error, ReportedError):
            from shared.process.log import (
                get_logger,  # late: clients, too, import this module, and log not
            )

            log = get_logger(__name__)
            log.error("rpc_failed", method=method, exc_info=error)
            error = InternalError("internal error", "see the log of the service")
        await abort_with(context, error, self.domain)


class _Unreadable:
    """Stands for a request whose bytes are no message: grpc itself would answer UNKNOWN."""


def _reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    def read(data: bytes) -> Any:
        assert deserialize is not None  # noqa: S101  # see below
        try:
            return deserialize(data)
        except DecodeError:
            return _Unreadable()

    return None if deserialize is None else read


def _readable(request: Any) -> Any:
    """Return the request, or the stream of requests, as it is; refuse what could not be read."""
    if isinstance(request, _Unreadable):
        raise InvalidInputError("the request is not a message", "send what the .proto file says")
    if isinstance(request, AsyncIterator):
        return _all_readable(request)
    return request


async def _all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _code(error: ReportedError) -> grpc.StatusCode:
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.grpc_code)
    return code


def _base(code: str) -> type[ReportedError]:
    return _BY_CODE.get(code, InternalError)


def _retry_info(retry_after_s: float) -> error_details_pb2.RetryInfo:
    delay_ns = int(min(max(0.0, retry_after_s), MAX_RETRY_S) * NS_PER_S)
    seconds, nanos = divmod(delay_ns, NS_PER_S)
    return error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))


def _retry_after_s(trailing_metadata: Any) -> float | None:
    info = error_details_pb2.RetryInfo()
    if not _find_detail(trailing_metadata, info):
        return None
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / NS_PER_S
    return min(max(0.0, delay_s), MAX_RETRY_S)


def _find_detail(trailing_metadata: Any, detail: Message) -> bool:
    """Fill `detail` from the first of its type in the status; False if there is none."""
    for key, value in trailing_metadata or ():
        if key == DETAILS_KEY:
            try:
                packed = status_pb2.Status.FromString(value).details
                return any(one.Unpack(detail) for one in packed)
            except DecodeError:  # not written by this module
                return False
    return False
