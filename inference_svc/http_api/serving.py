"""The HTTP server: the API's parts, its routes, and the middlewares before them.

It is served beside gRPC, if the settings have addresses for it. Each request passes the same
middlewares before its handler: errors are reported in the format of the client's API, the client
is authenticated, and a slot is held. Another API needs a module with a body, objects and handlers,
like `openai/chats.py`, and its routes here.
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
    check_local,
    is_allowed,
    origin_headers,
    preflight_middleware,
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
from inference_svc.http_api.request_slots import RequestSlots, delay_continue
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
SERVER = "inference-svc"  # header Server: aiohttp's default discloses versions
STOP_GRACE_S = 1.0  # seconds at a stop for complete answers to reach their clients
ROOT, HEALTH = OPEN_PATHS = ("/", "/health")  # paths that need no account
SOCKET_NAME = "openai-socket"  # name of the identity of callers on the Unix socket
LOCAL_NAME = "local"  # name of the identity of local callers, with openai.local_clients

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
    """Serve the HTTP API inside the block, if the settings have an address for it.

    Args:
        settings: the service's settings.
        gateway: the service's gateway.
        tokenizer: the model's tokenizer; None if it has none.
        book: the clients that may connect.
        outer: middlewares that see every request first.
        connections: counts connections.

    Raises:
        ConfigError: an address, a TLS file or the state directory cannot be used.
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
        gateway.on_deletion.append(partial(_on_session_deleted, api))
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


async def _on_session_deleted(api: Api, key: SessionKey) -> None:
    """Delete what is stored of a deleted session: inputs, chats, its conversation."""
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
        background=BackgroundResponses(answers.open, store, settings.openai.max_requests, reported),
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
    """Name the service: clients probe this path."""
    return web.Response(text=f"{SERVER}: OpenAI's and Anthropic's API, at /v1\n")


async def _health(api: Api, _request: web.Request) -> web.Response:
    """Report whether the service takes requests; disclose nothing else, it needs no account."""
    if api.gateway.turns.is_draining:
        raise draining()
    return reply({"status": "ok"})


Answer = Callable[[Api, web.Request], Awaitable[web.StreamResponse]]
# All routes: method, path, handler.
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
    """Build the aiohttp application: its routes, and the middlewares before them.

    Args:
        api: the API's parts.
        outer: middlewares before the API's own.
    """
    app = web.Application(
        client_max_size=api.settings.max_body_bytes,
        middlewares=[
            *outer,
            _report_errors,
            _answer_open_paths,
            preflight_middleware(api.settings.cors_origins),
            _authentication_middleware(api),
            _slot_middleware(api),
        ],
    )
    app.on_response_prepare.append(_name_server)
    app.on_response_prepare.append(origin_headers(api.settings.cors_origins))
    for method, path, answer in ROUTES:
        for each in (method, hdrs.METH_HEAD) if method == hdrs.METH_GET else (method,):
            app.router.add_route(each, path, partial(answer, api), expect_handler=delay_continue)
    return app


def _dialect(request: web.Request) -> Dialect:
    is_anthropic = request.path.startswith("/v1/messages") or VERSION in request.headers
    return ANTHROPIC if is_anthropic else OPENAI


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Report every error in the format of the client's API."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
        refused = _as_reported(request, error)
        return refusal(refused, _dialect(request).error_body(refused))


def _as_reported(request: web.Request, error: Exception) -> ReportedError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(
            f"the method {request.method[:20]} is not possible on this path",
            f"use {' or '.join(sorted(error.allowed_methods))}",
        )
    if isinstance(error, web.HTTPException):
        return unknown_url(request.path)
    return reported(error)


@web.middleware
async def _answer_open_paths(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer the open paths before authentication: load balancers and probes have no account."""
    if request.path in OPEN_PATHS and request.match_info.http_exception is None:
        return await request.match_info.handler(request)
    return await handler(request)


def _slot_middleware(api: Api) -> Middleware:
    """Return the middleware that bounds the requests at once."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        with api.slots.hold(request):
            return await handler(request)

    return admit


def _authentication_middleware(api: Api) -> Middleware:
    """Return the middleware that authenticates the client, before its body is read."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = identity_of(request, api.book.current, _identity_without_account(api, request))
        identity.check_role(ROLE)
        structlog.contextvars.bind_contextvars(client=identity.name)
        act_as(identity)
        return await handler(request)

    return authenticate


def _identity_without_account(api: Api, request: web.Request) -> Identity | None:
    """Return the identity of callers without an account; None if the request needs an account.

    Raises:
        NotLocalError: only local callers need no account, and the request may not be local.
    """
    if is_unix(accepted_at(request)):
        return api.own
    if api.local is None or api.book.current:
        return None
    headers, allowed = request.headers, api.settings.cors_origins
    origins = [origin for origin in headers.getall("Origin", ()) if not is_allowed(origin, allowed)]
    check_local(request.remote or "", headers.getall("Host", ()), origins)
    return api.local


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
