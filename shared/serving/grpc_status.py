"""Conversion of our errors to gRPC statuses and back; the only place that does it.

A status carries google.rpc.ErrorInfo: `reason` (slug), `domain` ("kvd", "inference"), metadata
"retryable", "remedy", "message" and the error's own details. It carries google.rpc.RetryInfo, too,
if the error says when to try again. Servers install ReportedErrorInterceptor, so that servicers
simply raise. Clients pass the exception they caught to error_from_rpc.

*Source:* https://google.aip.dev/193 (errors).
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from shared.serving.grpc_handlers import CallInterceptor, Handler, behaviour_of, make_handler
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
MAX_TEXT = 1000  # of a message or remedy: trailing metadata is limited (8 KB by default)
MAX_DETAIL_TEXT = 100  # of a detail, for the same reason
MAX_RETRY_S = 86400.0  # later retry hints are cut to a day
GRPC_TOO_LARGE = "message larger than max"  # gRPC's words, on either side
NO_ANSWER = frozenset({DeadlineError.grpc_code, "UNKNOWN"})  # codes when the peer sent no status
OUR_METADATA = frozenset({"retryable", "remedy", "message"})  # all other keys are error details


class InternalError(ReportedError):
    """The peer failed unexpectedly."""

    reason = "internal"
    grpc_code = "INTERNAL"
    exit_code = 70


class MessageTooLargeError(InvalidInputError):
    """gRPC has refused to send or receive a message of this size. Only its text says so."""

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


def too_large(num_bytes: int, most_bytes: int) -> str:
    """Return the text with which gRPC refuses a message that is too large."""
    return f"{GRPC_TOO_LARGE}: {num_bytes} bytes instead of {most_bytes}"


def details_of(error: ReportedError, domain: str) -> bytes:
    """Serialise the google.rpc.Status of an error: the trailing metadata under DETAILS_KEY."""
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
    """Rebuild the error that a server raised. A status without our details gives the nearest class.

    The result is an instance of the base class for its code (StateError for every
    FAILED_PRECONDITION), with the original reason, message, remedy, retryable, details and
    retry_after_s.
    """
    # grpc.RpcError is an empty base class: what grpc raises is always a call with these methods.
    call: Any = rpc_error
    code = call.code().name
    info = error_details_pb2.ErrorInfo()
    if not _find_detail(call.trailing_metadata(), info):
        # The server has not sent this status. A deadline that passed on this side means that the
        # peer did not answer. UNKNOWN means that it ended without a status: a balancer reports
        # that when its server is killed.
        text = f"{code}: {call.details() or 'no details'}"[:MAX_TEXT]
        if GRPC_TOO_LARGE in text:
            return MessageTooLargeError(text, "send a smaller message")
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
    """Converts a ReportedError of a servicer to its status, and any other exception to INTERNAL.

    Attributes:
        domain: the domain of ErrorInfo: "kvd" or "inference".
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain

    def wrap(self, handler: Any, method: str) -> Handler:
        """See CallInterceptor."""
        wrap = self._streaming if handler.response_streaming else self._single
        check = _check_all_readable if handler.request_streaming else _check_readable
        return make_handler(
            wrap(method, behaviour_of(handler), check),
            _make_reader(handler.request_deserializer),
            handler.response_serializer,
            takes_stream=handler.request_streaming,
            gives_stream=handler.response_streaming,
        )

    def _single(self, method: str, behaviour: Any, check: Callable[[Any], Any]) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            try:
                return await behaviour(check(request), context)
            except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
                await self._abort(method, context, error)

        return answer

    def _streaming(self, method: str, behaviour: Any, check: Callable[[Any], Any]) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                responses = behaviour(check(request), context)
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
                get_logger,  # imported late, because clients import this module and do not log
            )

            log = get_logger(__name__)
            log.error("rpc_failed", method=method, exc_info=error)
            error = InternalError("internal error", "the log of the service says more")
        await abort_with(context, error, self.domain)


class _Unreadable:
    """A request whose bytes are no valid message. grpc itself would answer UNKNOWN."""


def _make_reader(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    def read(data: bytes) -> Any:
        assert deserialize is not None  # noqa: S101  # otherwise `read` is not returned
        try:
            return deserialize(data)
        except DecodeError:
            return _Unreadable()

    return None if deserialize is None else read


def _check_readable(request: Any) -> Any:
    """Return the request. Raise InvalidInputError if it is unreadable."""
    if isinstance(request, _Unreadable):
        raise InvalidInputError(
            "the request cannot be decoded", "send the message that the .proto file defines"
        )
    return request


async def _check_all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _check_readable(request)


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
    """Fill `detail` from the first one of its type in the status; return whether there is one."""
    for key, value in trailing_metadata or ():
        if key == DETAILS_KEY:
            try:
                details = status_pb2.Status.FromString(value).details
                return any(packed.Unpack(detail) for packed in details)
            except DecodeError:  # not written by this module
                return False
    return False
