"""Serves the API beside gRPC, if there is an address for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.typedefs import Middleware

from inference_svc.config import InferenceSettings
from inference_svc.openai.answers import Answers
from inference_svc.openai.api import Api
from inference_svc.openai.app import ROLE, make_app
from inference_svc.openai.endings import Endings
from inference_svc.openai.remembered import Remembered
from inference_svc.openai.request_places import RequestPlaces
from inference_svc.openai.served_model import ServedModel
from inference_svc.openai.token_text import TokenText
from inference_svc.service.gateway import Front
from shared.access.addresses import is_unix
from shared.access.clients import ClientBook
from shared.access.credentials import ssl_context
from shared.access.identity import Identity, socket_identity
from shared.process.log import get_logger
from shared.serving.http_connections import ConnectionMetrics
from shared.serving.http_server import HttpServer

STOP_GRACE_S = 1.0  # for answers that are complete to reach their clients
SOCKET_NAME = "openai-socket"  # identity of whoever may open the Unix socket

log = get_logger(__name__)


@asynccontextmanager
async def serving_openai(
    settings: InferenceSettings,
    front: Front,
    tokenizer: Any | None,
    book: ClientBook,
    outer: Sequence[Middleware] = (),
    connections: ConnectionMetrics | None = None,
) -> AsyncIterator[None]:
    """Serve meanwhile.

    Args:
        settings: of the service.
        front: of the service.
        tokenizer: of the model.
        book: who may come in.
        outer: middlewares that see every request first.
        connections: where they are counted.

    Raises:
        ConfigError: the address, a file of TLS or the state directory cannot be used.
    """
    listen, tls = settings.openai.listen, settings.tls
    if not listen:
        yield
        return
    remembered = Remembered(settings.server.state_dir, settings.openai.max_remembered)
    try:
        endings = Endings(front, remembered, settings.openai.max_sessions)
        server = HttpServer(
            make_app(_api(settings, front, tokenizer, book, remembered, endings), outer),
            listen,
            ssl_context(tls) if tls.is_on and not is_unix(listen) else None,
            socket_group=settings.server.socket_group,
            name="openai",
            bounds=settings.openai.bounds,
            metrics=connections,
        )
        tidying = asyncio.create_task(endings.run())
        try:
            await server.start()
            log.info("openai_ready", listen=server.address)
            yield
        finally:
            await server.stop(STOP_GRACE_S)
            await _cancel(tidying)
    finally:
        remembered.close()


def _api(
    settings: InferenceSettings,
    front: Front,
    tokenizer: Any | None,
    book: ClientBook,
    remembered: Remembered,
    endings: Endings,
) -> Api:
    about = front.describe()
    model = ServedModel(
        about.name,
        settings.openai.aliases,
        about.fingerprint,
        int(time.time()),
        about.context_window,
    )
    own = _own(settings) if is_unix(settings.openai.listen) else None
    return Api(
        settings.openai,
        front,
        model,
        TokenText(tokenizer),
        remembered,
        endings,
        Answers(front, remembered, endings),
        RequestPlaces(settings.openai),
        book,
        own,
    )


def _own(settings: InferenceSettings) -> Identity:
    return socket_identity(SOCKET_NAME, settings.server.socket_tenants, {ROLE})


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})
