"""What every request has in common: who sent it, its body, its headers, its slot.

So many requests are served at once, and no more, for each may hold a body. One whose body has not
come may lose its slot: when all are taken, and more than half of them wait for bodies of one
client, a request of another client takes that of the oldest of these. So whoever sends headers and
then nothing, again and again, leaves slots for everybody else, and whoever sends many whole
requests at once has as many slots as there are.
"""

import asyncio
import hashlib
import json
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import structlog
from aiohttp import HttpVersion11, hdrs, web

from inference_svc.core.chat import TOOL, Message
from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.http_api.agents import AgentHints, hints_of
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.bodies.body import TurnBody
from inference_svc.http_api.errors import (
    InvalidJsonError,
    RequestError,
    RequestTooLargeError,
    SlowRequestError,
    TooManyRequestsError,
    UnsupportedValueError,
)
from inference_svc.http_api.sessions.routing import Caller, HistoryChain, HttpTurn
from inference_svc.openai_settings import OpenAISettings
from inference_svc.service.gateway import Gateway
from shared.access.identity import current_identity

PROJECT = "OpenAI-Project"  # names the tenant
CONVERSATION = "conv_"  # what ids of conversations begin with, and names of their sessions
SESSION = "X-Session-Id"  # of a response: where it was answered
REPEAT = "Idempotency-Key"
REQUEST_IDS = ("x-request-id", "request-id")  # OpenAI's clients read one, Anthropic's the other
CONTINUE = "100-continue"
MAX_HEADER = 256  # characters of one of ours
RETRY_S = 1.0  # after a refusal

B = TypeVar("B", bound=TurnBody)


@dataclass(frozen=True)
class JsonBody:
    """A request's body.

    Attributes:
        values: the JSON object.
        digest: digest of the bytes.
    """

    values: dict[str, Any]
    digest: bytes


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


async def read_body(request: web.Request) -> JsonBody:
    """Read and decode a body; whoever calls bounds the time.

    Raises:
        RequestError: it is no JSON object, or it does not come as its headers say.
        RequestTooLargeError: it is larger than it may be: at once, if its headers say so.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedValueError("compressed bodies are not supported", "send it as it is")
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large()
    try:
        await _ask_for_body(request)
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except web.RequestPayloadError:  # its text, and its cause's, is what was sent
        raise RequestError(
            "the body ends early, or its chunks are broken", "send it again"
        ) from None
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return JsonBody(parse_object(data), digest)


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode the bytes of a body.

    Raises:
        InvalidJsonError: it is not a JSON object of Unicode text.
    """
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # escapes can write half a character, which is no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidJsonError(
            f"the body is not JSON ({reason:.120})", "send one JSON object in UTF-8"
        ) from error
    if not isinstance(found, dict):
        raise InvalidJsonError("the body is not a JSON object", "send one JSON object in UTF-8")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


async def expect_nothing_yet(request: web.Request) -> None:
    """Leave a client that waits for leave to send its body waiting, until it is known who asks.

    Raises:
        HTTPExpectationFailed: it expects something else.
    """
    if request.headers.get(hdrs.EXPECT, "").lower() != CONTINUE:
        raise web.HTTPExpectationFailed


async def _ask_for_body(request: web.Request) -> None:
    if request.version == HttpVersion11 and hdrs.EXPECT in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp does: the answer has not begun


def _too_large() -> RequestTooLargeError:
    return RequestTooLargeError(
        "the body is larger than the service takes", "send less, or raise openai.max_body_bytes"
    )


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
            *(gateway.tool_format, use, call_id, gateway.thoughts, body.beginning, heads),
            is_bound=body.grammar is None and gateway.binds_calls(use),
        )

    def _named(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return messages without names that nobody would read: they make no other history."""
        read = self.gateway.named_roles | {TOOL}
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
        return sampling | {"grammar": self.gateway.grammar_of_call(use.callable_tools)}

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


@dataclass(eq=False)
class _Slot:
    """The slot of one request.

    Attributes:
        request_id: Python's id of the request.
        client: name of the client that sent it.
        wait: bounds the time until its body has come; None once it has.
        is_lost: whether another client's request has it now.
    """

    request_id: int
    client: str
    wait: asyncio.Timeout | None = None
    is_lost: bool = False


class RequestSlots:
    """Holds the requests that are served at once; see the module docstring.

    Args:
        settings: the section [openai].
    """

    def __init__(self, settings: OpenAISettings) -> None:
        self._most = settings.max_requests
        self._body_s = settings.body_s
        self._taken: dict[int, _Slot] = {}  # by request_id
        # By client, of which there are as many as the settings name; the oldest first.
        self._unread: defaultdict[str, OrderedDict[_Slot, None]] = defaultdict(OrderedDict)

    @contextmanager
    def taken(self, request: web.Request) -> Iterator[None]:
        """Hold a slot for a request of the current client.

        Raises:
            TooManyRequestsError: there is none.
        """
        slot = _Slot(id(request), current_identity().name)
        if len(self._taken) >= self._most:
            self._take_unread(slot.client)
        self._taken[slot.request_id] = slot
        try:
            yield
        finally:
            self._taken.pop(slot.request_id, None)

    async def read(self, request: web.Request) -> JsonBody:
        """Wait for the body of a request that has a slot, and decode it.

        Raises:
            TooManyRequestsError: its slot was needed before the body came.
            SlowRequestError: it does not come.
            RequestError: it is off; see `read_body`.
        """
        slot = self._taken[id(request)]
        unread = self._unread[slot.client]
        unread[slot] = None
        try:
            async with asyncio.timeout(self._body_s) as slot.wait:
                return await read_body(request)
        except TimeoutError as error:
            if slot.is_lost:
                raise self._full(
                    f", most of them of {slot.client}, whose bodies have not come",
                    "send each with its request",
                ) from error
            raise SlowRequestError(
                f"the body did not come within {self._body_s:g} s", "send it at once"
            ) from error
        finally:
            unread.pop(slot, None)

    def _take_unread(self, client: str) -> None:
        """Free the slot of a request whose body has not come.

        Raises:
            TooManyRequestsError: it has to keep it.
        """
        most = max(self._unread, key=lambda name: len(self._unread[name]), default=client)
        if most == client or len(self._unread[most]) <= self._most // 2:
            raise self._full("", "come back")
        slot, _ = self._unread[most].popitem(last=False)
        slot.is_lost = True
        del self._taken[slot.request_id]
        assert slot.wait is not None, "what is unread is waited for"  # noqa: S101
        if not slot.wait.expired():
            slot.wait.reschedule(asyncio.get_running_loop().time())

    def _full(self, whose: str, remedy: str) -> TooManyRequestsError:
        message = f"{self._most} requests are under way{whose}"
        return TooManyRequestsError(message, remedy, retry_after_s=RETRY_S)
