"""POST /v1/chat/completions: its body, its handler, and the objects that it answers with.

*Source:* OpenAI API reference, "Chat"; beside it stands `session_id`, which the client may name.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from aiohttp import web
from pydantic import Field, model_validator

from inference_svc.core.answers import AnswerToken
from inference_svc.core.chat import Message
from inference_svc.core.grammar import Grammar
from inference_svc.core.turn_record import Finished
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies import Body, Count, Refused, WrongMemberError
from inference_svc.http_api.formats import ChatFormat
from inference_svc.http_api.openai.choices import Choices, Envelope, check_choices, opened
from inference_svc.http_api.openai.messages import Messages
from inference_svc.http_api.openai.turn_body import OpenAITurnBody
from inference_svc.http_api.replies import send_reply
from inference_svc.http_api.token_text import TokenText

_TEXT_ONLY = "the service writes plain text only: leave it out"
_NO_REASONING = "the model does not reason apart from its answer: leave it out"
_NO_TOOLS = "the service has no tools: leave it out"


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: whether it ends with a chunk that has the usage.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False


class ChatBody(OpenAITurnBody):
    """The body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAITurnBody.refused,
        "audio": Refused((), _TEXT_ONLY),
        "modalities": Refused((["text"],), _TEXT_ONLY),
        "verbosity": Refused(("medium",), "say it in a message"),
        "reasoning_effort": Refused(("none",), _NO_REASONING),
        "functions": Refused(([],), _NO_TOOLS),
        "function_call": Refused(("none", "auto"), _NO_TOOLS),
        "web_search_options": Refused((), _NO_TOOLS),
    }

    messages: Messages = Field(default=[], validate_default=True)
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None  # its older name
    n: Count = 1
    logprobs: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ChatFormat | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.response_format and self.structured_outputs:
            raise WrongMemberError(
                "{path} goes not with response_format", "send one of them", "structured_outputs"
            )
        if self.top_logprobs and not self.logprobs:
            raise WrongMemberError(
                "{path} is given without logprobs", "send logprobs: true, too", "top_logprobs"
            )
        check_choices(1, self.n)
        return self

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages as roles and texts."""
        return tuple(each.message for each in self.messages)

    @property
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer; None if the client does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """How many alternatives are shown of each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return super().grammar if self.response_format is None else self.response_format.grammar


async def create_chat(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer a chat's last message, once or several times."""
    turn_request = await api.read(request, ChatBody)
    body = turn_request.body
    turns = [turn_request.turn(body.conversation, choice=index) for index in range(body.n)]
    envelope = Envelope(
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        answer_id="chatcmpl-" + turn_request.chain.id_of("completion", turns[0].request_id),
        created=int(time.time()),
        model=body.model,
        fingerprint=api.model.fingerprint,
        includes_usage=body.stream_options.include_usage,
    )
    choices = [ChatChoice(index, api.token_text, body.shown_logprobs) for index in range(body.n)]
    async with opened(api.answers, turn_request.caller, turns) as answers:
        return await send_reply(turn_request, turns[0], Choices(envelope, answers, choices, body.n))


@dataclass(frozen=True)
class ChatChoice:
    """Makes one choice of a chat completion; see `Choice`.

    Attributes:
        index: of the choice.
        token_text: writes tokens.
        top_logprobs: how many alternatives of each token; None: no log-probabilities.
    """

    index: int
    token_text: TokenText
    top_logprobs: int | None = None

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Make the whole choice."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": finished.text,
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finished.finish_reason,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Make the first delta: whose message it is."""
        yield self._delta({"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Make the delta of the next tokens; none if they show nothing."""
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        if text or logprobs:
            yield self._delta({"content": text}, None, logprobs)

    def ending(self, finished: Finished) -> dict[str, Any]:
        """Make the last delta: why it ended."""
        return self._delta({}, finished.finish_reason)

    def _delta(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self.top_logprobs is None or not tokens:
            return None
        return {"content": self.token_text.rows(tokens, self.top_logprobs), "refusal": None}
