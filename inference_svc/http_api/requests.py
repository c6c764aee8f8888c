"""Requests for turns, of all APIs: their caller, their headers, and the turns they ask for."""

import time
import uuid
from dataclasses import dataclass, field, replace
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

PROJECT = "OpenAI-Project"  # request header that names the tenant
SESSION = "X-Session-Id"  # response header that names the session of the answer
REPEAT = "Idempotency-Key"
REQUEST_IDS = ("x-request-id", "request-id")  # read by OpenAI's and by Anthropic's clients
MAX_HEADER = 256  # characters of a header that the service reads

B = TypeVar("B", bound=TurnBody)


def caller_of(request: web.Request) -> Caller:
    """Return a request's client, and the tenant that it is for.

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
        RequestError: it is too long, or not printable ASCII.
    """
    value = request.headers.get(name, "")
    if len(value) > MAX_HEADER or not (value.isascii() and value.isprintable()):
        raise RequestError(
            f"the header {name} is not valid", f"send up to {MAX_HEADER} printable ASCII characters"
        )
    return value


@dataclass(frozen=True)
class TurnRequest(Generic[B]):
    """A decoded request for a turn, or for several, of any API.

    Attributes:
        request: aiohttp's request, for its headers.
        caller: the client and its tenant.
        body: the decoded body.
        digest: digest of the body's bytes.
        chain: makes the digests of the tenant's histories.
        settings: the section [openai].
        gateway: the service's gateway, which has the model's format of tool calls.
        created_s: Unix time in seconds when the first request under its idempotency key arrived;
            without a key, when it arrived itself.
    """

    request: web.Request
    caller: Caller
    body: B
    digest: bytes
    chain: HistoryChain
    settings: OpenAISettings
    gateway: Gateway
    created_s: int = field(default_factory=lambda: int(time.time()))

    def turn(
        self,
        messages: tuple[Message, ...],
        overflow: str = "",
        raw: TextInput | TokenInput | None = None,
        choice: int = 0,
    ) -> HttpTurn:
        """Return the turn of the request, or one of its several turns.

        Args:
            messages: the history and the new messages, or all messages after another response.
            overflow: name of the overflow policy; "" for the service's.
            raw: raw text or token ids in place of messages.
            choice: index of the turn among the request's turns.

        Raises:
            RequestError: a header is invalid, or does not go with the body.
        """
        chain, path, session_id = self.chain, self.request.path, self._session_name()
        if choice and session_id:
            raise RequestError(
                "several answers cannot continue the same session",
                "leave the session out",
                "session_id",
            )
        repeat = header_of(self.request, REPEAT)
        choice_names = (str(choice),) if choice else ()
        key = self._repeat_key(*choice_names)
        names = (path, repeat, self.digest.hex(), *choice_names) if repeat else (uuid.uuid4().hex,)
        request_id = "r-" + chain.id_of("request", *names)
        return HttpTurn(
            messages=self._without_unread_names(messages),
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
        """Digest of the request's idempotency key; None if there is none."""
        return self._repeat_key()

    def _repeat_key(self, *choice_names: str) -> bytes | None:
        """Return the digest of the idempotency key for one of the request's turns."""
        repeat = header_of(self.request, REPEAT)
        names = ("repeat", self.request.path, repeat, *choice_names)
        return bytes.fromhex(self.chain.id_of(*names)) if repeat else None

    def reading(self, request_id: str) -> Reading:
        """Return how a turn's answer is parsed; the ids of its calls depend on the turn's id."""
        call_id = self.chain.call_ids(request_id, self.body.call_prefix)
        gateway, body = self.gateway, self.body
        use, heads = body.tool_use, gateway.heads_of_calls(body.tool_use)
        return Reading(
            *(gateway.text.tool_format, use, call_id, gateway.text.thoughts, body.beginning, heads),
            is_bound=body.grammar is None and gateway.binds_calls(use),
        )

    def _without_unread_names(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Remove the names that the chat template does not read, so that they change no history."""
        read = self.gateway.text.named_roles | {TOOL}
        return tuple(
            replace(message, name="") if message.name and message.role not in read else message
            for message in messages
        )

    def _sampling(self, choice: int) -> dict[str, Any]:
        """Return the client's sampling values, with the grammar of a forced call.

        Raises:
            RequestError: the answer has to be a call, and has a format or a beginning, too.
        """
        sampling = self.body.sampling(self.settings.temperature, choice)
        use = self.body.tool_use
        if not use.is_forced:
            return sampling
        if self.body.beginning:
            raise RequestError(
                "an answer that continues a message cannot be a tool call",
                "leave out the beginning of the answer, or the tool_choice",
                "tool_choice",
            )
        if "grammar" in sampling:
            raise RequestError(
                "an answer with a format cannot be a tool call",
                "leave out the format, or the tool_choice",
                "tool_choice",
            )
        return sampling | {"grammar": self.gateway.text.grammar_of_call(use.callable_tools)}

    @property
    def hints(self) -> AgentHints:
        """The client's hints about its conversation and agent."""
        return hints_of(self.request.headers, self.body.cache_key)

    @property
    def _is_kept(self) -> bool:
        """Whether the session stays when the turn is over."""
        return self.body.store or self.settings.unstored == "reused"

    def _session_name(self) -> str:
        """Return the session that the client named, in a way that it may use; "" for none.

        Raises:
            RequestError: the session is not to be stored, or is a conversation's.
        """
        client, settings, hints = self.caller.identity.name, self.settings, self.hints
        name = self.body.session_id
        if not name and client in settings.named_by_header:
            name = hints.conversation
        if not name and client in settings.named_by_cache_key:
            name = hints.cache_key
        if name and not self._is_kept:
            raise RequestError(
                "a session is named, but store is false", "leave one of them out", "store"
            )
        if name.startswith(CONVERSATION):
            raise RequestError(
                f"session names that begin with {CONVERSATION} are reserved for conversations",
                "name another session, or send conversation with a response",
                "session_id",
            )
        return name
