"""The HTTP application: routes, and what is checked before each of them."""

from collections.abc import Awaitable, Callable, Sequence

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from inference_svc.openai.api import Api
from inference_svc.openai.chats import create_chat
from inference_svc.openai.errors import MethodNotAllowedError, UnknownUrlError
from inference_svc.openai.replies import refusal, reply, reported
from inference_svc.openai.requests import expect_nothing_yet
from inference_svc.openai.responses import create_response, delete_response, show_response
from shared.access.identity import act_as
from shared.serving.http_server import identity_of

ROLE = "client"
SERVER = "inference-svc"  # not aiohttp's and Python's versions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(api: Api, outer: Sequence[Middleware] = ()) -> web.Application:
    """Build the application.

    Args:
        api: its parts.
        outer: middlewares that see every request before ours.
    """
    app = web.Application(
        client_max_size=api.settings.max_body_bytes,
        middlewares=[*outer, _telling(), _authenticating(api), _admitting(api)],
    )
    app.on_response_prepare.append(_name_server)
    routes = app.router
    for path, create in (("chat/completions", create_chat), ("responses", create_response)):
        routes.add_post(f"/v1/{path}", _with(api, create), expect_handler=expect_nothing_yet)
    routes.add_get("/v1/responses/{id}", _with(api, show_response))
    routes.add_delete("/v1/responses/{id}", _with(api, delete_response))
    routes.add_get("/v1/models", _with(api, _models))
    routes.add_get("/v1/models/{id:.+}", _with(api, _model))
    return app


async def _models(api: Api, _request: web.Request) -> web.Response:
    return reply(api.model.as_list())


async def _model(api: Api, request: web.Request) -> web.Response:
    return reply(api.model.shown(request.match_info["id"]))


def _with(
    api: Api, handler: Callable[[Api, web.Request], Awaitable[web.StreamResponse]]
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(api, request)

    return handle


def _telling() -> Middleware:
    """Every refusal and failure is told as OpenAI's clients know it."""

    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            return refusal(
                MethodNotAllowedError(
                    f"{request.method[:20]} is not for this path",
                    f"use {' or '.join(sorted(error.allowed_methods))}",
                )
            )
        except web.HTTPException:
            return refusal(UnknownUrlError(f"nothing is served at {request.path[:80]!r}", _PATHS))
        except ConnectionError:
            raise  # nobody is there to be told
        except Exception as error:  # noqa: BLE001  # the edge: nothing above would report it
            return refusal(reported(error))

    return tell


_PATHS = "use /v1/chat/completions, /v1/responses or /v1/models"


def _admitting(api: Api) -> Middleware:
    """So many requests at once, and no more."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        with api.places.taken(request):
            return await handler(request)

    return admit


def _authenticating(api: Api) -> Middleware:
    """Nothing is read of a body, and nothing told, before it is known who asks."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = identity_of(request, api.book.current, api.own)
        identity.check_role(ROLE)
        structlog.contextvars.bind_contextvars(client=identity.name)
        act_as(identity)
        return await handler(request)

    return authenticate


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
