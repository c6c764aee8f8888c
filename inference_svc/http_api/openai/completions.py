"""POST /v1/completions: raw text, or token ids, is continued; no template, no messages.

A request is a session of its own, which has what others of the tenant have computed of the same
first tokens; one that names a session goes on with that, and brings only what is new.

*Source:* OpenAI API reference, "Completions"; beside it stand `session_id`, and `special_tokens`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import BeforeValidator, Field

from inference_svc.core.answers import AnswerToken
from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.core.turn_record import Finished, Started
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies import MOST_TOKENS, Count, Refused, TurnBody, WrongMemberError
from inference_svc.http_api.openai.chats import StreamOptions, chat_usage
from inference_svc.http_api.openai.dialect import error_body
from inference_svc.http_api.replies import send_answer
from inference_svc.http_api.token_text import TokenText
from shared.types.errors import ReportedError

USUAL_TOKENS = 16  # of an answer, if the client names no bound; OpenAI's
MOST_LOGPROBS = 5


def _prompt(given: Any) -> Any:
    """Take a list with one prompt for that prompt."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise WrongMemberError("{path} has several prompts", "send a request for each of them")
        given = given[0]
    is_ids = isinstance(given, list) and all(map(_is_token_id, given))
    if not given or not (isinstance(given, str) or is_ids):
        raise WrongMemberError("{path} is no prompt", "send a text, or a list of token ids")
    return given


def _is_token_id(given: Any) -> bool:
    is_whole = isinstance(given, int) and not isinstance(given, bool)
    return is_whole and 0 <= given <= MOST_TOKENS


class CompletionBody(TurnBody):
    """The body of POST /v1/completions.

    Attributes:
        prompt: text or token ids that the answer continues.
        special_tokens: whether names of special tokens in the text are these tokens; else text.
        logprobs: how many alternatives of each token; None: no log-probabilities.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        "best_of": Refused((1,), "one answer is sampled: leave it out"),
        "echo": Refused((False,), "put the prompt before the answer yourself"),
        "n": Refused((1,), "send the request several times: the prompt is computed once"),
        "suffix": Refused(("",), "write it into the prompt as the model expects it"),
        "frequency_penalty": Refused((0,), "use repetition_penalty"),
        "presence_penalty": Refused((0,), "use repetition_penalty"),
        "logit_bias": Refused(({},), "leave it out"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "user"})

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)] = Field(
        default=None, validate_default=True
    )
    special_tokens: bool = False
    max_tokens: Count = USUAL_TOKENS
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    stream_options: StreamOptions = StreamOptions()

    @property
    def raw(self) -> TextInput | TokenInput:
        """The prompt as an input."""
        if isinstance(self.prompt, str):
            return TextInput(self.prompt, has_special=self.special_tokens)
        return TokenInput(tuple(self.prompt))

    @property
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer."""
        return self.max_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """How many alternatives are shown of each token; None: no log-probabilities."""
        return self.logprobs


async def create_completion(api: Api, request: web.Request) -> web.StreamResponse:
    """Continue a prompt."""
    turn_request = await api.read(request, CompletionBody)
    body = turn_request.body
    turn = turn_request.turn((), raw=body.raw)
    async with await api.answers.open(turn_request.caller, turn) as answer:
        objects = CompletionObjects(
            completion_id="cmpl-" + turn_request.chain.id_of("completion", turn.request_id),
            created=int(time.time()),
            model=body.model,
            fingerprint=api.model.fingerprint,
            session_id=answer.session_id,
            token_text=api.token_text,
            num_logprobs=body.shown_logprobs,
            includes_usage=body.stream_options.include_usage,
        )
        return await send_answer(turn_request, turn, answer, objects)


@dataclass
class CompletionObjects:
    """Makes the objects of one answer: a whole one, and the chunks of a stream, which are alike.

    Attributes:
        completion_id: id of the answer.
        created: seconds of the epoch.
        model: the model's name as the client wrote it.
        fingerprint: fingerprint of the model that answers.
        num_logprobs: how many alternatives of each token; None: no log-probabilities.
        includes_usage: every chunk has the member `usage`, and the last one has a value there.
    """

    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"

    completion_id: str
    created: int
    model: str
    fingerprint: str
    session_id: str
    token_text: TokenText
    num_logprobs: int | None = None
    includes_usage: bool = False
    _num_characters: int = field(default=0, init=False)  # of the tokens that were shown

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Make the answer of a request that is not streamed."""
        made = self._object(finished.text, self._logprobs(tokens), finished.finish_reason)
        return made | {"usage": chat_usage(finished.usage)}

    def opening(self, _started: Started) -> Iterator[dict[str, Any]]:
        """Make no chunk: the first one has text."""
        yield from ()

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Make a chunk with the next tokens; none if they show nothing."""
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        if text or logprobs:
            yield self._chunk(text, logprobs, None)

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Make the last chunks: why it ended, and the usage if the client requested it."""
        yield self._chunk("", None, finished.finish_reason)
        if self.includes_usage:
            last = self._object("", None, None) | {"choices": []}
            yield last | {"usage": chat_usage(finished.usage)}

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Make the event of an answer that failed."""
        return error_body(error)

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        chunk = self._object(text, logprobs, finish_reason)
        return chunk | {"usage": None} if self.includes_usage else chunk

    def _object(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
            "choices": [choice],
            "session_id": self.session_id,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        """Make the columns of tokens, with where the text of each begins in the answer."""
        if self.num_logprobs is None or not tokens:
            return None
        rows = self.token_text.rows(tokens, self.num_logprobs)
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters)
            self._num_characters += len(token.text)
        return {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows
            ],
            "text_offset": offsets,
        }
