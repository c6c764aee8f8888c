"""Errors as OpenAI's clients know them."""

import pytest

from inference_svc.core.errors import QueueFullError, SessionBusyError
from inference_svc.http_api.errors import (
    RequestError,
    RequestTooLargeError,
    SlowRequestError,
    UnknownModelNameError,
    error_headers,
    error_object,
    status_of,
)
from shared.types.errors import ReportedError, UnauthenticatedError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("x", "y", "n"), 400, "invalid_request_error", "invalid_value"),
        (UnauthenticatedError("x", "y"), 401, "invalid_request_error", "invalid_api_key"),
        (UnknownModelNameError("x", "y"), 404, "invalid_request_error", "model_not_found"),
        (SlowRequestError("x", "y"), 408, "timeout_error", "request_timeout"),
        (SessionBusyError("x", "y"), 409, "conflict_error", "session_busy"),
        (RequestTooLargeError("x", "y"), 413, "invalid_request_error", "request_too_large"),
        (
            QueueFullError("x", "y", queue_length=3, retry_after_s=0.25),
            429,
            "rate_limit_error",
            "queue_full",
        ),
        (ReportedError("x", "y"), 500, "server_error", "error"),
    ],
)
def test_errors_as_openai_writes_them(error, status, kind, code):
    """Status and object; the message has the remedy."""
    assert status_of(error) == status
    written = error_object(error)
    assert (written["type"], written["code"]) == (kind, code)
    assert written["message"] == "x: y"
    assert written["param"] == ("n" if isinstance(error, RequestError) else None)


def test_when_to_come_back():
    """In whole seconds for everybody, in milliseconds for OpenAI's clients."""
    error = QueueFullError("x", "y", queue_length=3, retry_after_s=0.25)
    headers = error_headers(error)
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "250")
    assert headers["x-should-retry"] == "true"
    assert error_headers(RequestError("x", "y"))["x-should-retry"] == "false"
