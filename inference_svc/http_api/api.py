"""What the handlers of the API stand on: its parts."""

from dataclasses import dataclass
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
    """The parts of the API; they live as long as the service.

    Attributes:
        conversations: their stored ones, wherever these were made, and who changes one.
        background: responses that are computed while nobody waits.
        own: identity of callers on a Unix socket of the API.
        local: identity of callers from this machine at its ports, as long as there are no clients;
            None: they need an account.
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
            request: a request that holds a slot.
            kind: the class of bodies of its path.

        Raises:
            ReportedError: it does not come, or is off, or is for another tenant or model.
        """
        caller = caller_of(request)
        data = await self.slots.read(request)
        body = self._decode(kind, data)
        chain = self.completion.chain(caller)
        return TurnRequest(request, caller, body, data.digest, chain, self.settings, self.gateway)

    async def decoded(self, request: web.Request, kind: type[M]) -> M:
        """Read the body of a request that is for no turn.

        Raises:
            ReportedError: as `read`.
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
