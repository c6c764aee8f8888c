"""POST /v1/chat/completions: its body, its handler, and the objects of its answer.

*Source:* OpenAI API reference, "Chat". `session_id` is this service's own, in body and answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

from aiohttp import web
from pydantic import Field, model_validator

from inference_svc.core.chat import Message, Tool, ToolCall
from inference_svc.core.grammar import Grammar
from inference_svc.core.tools.parts import (
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
    collect_answer,
)
from inference_svc.core.turn_record import AnswerToken, Finished, FinishReason
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Count, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import Effort, with_names
from inference_svc.http_api.bodies.formats import ChatFormat
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.choices import (
    Choices,
    Envelope,
    StreamOptions,
    check_choices,
    open_answers,
)
from inference_svc.http_api.openai.messages import (
    Messages,
    PredictionBody,
    check_end,
    stored_messages,
)
from inference_svc.http_api.openai.tools import ChatTools
from inference_svc.http_api.openai.turn_body import OpenAITurnBody
from inference_svc.http_api.replies import send_reply
from inference_svc.http_api.sessions.store import StoreUnavailableError
from inference_svc.http_api.sessions.stored_chats import StoredChat

CHAT = "chatcmpl-"  # prefix of the ids of chats

_TEXT_ONLY = "the service writes plain text only: leave it out"
_OLD_CALLS = "send functions as tools, in tools and tool_choice"
_NO_SEARCH = "the service does not search: offer the model a tool that does"


class ChatBody(OpenAITurnBody):
    """The body of POST /v1/chat/completions.

    Attributes:
        add_generation_prompt, continue_final_message: vLLM's parameters: whether the last message
            is the beginning of the answer.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAITurnBody.refused,
        "audio": Refused((), _TEXT_ONLY),
        "modalities": Refused((["text"],), _TEXT_ONLY),
        "verbosity": Refused(("medium",), "ask for it in a message"),
        "functions": Refused(([],), _OLD_CALLS),
        "function_call": Refused(("none", "auto"), _OLD_CALLS),
        "web_search_options": Refused((), _NO_SEARCH),
    }

    messages: Messages = Field(default=[], validate_default=True)
    tools: ChatTools = Field(default_factory=list)
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None  # its older name
    n: Count = 1
    logprobs: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ChatFormat | None = None
    reasoning_effort: Effort | None = None
    prediction: PredictionBody | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if self.response_format and self.structured_outputs:
            raise WrongMemberError(
                "{path} and response_format cannot be used together",
                "send one of them",
                "structured_outputs",
            )
        if self.top_logprobs and not self.logprobs:
            raise WrongMemberError(
                "{path} has no effect without logprobs", "send logprobs: true too", "top_logprobs"
            )
        check_choices(1, self.n)
        check_end(self.messages, self.add_generation_prompt, continues=self.continue_final_message)
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise WrongMemberError(
                "without add_generation_prompt the answer could not be told apart from the "
                "messages",
                "leave it out, or send continue_final_message: true to continue an answer",
                "add_generation_prompt",
                UnsupportedValueError,
            )
        return self

    @property
    def is_stored(self) -> bool:
        """Whether the client asked to store the chat; unlike responses, chats have no default."""
        return self.store and "store" in self.model_fields_set

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages, without one that is the beginning of the answer."""
        members = self.messages[:-1] if self.continue_final_message else self.messages
        return with_names(each.message for each in members)

    @property
    def beginning(self) -> str:
        """The client's own beginning of the answer; "" if it gives none."""
        return self.messages[-1].text if self.continue_final_message else ""

    @property
    def predicted(self) -> str:
        """The client's guess of most of the answer; "" if it gives none."""
        return self.prediction.text if self.prediction else ""

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort; None if the client gives none."""
        return self.reasoning_effort

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the client offers."""
        return tuple(each.tool for each in self.tools)

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer; None if the client gives no bound."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """Number of alternatives shown of each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to follow; None for free text."""
        return super().grammar if self.response_format is None else self.response_format.grammar


async def create_chat(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer a chat's last message with one or several choices."""
    turn_request = await api.read(request, ChatBody)
    body = turn_request.body
    turns = [turn_request.turn(body.conversation, choice=index) for index in range(body.n)]
    envelope = Envelope(
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        answer_id=CHAT + turn_request.chain.id_of("completion", turns[0].request_id),
        created=turn_request.created_s,
        model=body.model,
        fingerprint=api.model.fingerprint,
        includes_usage=body.stream_options.include_usage,
    )

    def choices() -> list["ChatChoice"]:
        return [
            ChatChoice(index, api.token_text, turn.reading, body.shown_logprobs)
            for index, turn in enumerate(turns)
        ]

    async def keep(whole: Mapping[str, Any], sessions: Sequence[str]) -> None:
        messages = stored_messages(whole["id"], body.messages)
        chat = StoredChat(whole, messages, body.metadata, sessions)
        with suppress(StoreUnavailableError):  # it was logged, and the answer does not need it
            await api.store.chats.keep(turn_request.caller.tenant, chat)

    async with open_answers(api.answers, turn_request.caller, turns) as answers:
        choices_reply = Choices(
            envelope, answers, choices, body.n, keep if body.is_stored else None
        )
        return await send_reply(turn_request, turns[0], choices_reply)


class ChatChoice:
    """Builds one choice of a chat completion; see `Choice`.

    Args:
        index: index of the choice.
        token_text: makes the objects of tokens.
        reading: how the answer is parsed.
        top_logprobs: number of alternatives of each token; None: no log-probabilities.
    """

    def __init__(
        self,
        index: int,
        token_text: TokenText,
        reading: Reading,
        top_logprobs: int | None = None,
    ) -> None:
        self._index = index
        self._token_text = token_text
        self._reader = reading.reader()
        self._top_logprobs = top_logprobs
        self._num_shown = 0  # number of calls that have begun

    @property
    def num_thought(self) -> int:
        """See Choice."""
        return self._reader.num_thought

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Build the whole choice."""
        read = collect_answer([*self._reader.push(tokens), *self._reader.end()])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": read.content if read.content or not read.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = list(map(_call_object, read.calls))
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": _finish_reason(finished, len(read.calls)),
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Build the first delta: the message's role."""
        yield self._delta({"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Build the deltas of the next tokens; log-probabilities go with the first of them."""
        deltas = self._deltas(self._reader.push(tokens))
        logprobs = self._logprobs(tokens)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._delta(delta, None, logprobs)
            logprobs = None

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Build the last deltas: held-back text, and the finish reason."""
        for delta in self._deltas(self._reader.end()):
            yield self._delta(delta, None)
        yield self._delta({}, _finish_reason(finished, self._reader.num_calls))

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Build the deltas of parts; a call's name and id come before its arguments."""
        return [delta for part in parts for delta in self._part_deltas(part)]

    def _part_deltas(self, part: Part) -> Iterator[dict[str, Any]]:
        if isinstance(part, CallBegun):
            self._num_shown += 1
            announced = _call_object(ToolCall(part.name, "", part.call_id))
            yield {"tool_calls": [{"index": self._num_shown - 1, **announced}]}
        elif isinstance(part, CallArguments):
            members = {"index": self._num_shown - 1, "function": {"arguments": part.text}}
            yield {"tool_calls": [members]}
        elif isinstance(part, Content):
            yield {"content": part.text}
        elif isinstance(part, Reasoning):
            yield {"reasoning_content": part.text}

    def _delta(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self._top_logprobs is None or not tokens:
            return None
        return {"content": self._token_text.rows(tokens, self._top_logprobs), "refusal": None}


def _call_object(call: ToolCall) -> dict[str, Any]:
    members = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": members}


def _finish_reason(finished: Finished, num_calls: int) -> str:
    """Return OpenAI's finish reason of an answer."""
    is_call = num_calls and finished.finish_reason == FinishReason.STOP
    return "tool_calls" if is_call else finished.finish_reason
