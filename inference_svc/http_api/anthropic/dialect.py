"""Anthropic's objects of errors and models. Pure.

`code`, the error's reason beside its type, is this service's own.

*Source:* Anthropic API reference, "Errors", "Models".
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from inference_svc.http_api.dialect import Dialect, ServedModel
from inference_svc.http_api.errors import RequestError, status_of
from shared.types.errors import ReportedError

VERSION = "anthropic-version"  # a header of every request of Anthropic's clients
THREAD = "thread"  # the member that asks to store a conversation under its answer's id
# With these details the official client sends its whole conversation instead, as others do.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ReportedError) -> dict[str, Any]:
    """Return the body of an error's response, which is also a stream's error event."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    kind = _TYPES.get(status, usual)
    error_object: dict[str, Any] = {"type": kind, "message": str(error), "code": error.reason}
    if isinstance(error, RequestError) and error.param == THREAD:
        error_object["details"] = _NO_THREADS
    return {"type": "error", "error": error_object, "request_id": None}


def _models(model: ServedModel) -> dict[str, Any]:
    return {
        "data": [_model(model, name) for name in model.names],
        "first_id": model.names[0],
        "last_id": model.names[-1],
        "has_more": False,
    }


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.context_window,
        "max_tokens": model.context_window,
    }


ANTHROPIC = Dialect(error_body, _models, _model)
