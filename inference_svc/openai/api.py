"""What the handlers of the API stand on: its parts, and the served model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from inference_svc.openai.bodies import decode
from inference_svc.openai.errors import UnknownModelNameError
from inference_svc.openai.requests import B, RequestSlots, TurnRequest, caller_of
from inference_svc.openai.sessions.answers import Answers
from inference_svc.openai.sessions.completion import Completion
from inference_svc.openai.sessions.store import ApiStore
from inference_svc.openai.token_text import TokenText
from inference_svc.openai_settings import OpenAISettings
from inference_svc.service.gateway import Gateway
from shared.access.clients import ClientBook
from shared.access.identity import Identity

OWNER = "cachedattention"


@dataclass(frozen=True)
class ServedModel:
    """The one model that is served: what clients may call it, and what they see of it.

    Attributes:
        name: the model's own name.
        aliases: other names for it.
        fingerprint: the model's fingerprint.
        created_s: Unix time when the service started.
        context_window: most tokens of a context.
    """

    name: str
    aliases: tuple[str, ...]
    fingerprint: str
    created_s: int
    context_window: int

    def check(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            UnknownModelNameError: it is not served here.
        """
        if name != self.name and name not in self.aliases:
            raise UnknownModelNameError(
                f"the model {name[:80]!r} is not served here", f"use {self.name!r}"
            )

    def as_list(self) -> dict[str, Any]:
        """Answer GET /v1/models."""
        return {"object": "list", "data": [self.shown(name) for name in (self.name, *self.aliases)]}

    def shown(self, name: str) -> Mapping[str, Any]:
        """Answer GET /v1/models/NAME."""
        self.check(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created_s,
            "owned_by": OWNER,
            "fingerprint": self.fingerprint,
            "context_window": self.context_window,
        }


@dataclass(frozen=True)
class Api:
    """The parts of the API; they live as long as the service.

    Attributes:
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
        body = decode(kind, data.values)
        self.model.check(body.model)
        chain = self.completion.chain(caller)
        return TurnRequest(request, caller, body, data.digest, chain, self.settings)
