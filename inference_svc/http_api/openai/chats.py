"""POST /v1/chat/completions: its body, its handler, and the objects that it answers with.

*Source:* OpenAI API reference, "Chat"; beside it stands `session_id`, which the client may name.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from aiohttp import web
from pydantic import BeforeValidator, Field, model_validator

from inference_svc.core.answers import MAX_BIAS, MAX_BIASED_TOKENS, MAX_PENALTY, AnswerToken
from inference_svc.core.turn_record import Finished, Started, Usage
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies import Body, Count, Refused, WrongMemberError
from inference_svc.http_api.conversation import Message
from inference_svc.http_api.openai.dialect import error_body
from inference_svc.http_api.openai.messages import Messages
from inference_svc.http_api.openai.turn_body import OpenAITurnBody
from inference_svc.http_api.replies import send_answer
from inference_svc.http_api.token_text import TokenText
from shared.types.errors import ReportedError

_TEXT_ONLY = "the service writes plain text only: leave it out"
_NO_REASONING = "the model does not reason apart from its answer: leave it out"
_NO_TOOLS = "the service has no tools: leave it out"
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: whether it ends with a chunk that has the usage.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False


def _by_token(given: Any) -> Any:
    """Read the names of a bias as token ids: in JSON they are texts."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_BIASED_TOKENS or not all(map(_TOKEN_ID.fullmatch, given)):
        raise WrongMemberError(
            "{path} cannot be so",
            f'send ids of at most {MAX_BIASED_TOKENS} tokens, as in {{"50256": -100}}',
        )
    return {int(name): bias for name, bias in given.items()}


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class ChatBody(OpenAITurnBody):
    """The body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAITurnBody.refused,
        "n": Refused((1,), "send the request several times: the history is computed once"),
        "audio": Refused((), _TEXT_ONLY),
        "modalities": Refused((["text"],), _TEXT_ONLY),
        "response_format": Refused(({"type": "text"},), _TEXT_ONLY),
        "verbosity": Refused(("medium",), "say it in a message"),
        "reasoning_effort": Refused(("none",), _NO_REASONING),
        "functions": Refused(([],), _NO_TOOLS),
        "function_call": Refused(("none", "auto"), _NO_TOOLS),
        "web_search_options": Refused((), _NO_TOOLS),
    }

    messages: Messages = Field(default=[], validate_default=True)
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None  # its older name
    logprobs: bool = False
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_by_token)] = Field(default_factory=dict)
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise WrongMemberError(
                "{path} is given without logprobs", "send logprobs: true, too", "top_logprobs"
            )
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
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only chats have; see `TurnBody`."""
        return {
            **super().own_sampling,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias or None,
        }


async def create_chat(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer a chat's last message."""
    turn_request = await api.read(request, ChatBody)
    body = turn_request.body
    turn = turn_request.turn(body.conversation)
    async with await api.answers.open(turn_request.caller, turn) as answer:
        objects = ChatObjects(
            completion_id="chatcmpl-" + turn_request.chain.id_of("completion", turn.request_id),
            created=int(time.time()),
            model=body.model,
            fingerprint=api.model.fingerprint,
            session_id=answer.session_id,
            token_text=api.token_text,
            top_logprobs=body.shown_logprobs,
            includes_usage=body.stream_options.include_usage,
        )
        return await send_answer(turn_request, turn, answer, objects)


@dataclass(frozen=True)
class ChatObjects:
    """Makes the objects of one answer: a whole one, and the chunks of a stream.

    Attributes:
        completion_id: id of the answer.
        created: seconds of the epoch.
        model: the model's name as the client wrote it.
        fingerprint: fingerprint of the model that answers.
        top_logprobs: how many alternatives of each token; None: no log-probabilities.
        includes_usage: every chunk has the member `usage`, and the last one has a value there.
    """

    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"

    completion_id: str
    created: int
    model: str
    fingerprint: str
    session_id: str
    token_text: TokenText
    top_logprobs: int | None = None
    includes_usage: bool = False

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Make the answer of a request that is not streamed."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": finished.text,
            "refusal": None,
            "annotations": [],
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finished.finish_reason,
        }
        return self._object("chat.completion", [choice]) | {"usage": chat_usage(finished.usage)}

    def opening(self, _started: Started) -> Iterator[dict[str, Any]]:
        """Make the first chunk: whose message it is."""
        yield self._chunk({"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Make a chunk with the next tokens; none if they show nothing."""
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        if text or logprobs:
            yield self._chunk({"content": text}, None, logprobs)

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Make the last chunks: why it ended, and the usage if the client requested it."""
        yield self._chunk({}, finished.finish_reason)
        if self.includes_usage:
            yield self._object("chat.completion.chunk", []) | {"usage": chat_usage(finished.usage)}

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Make the event of an answer that failed."""
        return error_body(error)

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.includes_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
            "service_tier": "default",
            "choices": choices,
            "session_id": self.session_id,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self.top_logprobs is None or not tokens:
            return None
        return {"content": self.token_text.rows(tokens, self.top_logprobs), "refusal": None}


def chat_usage(usage: Usage) -> dict[str, Any]:
    """Make the usage of an answer: tokens that were not computed again are `cached_tokens`."""
    prompt_tokens = usage.history_tokens + usage.new_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
