"""Answers that are sent at once: objects and errors."""

from collections.abc import Mapping
from typing import Any

import structlog
from aiohttp import web

from inference_svc.openai.errors import error_headers, error_object, status_of
from inference_svc.openai.event_stream import json_bytes
from inference_svc.openai.requests import REQUEST_ID, SESSION
from shared.process.log import get_logger
from shared.serving.grpc_status import InternalError
from shared.types.errors import ReportedError

CLOSES = frozenset({401, 408, 413, 429})  # what is left of the body is not worth reading

log = get_logger(__name__)


def reply(data: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> web.Response:
    """An object."""
    return web.Response(body=json_bytes(data), content_type="application/json", headers=headers)


def refusal(error: ReportedError) -> web.Response:
    """An error, as OpenAI's clients know it."""
    status = status_of(error)
    structlog.contextvars.bind_contextvars(error=error.reason)
    response = web.Response(
        status=status,
        body=json_bytes({"error": error_object(error)}),
        content_type="application/json",
        headers=error_headers(error),
    )
    if status in CLOSES:
        response.force_close()
    return response


def answer_headers(session_id: str, request_id: str) -> dict[str, str]:
    """What a turn's answer says in headers; the request's log line says it, too."""
    structlog.contextvars.bind_contextvars(session=session_id, request_id=request_id)
    return {SESSION: session_id, REQUEST_ID: request_id}


def reported(error: Exception) -> ReportedError:
    """An error as it may be told; what nobody expected is logged, and told as that."""
    if isinstance(error, ReportedError):
        return error
    log.error("http_request_failed", exc_info=error)
    return InternalError("internal error", "see the log of the service")


def broken_stream(error: Exception) -> dict[str, Any]:
    """The error object of a stream that cannot go on.

    Raises:
        ConnectionError: there is nobody left to tell.
    """
    if isinstance(error, ConnectionError):
        raise error
    return error_object(reported(error))
