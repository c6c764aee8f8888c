"""The parts of the HTTP API that its handlers share."""

from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.bodies.body import FOREIGN, Body, ModelBody, TurnBody, decode
from inference_svc.http_api.dialect import ServedModel
from inference_svc.http_api.request_slots import JsonBody, RequestSlots
from inference_svc.http_api.requests import B, TurnRequest, caller_of
from inference_svc.http_api.sessions.answers import Answers
from inference_svc.http_api.sessions.background import BackgroundResponses
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.replicated_conversations import ReplicatedConversations
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.openai_settings import OpenAISettings
from inference_svc.service.gateway import Gateway
from shared.access.clients import ClientBook
from shared.access.identity import Identity

M = TypeVar("M", bound=Body)


@dataclass(frozen=True)
class Api:
    """The parts of the HTTP API; they live as long as the service.

    Attributes:
        settings: the section [openai].
        gateway: the service's gateway.
        model: the model that is served.
        token_text: makes the objects of tokens.
        store: stores histories, responses and chats of this server.
        completion: stores answers, and removes sessions.
        answers: starts turns.
        slots: bounds the requests at once.
        conversations: stored conversations, those of other servers included.
        background: background responses.
        book: the clients that may connect.
        own: identity of callers on the API's Unix socket.
        local: identity of callers from this machine at a port, as long as no clients are
            configured; None if they need an account.
    """

    settings: OpenAISettings
    gateway: Gateway
    model: ServedModel
    token_text: TokenText
    store: ApiStore
    completion: Completion
    answers: Answers
    slots: RequestSlots
    conversations: ReplicatedConversations
    background: BackgroundResponses
    book: ClientBook
    own: Identity
    local: Identity | None

    async def read(self, request: web.Request, kind: type[B]) -> TurnRequest[B]:
        """Read a request for a turn.

        Args:
            request: the request, which holds a slot.
            kind: the class of its path's body.

        Raises:
            ReportedError: the body does not arrive or is invalid, or the client may not use the
                tenant, or the model is not served.
        """
        caller = caller_of(request)
        data = await self.slots.read(request)
        body = self._decode(kind, data)
        chain = self.completion.chain(caller)
        parts = (request, caller, body, data.digest, chain, self.settings, self.gateway)
        turn_request = TurnRequest(*parts)
        key = turn_request.repeat_key
        if key is None:
            return turn_request
        created_s = await self.store.first_use(caller.tenant, key, turn_request.created_s)
        return replace(turn_request, created_s=created_s)

    async def read_body(self, request: web.Request, kind: type[M]) -> M:
        """Read the body of a request that asks for no turn.

        Raises:
            ReportedError: see `read`.
        """
        caller_of(request)
        return self._decode(kind, await self.slots.read(request))

    def _decode(self, kind: type[M], data: JsonBody) -> M:
        values = data.values
        if self.settings.foreign_parameters == "ignore":
            values = {name: value for name, value in values.items() if name not in FOREIGN}
            if issubclass(kind, TurnBody):
                values = kind.without_foreign(values)
        body = decode(kind, values)
        if isinstance(body, ModelBody) and body.model:
            self.model.check(body.model)
        return body
