"""POST /v1/completions: continuation of raw text or token ids, without messages or a template.

Each answer is a session of its own, which shares the KV cache of the same first tokens with the
tenant's other sessions. A request that names a session continues it, and sends only what is new.

*Source:* OpenAI API reference, "Completions". `session_id` and `special_tokens` are this service's
own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from aiohttp import web
from pydantic import BeforeValidator, Field, model_validator

from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.core.turn_record import AnswerToken, Finished
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import MOST_TOKENS, Count, Refused, WrongMemberError
from inference_svc.http_api.openai.choices import (
    Choices,
    Envelope,
    StreamOptions,
    check_choices,
    open_answers,
)
from inference_svc.http_api.openai.turn_body import SampledBody
from inference_svc.http_api.replies import send_reply

USUAL_TOKENS = 16  # most tokens of an answer if the client gives no bound; OpenAI's default
MOST_LOGPROBS = 5  # alternatives of a token; OpenAI's bound


def _to_prompts(raw: Any) -> Any:
    """Convert a single prompt to a list, and check the prompts."""
    is_one = isinstance(raw, str) or (
        isinstance(raw, list) and bool(raw) and not isinstance(raw[0], str | list)
    )
    prompts = [raw] if is_one else raw
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise WrongMemberError(
            "{path} is not a prompt", "send a text or a list of token ids, or a list of those"
        )
    return prompts


def _is_prompt(raw: Any) -> bool:
    is_ids = isinstance(raw, list) and all(map(_is_token_id, raw))
    return bool(raw) and (isinstance(raw, str) or is_ids)


def _is_token_id(raw: Any) -> bool:
    is_whole = isinstance(raw, int) and not isinstance(raw, bool)
    return is_whole and 0 <= raw <= MOST_TOKENS


class CompletionBody(SampledBody):
    """The body of POST /v1/completions.

    Attributes:
        prompt: the texts or lists of token ids to continue.
        n: number of answers to each prompt.
        special_tokens: whether names of special tokens in the text are read as these tokens.
        logprobs: number of alternatives of each token; None: no log-probabilities.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        "best_of": Refused((1,), "the service samples one answer: leave it out"),
        "echo": Refused((False,), "put the prompt in front of the answer yourself"),
        "suffix": Refused(("",), "write it into the prompt, in the form that the model expects"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "user"})

    prompt: Annotated[list[str | list[int]], BeforeValidator(_to_prompts)] = Field(
        default=None, validate_default=True
    )
    n: Count = 1
    special_tokens: bool = False
    max_tokens: Count = USUAL_TOKENS
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        check_choices(len(self.prompt), self.n)
        return self

    @property
    def inputs(self) -> list[TextInput | TokenInput]:
        """The prompts as inputs of turns."""
        return [
            TextInput(prompt, has_special=self.special_tokens)
            if isinstance(prompt, str)
            else TokenInput(tuple(prompt))
            for prompt in self.prompt
        ]

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """Number of alternatives shown of each token; None: no log-probabilities."""
        return self.logprobs


async def create_completion(api: Api, request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, each with one or several choices."""
    turn_request = await api.read(request, CompletionBody)
    body = turn_request.body
    inputs = [raw for raw in body.inputs for _ in range(body.n)]
    turns = [turn_request.turn((), raw=raw, choice=index) for index, raw in enumerate(inputs)]
    envelope = Envelope(
        kind="text_completion",
        chunk_kind="text_completion",
        answer_id="cmpl-" + turn_request.chain.id_of("completion", turns[0].request_id),
        created=turn_request.created_s,
        model=body.model,
        fingerprint=api.model.fingerprint,
        includes_usage=body.stream_options.include_usage,
    )

    def choices() -> list[CompletionChoice]:
        shown = body.shown_logprobs
        return [CompletionChoice(index, api.token_text, shown) for index in range(len(turns))]

    async with open_answers(api.answers, turn_request.caller, turns) as answers:
        return await send_reply(turn_request, turns[0], Choices(envelope, answers, choices, body.n))


@dataclass
class CompletionChoice:
    """Builds one choice of a completion; see `Choice`. Chunks have the members of the whole.

    Attributes:
        index: index of the choice.
        token_text: makes the objects of tokens.
        num_logprobs: number of alternatives of each token; None: no log-probabilities.
    """

    num_thought: ClassVar[int] = 0  # raw text is not parsed for thoughts

    index: int
    token_text: TokenText
    num_logprobs: int | None = None
    _num_characters: int = field(default=0, init=False)  # characters of all tokens so far

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Build the whole choice."""
        return self._choice(finished.text, self._logprobs(tokens), finished.finish_reason)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Build no chunk: the first one has text."""
        yield from ()

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Build the choice of the next tokens; there is none if they show nothing."""
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        if text or logprobs:
            yield self._choice(text, logprobs, None)

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Build the last choice, which has the finish reason."""
        yield self._choice("", None, finished.finish_reason)

    def _choice(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        """Return the columns of tokens, with the offset of each token's text in the answer."""
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
