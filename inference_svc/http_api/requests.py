"""What every request has in common: who sent it, its headers, the turn that it asks for."""

import uuid
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import structlog
from aiohttp import web

from inference_svc.core.chat import TOOL, Message
from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.http_api.agents import AgentHints, hints_of
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.bodies.body import TurnBody
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.sessions.history_chain import HistoryChain
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import CONVERSATION
from inference_svc.openai_settings import OpenAISettings
from inference_svc.service.gateway import Gateway
from shared.access.identity import current_identity

PROJECT = "OpenAI-Project"  # names the tenant
SESSION = "X-Session-Id"  # of a response: where it was answered
REPEAT = "Idempotency-Key"
REQUEST_IDS = ("x-request-id", "request-id")  # OpenAI's clients read one, Anthropic's the other
MAX_HEADER = 256  # characters of one of ours

B = TypeVar("B", bound=TurnBody)


def caller_of(request: web.Request) -> Caller:
    """Return who sent a request, and the tenant that it is for.

    Raises:
        TenantDeniedError: the client may not use that tenant.
    """
    identity = current_identity()
    tenant = identity.tenant(header_of(request, PROJECT))
    structlog.contextvars.bind_contextvars(tenant=tenant)
    return Caller(identity, tenant)


def header_of(request: web.Request, name: str) -> str:
    """Read a header of printable ASCII; "" if there is none.

    Raises:
        RequestError: it is something else.
    """
    value = request.headers.get(name, "")
    if len(value) > MAX_HEADER or not (value.isascii() and value.isprintable()):
        raise RequestError(
            f"the header {name} cannot be so", f"send up to {MAX_HEADER} printable ASCII characters"
        )
    return value


@dataclass(frozen=True)
class TurnRequest(Generic[B]):
    """A request for a turn that was read, whichever API it speaks.

    Attributes:
        request: aiohttp's request, for its headers.
        caller: who sent it, and for which tenant.
        body: its body, decoded.
        digest: digest of the body's bytes.
        chain: makes digests of the caller's histories.
        settings: the section [openai].
        gateway: knows how the model calls tools.
    """

    request: web.Request
    caller: Caller
    body: B
    digest: bytes
    chain: HistoryChain
    settings: OpenAISettings
    gateway: Gateway

    def turn(
        self,
        messages: tuple[Message, ...],
        overflow: str = "",
        raw: TextInput | TokenInput | None = None,
        choice: int = 0,
    ) -> HttpTurn:
        """Make the turn of the request, or one of several.

        Args:
            messages: all messages of the history and the new ones, or all after another response.
            overflow: the overflow policy's name; "" for the service's.
            raw: raw text or token ids, where there are no messages.
            choice: index of the turn among those of the request.

        Raises:
            RequestError: a header is off, or does not go with the body.
        """
        chain, path, session_id = self.chain, self.request.path, self._session_name()
        if choice and session_id:
            raise RequestError(
                "several answers cannot go on in one session", "leave the session out", "session_id"
            )
        repeat = header_of(self.request, REPEAT)
        which = (str(choice),) if choice else ()
        key = self._repeat_key(*which)
        names = (path, repeat, self.digest.hex(), *which) if repeat else (uuid.uuid4().hex,)
        request_id = "r-" + chain.id_of("request", *names)
        return HttpTurn(
            messages=self._named(messages),
            sampling=self._sampling(choice),
            session_id=session_id,
            is_kept=self._is_kept,
            overflow=overflow,
            request_id=request_id,
            body=self.digest,
            repeat_key=key,
            raw=raw,
            reading=self.reading(request_id),
            is_final=self.hints.is_final,
            is_subagent=self.hints.is_subagent,
            retention=self.body.retention,
            arguments=self.body.template_arguments,
            prediction=self.body.predicted,
        )

    @property
    def repeat_key(self) -> bytes | None:
        """Digest of its idempotency key; None if there is none."""
        return self._repeat_key()

    def _repeat_key(self, *which: str) -> bytes | None:
        """Return the digest of the idempotency key of one of its turns."""
        repeat = header_of(self.request, REPEAT)
        names = ("repeat", self.request.path, repeat, *which)
        return bytes.fromhex(self.chain.id_of(*names)) if repeat else None

    def reading(self, request_id: str) -> Reading:
        """Return how the answer of a turn is read; the ids of its calls follow from the turn's."""
        call_id = self.chain.call_ids(request_id, self.body.call_prefix)
        gateway, body = self.gateway, self.body
        use, heads = body.tool_use, gateway.heads_of_calls(body.tool_use)
        return Reading(
            *(gateway.text.tool_format, use, call_id, gateway.text.thoughts, body.beginning, heads),
            is_bound=body.grammar is None and gateway.binds_calls(use),
        )

    def _named(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return messages without names that nobody would read: they make no other history."""
        read = self.gateway.text.named_roles | {TOOL}
        return tuple(
            replace(one, name="") if one.name and one.role not in read else one for one in messages
        )

    def _sampling(self, choice: int) -> dict[str, Any]:
        """Return the client's sampling values; an answer that has to be a call has its grammar."""
        sampling = self.body.sampling(self.settings.temperature, choice)
        use = self.body.tool_use
        if not use.is_forced:
            return sampling
        if self.body.beginning:
            raise RequestError(
                "an answer that is begun cannot be a call",
                "leave its beginning out, or the choice of a tool",
                "tool_choice",
            )
        if "grammar" in sampling:
            raise RequestError(
                "an answer cannot have a format and be a call",
                "leave the format out, or the choice of a tool",
                "tool_choice",
            )
        return sampling | {"grammar": self.gateway.text.grammar_of_call(use.callable_tools)}

    @property
    def hints(self) -> AgentHints:
        """What the client says of the conversation that it belongs to."""
        return hints_of(self.request.headers, self.body.cache_key)

    @property
    def _is_kept(self) -> bool:
        """Whether the session stays when the turn is over."""
        return self.body.store or self.settings.unstored == "reused"

    def _session_name(self) -> str:
        """Return the session that the client named, in one of the ways it may; "" for none."""
        client, settings, hints = self.caller.identity.name, self.settings, self.hints
        name = self.body.session_id
        if not name and client in settings.named_by_header:
            name = hints.conversation
        if not name and client in settings.named_by_cache_key:
            name = hints.cache_key
        if name and not self._is_kept:
            raise RequestError(
                "a session is named that is not to be stored", "leave one out", "store"
            )
        if name.startswith(CONVERSATION):
            raise RequestError(
                f"names that begin with {CONVERSATION} are those of conversations",
                "name another session, or in a response the conversation",
                "session_id",
            )
        return name
