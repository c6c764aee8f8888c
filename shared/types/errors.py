"""The error tree of both processes.

    ReportedError                 base: one line, names the remedy; never instantiated itself
    ├── InvalidInputError         INVALID_ARGUMENT      exit 2    the caller's values are invalid
    ├── NotFoundError             NOT_FOUND             exit 3
    ├── ConflictError             ABORTED               exit 4    a conflict with another; try again
    ├── StateError                FAILED_PRECONDITION   exit 5    not possible in the current state
    ├── ExhaustedError            RESOURCE_EXHAUSTED    exit 6    full; try again later
    ├── DeniedError               PERMISSION_DENIED     exit 7
    ├── UnauthenticatedError      UNAUTHENTICATED       exit 7    the caller's identity is not known
    ├── DeadlineError             DEADLINE_EXCEEDED     exit 8    not done before the deadline
    ├── UnavailableError          UNAVAILABLE           exit 69   the peer is not there; try again
    │   └── LoadFailedError       a load that was under way will not complete
    └── ConfigError               FAILED_PRECONDITION   exit 78   the start was refused

A concrete error is a subclass with a `reason` slug. Those of one process are in its
`core/errors.py`. Answers of a lookup (hit, pending, miss) are never errors. Errors know their codes
outside; only `shared.serving.grpc_status` converts them to gRPC statuses and back.
"""

from collections.abc import Mapping
from typing import ClassVar


class ReportedError(Exception):
    """An error meant for the caller.

    Attributes:
        message: one line: what is wrong, with the offending value.
        remedy: one line: what to do about it.
        details: more facts for programs, by short names of our own.
        retry_after_s: seconds after which the same call is likely to succeed; None: not known.
    """

    reason: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    grpc_code: ClassVar[str] = "INTERNAL"  # a name of grpc.StatusCode, which is not imported here
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        remedy: str,
        *,
        details: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
        self.details: Mapping[str, str] = details or {}
        self.retry_after_s = retry_after_s


class InvalidInputError(ReportedError):
    """The caller's values are invalid; the same call can never succeed."""

    reason = "invalid_input"
    grpc_code = "INVALID_ARGUMENT"
    exit_code = 2


class NotFoundError(ReportedError):
    """The thing named by the call does not exist."""

    reason = "not_found"
    grpc_code = "NOT_FOUND"
    exit_code = 3


class ConflictError(ReportedError):
    """The call conflicts with another one; it may succeed later."""

    reason = "conflict"
    retryable = True
    grpc_code = "ABORTED"
    exit_code = 4


class StateError(ReportedError):
    """The call is not possible in the current state."""

    reason = "failed_precondition"
    grpc_code = "FAILED_PRECONDITION"
    exit_code = 5


class ExhaustedError(ReportedError):
    """A limit is reached; the same call may succeed later."""

    reason = "exhausted"
    retryable = True
    grpc_code = "RESOURCE_EXHAUSTED"
    exit_code = 6


class DeniedError(ReportedError):
    """The caller may not do this."""

    reason = "denied"
    grpc_code = "PERMISSION_DENIED"
    exit_code = 7


class UnauthenticatedError(ReportedError):
    """The caller's identity is not known. No answer says which part of its proof was wrong."""

    reason = "unauthenticated"
    grpc_code = "UNAUTHENTICATED"
    exit_code = 7


class DeadlineError(ReportedError):
    """The call did not complete before its caller's deadline."""

    reason = "deadline_exceeded"
    retryable = True
    grpc_code = "DEADLINE_EXCEEDED"
    exit_code = 8


class UnavailableError(ReportedError):
    """The peer is not there, or has gone during the call."""

    reason = "unavailable"
    retryable = True
    grpc_code = "UNAVAILABLE"
    exit_code = 69


class LoadFailedError(UnavailableError):
    """A load that was under way will not complete. The bytes read so far must not be used."""

    reason = "load_failed"


class ConfigError(ReportedError):
    """The start was refused: a setting, a path or a model is not usable."""

    reason = "config"
    grpc_code = "FAILED_PRECONDITION"
    exit_code = 78
