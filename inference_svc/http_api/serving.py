"""Serves the HTTP API beside gRPC, if there are addresses for it.

Each request goes through the same gates before its handler: errors are reported as the client's API
words them, the client is identified, and a slot is held. Another API is a module with a body,
objects and handlers, like `openai/chats.py`, and its routes here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from inference_svc.config import InferenceSettings
from inference_svc.core.errors import draining
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.anthropic.dialect import ANTHROPIC, VERSION
from inference_svc.http_api.anthropic.messages import count_tokens, create_message
from inference_svc.http_api.api import Api
from inference_svc.http_api.cross_origin import (
    answering_preflights,
    check_local,
    is_allowed,
    naming_origins,
)
from inference_svc.http_api.dialect import Dialect, ServedModel
from inference_svc.http_api.errors import MethodNotAllowedError, unknown_url
from inference_svc.http_api.openai.chats import create_chat
from inference_svc.http_api.openai.completions import create_completion
from inference_svc.http_api.openai.conversations import (
    add_items,
    create_conversation,
    delete_conversation,
    delete_item,
    list_items,
    show_conversation,
    show_item,
    update_conversation,
)
from inference_svc.http_api.openai.dialect import OPENAI
from inference_svc.http_api.openai.embeddings import create_embeddings
from inference_svc.http_api.openai.responses.compaction import compact_response
from inference_svc.http_api.openai.responses.responses import count_input_tokens, create_response
from inference_svc.http_api.openai.responses.stored_response import (
    cancel_response,
    delete_response,
    list_input_items,
    show_response,
)
from inference_svc.http_api.openai.stored_chats import (
    delete_chat,
    list_chat_messages,
    list_chats,
    show_chat,
    update_chat,
)
from inference_svc.http_api.replies import refusal, reply, reported
from inference_svc.http_api.request_slots import RequestSlots, expect_nothing_yet
from inference_svc.http_api.sessions.answers import Answers
from inference_svc.http_api.sessions.background import BackgroundResponses
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.http_api.tokens import detokenize, tokenize
from inference_svc.service.gateway import Gateway
from shared.access.addresses import is_unix
from shared.access.clients import ClientBook
from shared.access.credentials import ssl_context
from shared.access.identity import Identity, act_as, socket_identity
from shared.process.log import get_logger
from shared.serving.http_connections import ConnectionMetrics
from shared.serving.http_server import HttpServer, accepted_at, identity_of
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

ROLE = "client"
SERVER = "inference-svc"  # not aiohttp's and Python's versions
STOP_GRACE_S = 1.0  # for answers that are complete to reach their clients
ROOT, HEALTH = OPEN = ("/", "/health")  # for whoever asks
SOCKET_NAME = "openai-socket"  # identity of whoever may open the Unix socket
LOCAL_NAME = "local"  # identity of whoever is on this machine, with openai.local_clients

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = get_logger(__name__)


@asynccontextmanager
async def serving_openai(
    settings: InferenceSettings,
    gateway: Gateway,
    tokenizer: Any | None,
    book: ClientBook,
    outer: Sequence[Middleware] = (),
    connections: ConnectionMetrics | None = None,
) -> AsyncIterator[None]:
    """Serve the API inside the block, if there is an address for it.

    Args:
        settings: the service's settings.
        gateway: the service's gateway.
        tokenizer: the model's tokenizer; None: it has none.
        book: the clients that may connect.
        outer: middlewares that see every request first.
        connections: counts of connections.

    Raises:
        ConfigError: an address, a file of TLS or the state directory cannot be used.
    """
    listen, tls = settings.openai.listen, settings.tls
    if not listen:
        yield
        return
    store = ApiStore(
        settings.server.state_dir,
        settings.openai.max_remembered,
        settings.openai.kept_input_bytes,
        settings.openai.conversation_bytes,
        settings.openai.stored_chat_bytes,
    )
    try:
        api = _api(settings, gateway, tokenizer, book, store)
        has_port = not all(map(is_unix, listen))
        context = ssl_context(tls) if tls.is_on and has_port else None
        server = HttpServer(
            make_app(api, outer),
            {address: None if is_unix(address) else context for address in listen},
            socket_group=settings.server.socket_group,
            name="openai",
            bounds=settings.openai.bounds,
            metrics=connections,
        )
        gateway.on_deletion.append(partial(_forget, api))
        tidying = asyncio.create_task(api.completion.run())
        try:
            await server.start()
            log.info("openai_ready", listen=server.addresses)
            ports = [address for address in server.addresses if not is_unix(address)]
            if api.local is not None and not book.current and ports:
                log.warning("openai_local_clients_need_no_account", listen=ports)
            with gateway.turns.sessions.with_companion(api.conversations):
                yield
        finally:
            await server.stop(STOP_GRACE_S)
            await api.background.close()
            tidying.cancel()
            await asyncio.wait({tidying})
    finally:
        store.close()


async def _forget(api: Api, key: SessionKey) -> None:
    """Delete what is stored of a session that a client has deleted: it went with its session."""
    await api.store.forget_texts(key.tenant, key.session_id)
    await api.conversations.forget_session(key.tenant, key.session_id)


def _api(
    settings: InferenceSettings,
    gateway: Gateway,
    tokenizer: Any | None,
    book: ClientBook,
    store: ApiStore,
) -> Api:
    about, tenants = gateway.describe(), settings.server.socket_tenants
    completion = Completion(
        gateway.turns.sessions,
        gateway.model,
        store,
        settings.openai.max_sessions,
        settings.openai.subagent_idle_s,
    )
    answers = Answers(gateway, store, completion)
    return Api(
        settings=settings.openai,
        gateway=gateway,
        model=ServedModel(
            name=about.name,
            aliases=settings.openai.aliases,
            fingerprint=about.fingerprint,
            created_s=int(time.time()),
            context_window=about.context_window,
        ),
        token_text=TokenText(tokenizer),
        store=store,
        completion=completion,
        answers=answers,
        background=BackgroundResponses(answers, store, settings.openai.max_requests, reported),
        slots=RequestSlots(settings.openai),
        conversations=completion.conversations,
        book=book,
        own=socket_identity(SOCKET_NAME, tenants, {ROLE}),
        local=Identity(LOCAL_NAME, "loopback", tenants, frozenset({ROLE}))
        if settings.openai.local_clients
        else None,
    )


# ------------------------------------------------------------------------------- the application


async def _models(api: Api, request: web.Request) -> web.Response:
    return reply(_dialect(request).models(api.model))


async def _model(api: Api, request: web.Request) -> web.Response:
    name = request.match_info["id"]
    api.model.check(name)
    return reply(_dialect(request).model(api.model, name))


async def _root(_api: Api, _request: web.Request) -> web.Response:
    """Say who is there, as every header does; clients look whether anybody is."""
    return web.Response(text=f"{SERVER}: OpenAI's and Anthropic's API, at /v1\n")


async def _health(api: Api, _request: web.Request) -> web.Response:
    """Say whether requests are taken, and no more."""
    if api.gateway.turns.is_draining:
        raise draining()
    return reply({"status": "ok"})


Answer = Callable[[Api, web.Request], Awaitable[web.StreamResponse]]
# Every path that is served: its method, the path, what answers it.
ROUTES: Sequence[tuple[str, str, Answer]] = (
    ("POST", "/v1/chat/completions", create_chat),
    ("GET", "/v1/chat/completions", list_chats),
    ("GET", "/v1/chat/completions/{id}", show_chat),
    ("POST", "/v1/chat/completions/{id}", update_chat),
    ("DELETE", "/v1/chat/completions/{id}", delete_chat),
    ("GET", "/v1/chat/completions/{id}/messages", list_chat_messages),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/responses/compact", compact_response),
    ("POST", "/v1/responses/input_tokens", count_input_tokens),
    ("GET", "/v1/responses/{id}", show_response),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("POST", "/v1/responses/{id}/cancel", cancel_response),
    ("GET", "/v1/responses/{id}/input_items", list_input_items),
    ("POST", "/v1/conversations", create_conversation),
    ("GET", "/v1/conversations/{id}", show_conversation),
    ("POST", "/v1/conversations/{id}", update_conversation),
    ("DELETE", "/v1/conversations/{id}", delete_conversation),
    ("GET", "/v1/conversations/{id}/items", list_items),
    ("POST", "/v1/conversations/{id}/items", add_items),
    ("GET", "/v1/conversations/{id}/items/{item}", show_item),
    ("DELETE", "/v1/conversations/{id}/items/{item}", delete_item),
    ("POST", "/v1/completions", create_completion),
    ("POST", "/v1/embeddings", create_embeddings),
    ("POST", "/v1/messages", create_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{id:.+}", _model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", ROOT, _root),
    ("GET", HEALTH, _health),
)


def make_app(api: Api, outer: Sequence[Middleware] = ()) -> web.Application:
    """Build the application: its routes, and the gates before them.

    Args:
        api: the API's parts.
        outer: middlewares that see every request before ours.
    """
    app = web.Application(
        client_max_size=api.settings.max_body_bytes,
        middlewares=[
            *outer,
            _tell_refusals,
            _open_to_all,
            answering_preflights(api.settings.cors_origins),
            _authenticating(api),
            _admitting(api),
        ],
    )
    app.on_response_prepare.append(_name_server)
    app.on_response_prepare.append(naming_origins(api.settings.cors_origins))
    for method, path, answer in ROUTES:
        for each in (method, hdrs.METH_HEAD) if method == hdrs.METH_GET else (method,):
            app.router.add_route(
                each, path, partial(answer, api), expect_handler=expect_nothing_yet
            )
    return app


def _dialect(request: web.Request) -> Dialect:
    is_anthropic = request.path.startswith("/v1/messages") or VERSION in request.headers
    return ANTHROPIC if is_anthropic else OPENAI


@web.middleware
async def _tell_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Report every refusal and failure as the client's API words it."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # nobody is left to answer
    except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
        refused = _as_reported(request, error)
        return refusal(refused, _dialect(request).error_body(refused))


def _as_reported(request: web.Request, error: Exception) -> ReportedError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(
            f"{request.method[:20]} is not for this path",
            f"use {' or '.join(sorted(error.allowed_methods))}",
        )
    if isinstance(error, web.HTTPException):
        return unknown_url(request.path)
    return reported(error)


@web.middleware
async def _open_to_all(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer whoever asks, at a few paths: load balancers, and clients' probes, have no account."""
    if request.path in OPEN and request.match_info.http_exception is None:
        return await request.match_info.handler(request)
    return await handler(request)


def _admitting(api: Api) -> Middleware:
    """Make the gate that bounds the requests at once."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        with api.slots.taken(request):
            return await handler(request)

    return admit


def _authenticating(api: Api) -> Middleware:
    """Make the gate that identifies the client, before anything of a body is read or answered."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = identity_of(request, api.book.current, _own_identity(api, request))
        identity.check_role(ROLE)
        structlog.contextvars.bind_contextvars(client=identity.name)
        act_as(identity)
        return await handler(request)

    return authenticate


def _own_identity(api: Api, request: web.Request) -> Identity | None:
    """Return the identity of who needs no account where a request came in; None: it takes one.

    Raises:
        NotLocalError: it takes none from this machine, and the request may come from elsewhere.
    """
    if is_unix(accepted_at(request)):
        return api.own
    if api.local is None or api.book.current:
        return None
    headers, allowed = request.headers, api.settings.cors_origins
    origins = [one for one in headers.getall("Origin", ()) if not is_allowed(one, allowed)]
    check_local(request.remote or "", headers.getall("Host", ()), origins)
    return api.local


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
