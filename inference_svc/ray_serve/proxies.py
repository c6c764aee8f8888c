"""Hooks in Ray's proxies: they keep gRPC errors unchanged, and read the session headers of agents.

They are named in a config, or in the environment of `ray start`:

    grpc_options:
      grpc_servicer_functions: [inference_svc.ray_serve.proxies.add_inference]

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=inference_svc.ray_serve.proxies.http_middlewares
"""

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from inference_svc.http_api.agents import hints_of
from inference_svc.ray_serve.forwarding import header_of
from inference_svc.ray_serve.session_server import SESSION_HEADER, SESSION_HEADER_VARIABLE
from shared.pb.inference.v1 import inference_pb2_grpc


def add_inference(servicer: Any, server: Any) -> None:
    """Register the service's RPCs at a proxy's gRPC server.

    Args:
        servicer: Ray's placeholder, which is never called.
        server: Ray's server, which sends calls to replicas.
    """
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, _Registering(server))


class _Registering:
    """A wrapper of a proxy's server, while a service is added to it."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Let Ray replace the handlers' behaviour by its own, then wrap that."""
        self._server.add_generic_rpc_handlers(handlers)
        (methods,) = handlers
        methods._method_handlers = {  # noqa: SLF001  # Ray itself replaces them in this way
            method: handler._replace(unary_stream=_without_status_message(handler.unary_stream))
            for method, handler in methods._method_handlers.items()  # noqa: SLF001
        }

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Register nothing: gRPC then uses the generic handlers."""


def _without_status_message(behaviour: Any) -> Any:
    """Drop the message that only carries a failed call's status: see `_set_failure`."""

    async def answer(request: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in behaviour(request, context):
            if not context.code():
                yield message

    return answer


def http_middlewares() -> list[Middleware]:
    """Return the middlewares that Ray's HTTP proxies run before they route a request."""
    return [Middleware(SessionHeaderMiddleware)]


class SessionHeaderMiddleware:
    """Middleware that copies an agent's session header to Ray's: see `http_api/agents.py`.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._header = os.environ.get(SESSION_HEADER_VARIABLE, SESSION_HEADER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the session header if the request has none, and call the next application."""
        if scope["type"] == "http":
            raw = scope["headers"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
            titled = {name.title(): value for name, value in headers.items()}
            session = hints_of(titled).conversation
            if session and not header_of(headers, self._header):
                added = (self._header.lower().encode(), session.encode())
                scope = {**scope, "headers": [*raw, added]}
        await self._app(scope, receive, send)
