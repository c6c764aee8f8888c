"""OpenAI's objects of errors and models. Pure.

*Source:* OpenAI API reference, "Error codes", "Models".
"""

from collections.abc import Mapping
from typing import Any

from inference_svc.http_api.dialect import Dialect, ServedModel
from inference_svc.http_api.errors import RequestError, status_of
from shared.types.errors import ReportedError

OWNER = "cachedattention"
_CODES: Mapping[str, str] = {  # OpenAI's codes, by our reasons, where they differ
    "unauthenticated": "invalid_api_key",
    "input_too_long": "context_length_exceeded",
    "rate_limited": "rate_limit_exceeded",
    "engine_failed": "server_error",
}
_TYPES: Mapping[int, str] = {
    403: "permission_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(error: ReportedError) -> dict[str, Any]:
    """Return the body of an error's response."""
    return {"error": error_object(error)}


def error_object(error: ReportedError) -> dict[str, Any]:
    """Return the object under "error" in the body."""
    status = status_of(error)
    return {
        "message": str(error),
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": (error.param or None) if isinstance(error, RequestError) else None,
        "code": _CODES.get(error.reason, error.reason),
    }


def _models(model: ServedModel) -> dict[str, Any]:
    return {"object": "list", "data": [_model(model, name) for name in model.names]}


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": OWNER,
        "fingerprint": model.fingerprint,
        "context_window": model.context_window,
    }


OPENAI = Dialect(error_body, _models, _model)
