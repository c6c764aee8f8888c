"""/v1/responses: a turn by its own id, which the next one may follow."""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from aiohttp import web
from pydantic import BeforeValidator, Field, model_validator

from inference_svc.core.answers import AnswerToken
from inference_svc.core.chat import SYSTEM, TOOL, Message, Tool, ToolCall, canonical
from inference_svc.core.grammar import Grammar
from inference_svc.core.truncation import OLDEST, REJECT
from inference_svc.core.turn_record import Finished, TurnRecord
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Body, Count, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import with_names
from inference_svc.http_api.bodies.formats import FlatFormat
from inference_svc.http_api.bodies.template import Effort
from inference_svc.http_api.errors import RequestError, UnsupportedValueError, unknown_response
from inference_svc.http_api.openai.responses.input_items import InputItems, messages_of, objects_of
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.openai.tools import FUNCTION, NAMESPACE, ResponseTools
from inference_svc.http_api.openai.turn_body import OpenAITurnBody
from inference_svc.http_api.replies import OneAnswer, reply, send_reply
from inference_svc.http_api.requests import TurnRequest, caller_of
from inference_svc.http_api.sessions.lookup import ResponseInfo, StoredResponse
from inference_svc.http_api.sessions.routing import Caller, HttpTurn
from inference_svc.openai_settings import OpenAISettings
from shared.types.errors import NotFoundError

LOGPROBS = "message.output_text.logprobs"  # of `include`
REASONING = "reasoning.encrypted_content"  # likewise: there is none, what is thought is readable
MAX_INPUT_BYTES = 256 * 1024  # of one input: what is longer is not kept
MAX_KEPT = 16384  # characters of instructions, or tools, that GET shows again


class TextOptions(Body):
    """Options of the text that is written."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "verbosity": Refused(("medium",), "say it in a message"),
    }

    format: FlatFormat | None = None


class ReasoningOptions(Body):
    """How the model is to think."""

    content_words: ClassVar[str] = "effort"
    ignored: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "summary"})

    effort: Effort | None = None


class ResponseStreamOptions(Body):
    """Options of a stream; none of them changes anything."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


def _include(given: Any) -> Any:
    try:
        check_included(given if isinstance(given, list) else ())
    except UnsupportedValueError as error:
        raise WrongMemberError(error.message, error.remedy, kind=type(error)) from error
    return given


def check_included(names: Iterable[object]) -> None:
    """Refuse what is not there to be shown beside a response.

    Raises:
        UnsupportedValueError: naming the first.
    """
    for name in names:
        if name not in (LOGPROBS, REASONING):  # whatever a client sends need not be hashable
            raise UnsupportedValueError(
                f"include {str(name)[:60]!r} is not supported", f"send {LOGPROBS!r} only", "include"
            )


class ResponseBody(OpenAITurnBody):
    """The body of POST /v1/responses.

    Attributes:
        instructions: lead the conversation, as its system message.
        previous_response_id: id of the response that this one follows; "" if it follows none.
        include: names of what is shown beside the answer.
        truncation: OpenAI's name of the overflow policy; "": the service's.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAITurnBody.refused,
        "background": Refused((False,), "keep the connection open while it is answered"),
        "background_options": Refused((), "leave it out"),
        "access_programs": Refused((), "leave it out"),
        "image": Refused((), "the service reads text only"),
        "conversation": Refused((), "use previous_response_id"),
        "prompt": Refused((), "send instructions and input"),
        "context_management": Refused(
            ([],), "the service's [overflow] settings say what is dropped"
        ),
    }
    ignored: ClassVar[frozenset[str]] = OpenAITurnBody.ignored | {"client_metadata"}

    tool_kinds: ClassVar[frozenset[str]] = frozenset({FUNCTION, NAMESPACE})

    input: InputItems = Field(default=None, validate_default=True)
    tools: ResponseTools = Field(default_factory=list)
    instructions: str = ""
    previous_response_id: str = ""
    max_output_tokens: Count | None = None
    include: Annotated[list[str], BeforeValidator(_include)] = Field(default_factory=list)
    truncation: Literal["", "auto", "disabled"] = ""
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream_options: ResponseStreamOptions = ResponseStreamOptions()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.previous_response_id and self.session_id:
            raise WrongMemberError(
                "both {path} and a session are named",
                "name one of them: a response belongs to a session",
                "previous_response_id",
            )
        return self

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The input alone."""
        return messages_of(self.input)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """Instructions and input."""
        leading = (Message(SYSTEM, self.instructions),) if self.instructions else ()
        return (*leading, *self.new_messages)

    @property
    def effort(self) -> Effort | None:
        """How much the model is to think; None if the client does not say."""
        return self.reasoning.effort

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the client offers."""
        return tuple(tool for each in self.tools for tool in each.offered())

    @property
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer; None if the client does not say."""
        return self.max_output_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """How many alternatives are shown of each token; None: no log-probabilities."""
        is_asked = LOGPROBS in self.include or self.top_logprobs is not None
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return super().grammar if self.text.format is None else self.text.format.grammar

    def overflow(self, default: str) -> str:
        """Return OpenAI's word of truncation as a policy's name; "" for the default one."""
        if self.truncation == "disabled":
            return REJECT
        return OLDEST if self.truncation == "auto" and default == REJECT else ""


async def create_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer an input, as the next turn after another response or as the first."""
    turn_request = await api.read(request, ResponseBody)
    previous = None
    calls: tuple[ToolCall, ...] = ()
    caller, previous_id = turn_request.caller, turn_request.body.previous_response_id
    if previous_id:
        previous = await find_stored(api, caller, previous_id)
        _check_instructions(turn_request, previous)
        if any(message.role == TOOL for message in turn_request.body.new_messages):
            record, reading = await recorded_turn(api, caller, previous_id, previous)
            calls = reading.whole(record.text).calls
    turn, info = _turn(turn_request, previous, calls, api.gateway.defaults.overflow.name)
    async with await api.answers.open(caller, turn) as answer:
        objects = ResponseObjects(
            response_id=turn.response_id,
            session_id=answer.session_id,
            info=info,
            token_text=api.token_text,
            reading=turn.reading,
            top_logprobs=turn_request.body.shown_logprobs,
        )
        return await send_reply(turn_request, turn, OneAnswer(answer, objects))


async def show_response(api: Api, request: web.Request) -> web.Response:
    """Show a response that was stored."""
    caller, response_id = caller_of(request), request.match_info["id"]
    if request.query.get("stream", "false") == "true":
        raise RequestError("a stored response cannot be streamed", "leave stream out", "stream")
    stored = await find_stored(api, caller, response_id)
    record, reading = await recorded_turn(api, caller, response_id, stored)
    at = stored.at
    finished = Finished(record.finish_reason, record.text, record.usage, at.turns)
    objects = ResponseObjects(response_id, at.session_id, stored.info, api.token_text, reading)
    tokens = list(map(AnswerToken, record.output_ids, record.pieces))
    return reply(objects.whole(tokens, finished))


async def delete_response(api: Api, request: web.Request) -> web.Response:
    """Forget a response; its session goes with the last one, if nobody named it."""
    caller, response_id = caller_of(request), request.match_info["id"]
    stored = await find_stored(api, caller, response_id)
    session_id = stored.at.session_id
    others = await api.store.count_responses(caller.tenant, session_id) - 1
    if not others and not stored.at.is_named:  # first what may be refused: a turn may be under way
        with suppress(NotFoundError):
            key = api.gateway.key(caller.identity, caller.tenant, session_id)
            await api.gateway.delete_session(key)
    await api.store.forget_response(caller.tenant, response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


def most_kept(settings: OpenAISettings) -> int:
    """Return the bytes of the longest input that is kept."""
    return min(MAX_INPUT_BYTES, settings.kept_input_bytes)


async def find_stored(api: Api, caller: Caller, response_id: str) -> StoredResponse:
    """Look the caller's response up.

    Raises:
        UnknownResponseError: it has none of that id.
    """
    is_ours = response_id.isascii() and response_id.startswith("resp_")
    stored = await api.store.find_response(caller.tenant, response_id) if is_ours else None
    if stored is None:
        raise unknown_response(response_id)
    return stored


async def recorded_turn(
    api: Api, caller: Caller, response_id: str, stored: StoredResponse
) -> tuple[TurnRecord, Reading]:
    """Return the turn of a stored response, and how its answer is read.

    Raises:
        UnknownResponseError: its session is gone.
    """
    at = stored.at
    try:
        key = api.gateway.key(caller.identity, caller.tenant, at.session_id)
        session, _ = await api.gateway.turns.sessions.get(key)
    except NotFoundError as error:
        raise unknown_response(response_id) from error
    record = session.turns[at.turns - 1] if len(session.turns) >= at.turns else None
    if record is None or record.request_id != at.request_id:
        raise unknown_response(response_id)
    call_id = api.completion.chain(caller).call_ids(at.request_id)
    gateway = api.gateway
    use = stored.info.tool_use
    return record, Reading(gateway.tool_format, use, call_id, gateway.thoughts)


def _check_instructions(turn_request: TurnRequest[ResponseBody], previous: StoredResponse) -> None:
    """Check that a session keeps the instructions that it began with.

    Raises:
        RequestError: others are given.
    """
    instructions = turn_request.body.instructions
    digest = turn_request.chain.id_of("instructions", instructions)
    if instructions and digest != previous.info.instructions_digest:
        raise RequestError(
            "these instructions are not those of the conversation",
            "leave them out to go on with it, or send the conversation as input",
            "instructions",
        )


def _turn(
    turn_request: TurnRequest[ResponseBody],
    previous: StoredResponse | None,
    calls: tuple[ToolCall, ...],
    overflow: str,
) -> tuple[HttpTurn, ResponseInfo]:
    """Make the turn of a request, and the stored information about its response.

    Args:
        turn_request: the request.
        previous: the response that it follows; None: it begins a conversation.
        calls: what that one called, if any of the input is what tools returned.
        overflow: name of the overflow policy of turns that name none.
    """
    body, chain = turn_request.body, turn_request.chain
    messages = with_names(body.new_messages, calls) if previous else body.conversation
    turn = turn_request.turn(messages, body.overflow(overflow))
    is_long = len(canonical(body.offered)) > MAX_KEPT
    brought = json.dumps(objects_of(body.input), ensure_ascii=False) if body.store else ""
    input_bytes = len(brought.encode())
    info = ResponseInfo(
        created_s=int(time.time()),
        model=body.model,
        instructions=body.instructions[:MAX_KEPT],
        instructions_digest=chain.id_of("instructions", body.instructions),
        previous_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=turn.sampling["temperature"],
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation="disabled" if (turn.overflow or overflow) == REJECT else "auto",
        is_kept=body.store,
        top_logprobs=body.shown_logprobs or 0,
        metadata=body.metadata,
        text_format={"type": "text"} if body.text.format is None else body.text.format.shown,
        tools=[each.shown(is_long=is_long) for each in body.tools],
        tool_choice=body.shown_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        input_bytes=input_bytes,
        effort=body.effort,
    )
    if previous is not None and not body.instructions:
        info = replace(
            info,
            instructions=previous.info.instructions,
            instructions_digest=previous.info.instructions_digest,
        )
    response_id = "resp_" + chain.id_of("response", turn.request_id)
    stored = info if body.store else None
    if input_bytes > most_kept(turn_request.settings):
        brought = ""
    turn = replace(turn, previous=previous, response_id=response_id, info=stored, brought=brought)
    return turn, info
