"""Errors of the HTTP API, and the HTTP status and headers of all errors.

The body of an error depends on the client's API: `openai/dialect.py`, `anthropic/dialect.py`.
Its message ends with the remedy, and its code is the error's reason.

InvalidInputError   invalid_value, unsupported_value, unknown_parameter, invalid_json,
                    previous_response_not_found, response_without_answer
NotFoundError       model_not_found, response_not_found, input_not_kept, conversation_not_found,
                    item_not_found, chat_not_found, unknown_url
StateError          history_unknown, response_not_complete
ExhaustedError      too_many_requests, conversations_full
DeadlineError       request_timeout
ReportedError       request_too_large, method_not_allowed

*Source:* OpenAI's and Anthropic's client libraries, which read `x-should-retry` and
`retry-after-ms`.
"""

import math
from collections.abc import Mapping

from shared.types.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
    StateError,
)

_STATUS_BY_CODE: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_STATUS_BY_REASON: Mapping[str, int] = {
    "request_too_large": 413,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "transcript_disk_full": 503,  # not 429: the client has used up no limit
    "no_chat_template": 400,  # not 409: no later request succeeds either
}


class RequestError(InvalidInputError):
    """A value of the request is invalid.

    Args:
        message: one line.
        remedy: what to send instead.
        param: the value's path in the body, as in "messages[2].content"; "" for the body itself.
    """

    reason = "invalid_value"

    def __init__(self, message: str, remedy: str, param: str = "") -> None:
        super().__init__(message, remedy)
        self.param = param


class UnsupportedValueError(RequestError):
    """A feature of OpenAI's API that this service lacks; it is never ignored silently."""

    reason = "unsupported_value"


class UnknownParameterError(RequestError):
    """A member of the body is unknown."""

    reason = "unknown_parameter"


class UnknownPreviousError(RequestError):
    """There is no response that a request could follow, or it is another tenant's."""

    reason = "previous_response_not_found"


class UnansweredResponseError(RequestError):
    """A response that a request follows was cancelled, or has failed: it has no answer."""

    reason = "response_without_answer"


class InvalidJsonError(RequestError):
    """The body is not a JSON object."""

    reason = "invalid_json"


class UnknownModelNameError(NotFoundError):
    """The service serves another model."""

    reason = "model_not_found"


class UnknownResponseError(NotFoundError):
    """There is no such response, or it is another tenant's."""

    reason = "response_not_found"


class InputNotKeptError(NotFoundError):
    """The input of a response is not stored, though the response is."""

    reason = "input_not_kept"


class UnknownConversationError(NotFoundError):
    """There is no such conversation, or it is another tenant's."""

    reason = "conversation_not_found"


class UnknownItemError(NotFoundError):
    """The conversation has no such item."""

    reason = "item_not_found"


class UnknownChatError(NotFoundError):
    """There is no such stored chat, or it is another tenant's."""

    reason = "chat_not_found"


class UnknownUrlError(NotFoundError):
    """Nothing is served at the path."""

    reason = "unknown_url"


class UnknownHistoryError(StateError):
    """The messages have another history than the session that the client named."""

    reason = "history_unknown"


class UnfinishedResponseError(StateError):
    """A background response has no answer yet."""

    reason = "response_not_complete"


class TooManyRequestsError(ExhaustedError):
    """More requests at once than the service takes."""

    reason = "too_many_requests"


class ConversationsFullError(ExhaustedError):
    """A tenant's conversations have reached their bound of bytes; waiting does not help."""

    reason = "conversations_full"
    retryable = False


class SlowRequestError(DeadlineError):
    """The body did not arrive in time."""

    reason = "request_timeout"


class RequestTooLargeError(ReportedError):
    """The body is larger than the service takes."""

    reason = "request_too_large"
    grpc_code = "INVALID_ARGUMENT"


class MethodNotAllowedError(ReportedError):
    """The path does not have the request's method."""

    reason = "method_not_allowed"
    grpc_code = "INVALID_ARGUMENT"


def unknown_response(response_id: str) -> UnknownResponseError:
    """Make the error of a response that the tenant does not have."""
    return UnknownResponseError(
        f"there is no response {response_id[:80]!r}",
        "check the id: a response is gone when it or its session is deleted",
    )


def unknown_previous(response_id: str) -> UnknownPreviousError:
    """Make the error of a request that follows a response which the tenant does not have."""
    return UnknownPreviousError(
        f"there is no response {response_id[:80]!r} to continue",
        "send the whole conversation as input",
        "previous_response_id",
    )


def unfinished_response(response_id: str) -> UnfinishedResponseError:
    """Make the error of a request that needs a background response before it has its answer."""
    return UnfinishedResponseError(
        f"the response {response_id[:80]!r} is not complete yet",
        "retrieve it until it is complete, or cancel it",
    )


def unanswered_response(response_id: str, *, is_cancelled: bool) -> UnansweredResponseError:
    """Make the error of a request that follows a response which ended without an answer."""
    ending = "was cancelled" if is_cancelled else "has failed"
    return UnansweredResponseError(
        f"the response {response_id[:80]!r} {ending}: it has no answer to continue",
        "follow the response before it, or send the whole conversation as input",
        "previous_response_id",
    )


def unknown_conversation(conversation_id: str) -> UnknownConversationError:
    """Make the error of a conversation that the tenant does not have."""
    return UnknownConversationError(
        f"there is no conversation {conversation_id[:80]!r}",
        "check the id, or create a conversation with POST /v1/conversations",
    )


_PATHS = (
    "use one of /v1/chat/completions, /v1/completions, /v1/responses, "
    "/v1/conversations, /v1/embeddings, /v1/messages and /v1/models"
)
_TEXT_ONLY = "the service reads and writes text only"
_NO_FILES = "the service stores no files: send the text itself"
_NO_BATCHES = "send the requests themselves, all at once: they are computed together"
_NO_STORES = "search where your texts are stored, and send what you found"
_NO_AGENTS = "run agents in the client: it calls /v1/responses, or /v1/messages, with tools"
_NO_TRAINING = "train the model elsewhere, and serve its directory"
_NO_ADMIN = (
    "tenants, clients and limits are set in inference-svc.toml; inference-svc top shows their use"
)
# Remedies for the paths of vendors' other products, by their first one or two parts.
_INSTEAD: Mapping[str, str] = {
    "agents": _NO_AGENTS,
    "assistants": _NO_AGENTS,
    "audio": _TEXT_ONLY,
    "batches": _NO_BATCHES,
    "chatkit": _NO_AGENTS,
    "containers": _NO_AGENTS,
    "dreams": _NO_AGENTS,
    "deployments": _NO_AGENTS,
    "deployment_runs": _NO_AGENTS,
    "environments": _NO_AGENTS,
    "evals": "run evaluations in the client, with the paths that are served",
    "files": _NO_FILES,
    "fine_tuning": _NO_TRAINING,
    "images": _TEXT_ONLY,
    "live": _TEXT_ONLY,
    "memory_stores": _NO_STORES,
    "messages/batches": _NO_BATCHES,
    "moderations": "the service has no moderation",
    "organization": _NO_ADMIN,
    "organizations": _NO_ADMIN,
    "projects": _NO_ADMIN,
    "realtime": _TEXT_ONLY,
    "sessions": _NO_AGENTS,
    "skills": _NO_AGENTS,
    "threads": "use /v1/conversations and /v1/responses",
    "uploads": _NO_FILES,
    "user_profiles": _NO_ADMIN,
    "vaults": _NO_ADMIN,
    "vector_stores": _NO_STORES,
    "videos": _TEXT_ONLY,
    "webhooks": "follow or retrieve responses: the service calls no webhooks",
}


def unknown_url(path: str) -> UnknownUrlError:
    """Make the error of a path where nothing is served; its remedy names what to use instead."""
    parts = path.removeprefix("/v1/").split("/")
    instead = _INSTEAD.get("/".join(parts[:2])) or _INSTEAD.get(parts[0]) or _PATHS
    return UnknownUrlError(f"nothing is served at {path[:80]!r}", instead)


def status_of(error: ReportedError) -> int:
    """Return the HTTP status of an error."""
    return _STATUS_BY_REASON.get(error.reason) or _STATUS_BY_CODE.get(error.grpc_code, 500)


def error_headers(error: ReportedError) -> dict[str, str]:
    """Return the headers that say whether, and when, the client may repeat the request."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(0, math.ceil(error.retry_after_s * 1000)))
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
