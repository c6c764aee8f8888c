"""Statuses and headers of errors, and their bodies in both APIs."""

import pytest

from inference_svc.core.errors import DrainingError, QueueFullError, SessionBusyError
from inference_svc.http_api.anthropic.dialect import error_body
from inference_svc.http_api.errors import (
    RequestError,
    RequestTooLargeError,
    SlowRequestError,
    TooManyRequestsError,
    UnknownModelNameError,
    error_headers,
    status_of,
)
from inference_svc.http_api.openai.dialect import error_object
from shared.access.identity import TenantDeniedError
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
def test_errors_in_openais_form(error, status, kind, code):
    """Status and object; the message has the remedy."""
    assert status_of(error) == status
    written = error_object(error)
    assert (written["type"], written["code"]) == (kind, code)
    assert written["message"] == "x: y"
    assert written["param"] == ("n" if isinstance(error, RequestError) else None)


def test_times_to_retry_at():
    """In whole seconds for all clients, in milliseconds for OpenAI's."""
    error = QueueFullError("x", "y", queue_length=3, retry_after_s=0.25)
    headers = error_headers(error)
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "250")
    assert headers["x-should-retry"] == "true"
    assert error_headers(RequestError("x", "y"))["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("x", "y", "n"), "invalid_request_error"),
        (UnauthenticatedError("x", "y"), "authentication_error"),
        (TenantDeniedError("x", "y"), "permission_error"),
        (UnknownModelNameError("x", "y"), "not_found_error"),
        (SlowRequestError("x", "y"), "timeout_error"),
        (SessionBusyError("x", "y"), "conflict_error"),
        (RequestTooLargeError("x", "y"), "request_too_large"),
        (TooManyRequestsError("x", "y"), "rate_limit_error"),
        (DrainingError("x", "y"), "overloaded_error"),
        (ReportedError("x", "y"), "api_error"),
    ],
)
def test_errors_in_anthropics_form(error, kind):
    """Type and message, which has the remedy; the reason is beside them."""
    body = error_body(error)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert (body["error"]["message"], body["error"]["code"]) == ("x: y", error.reason)
