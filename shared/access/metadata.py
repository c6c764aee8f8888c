"""Client interceptors that add `authorization: Bearer TOKEN` to each call.

gRPC has call credentials for this, which it refuses to send without TLS, to a loopback port too.
"""

from typing import Any

import grpc

AUTHORIZATION = "authorization"


class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """For synchronous channels."""

    def __init__(self, token: str) -> None:
        self._metadata = (AUTHORIZATION, f"Bearer {token}")

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._metadata]
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


class _AioToken:
    def __init__(self, token: str) -> None:
        self._metadata = (AUTHORIZATION, f"Bearer {token}")

    async def intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._metadata)
        return await continuation(details._replace(metadata=metadata), request)


# grpc.aio takes an interceptor of several kinds for one of the first kind only.
class _AioUnaryUnary(_AioToken, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary: Any = _AioToken.intercept


class _AioUnaryStream(_AioToken, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream: Any = _AioToken.intercept


class _AioStreamUnary(_AioToken, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary: Any = _AioToken.intercept


class _AioStreamStream(_AioToken, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream: Any = _AioToken.intercept


def aio_interceptors(token: str) -> list[Any]:
    """For channels of grpc.aio."""
    kinds = (_AioUnaryUnary, _AioUnaryStream, _AioStreamUnary, _AioStreamStream)
    return [kind(token) for kind in kinds]
