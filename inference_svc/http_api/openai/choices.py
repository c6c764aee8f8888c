"""Choices: several answers to one request, `n` for each of its prompts.

Each answer is a turn of its own. Answers to the same history never share a session: one continues
the session, the others forks of it, so that the client can continue any of them. What the prompts
have in common is computed once, by the first turn.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from inference_svc.core.turn_record import AnswerToken, Finished, Tokens, Usage
from inference_svc.http_api.answer_members import reuse_members
from inference_svc.http_api.bodies.body import Body, WrongMemberError
from inference_svc.http_api.openai.dialect import error_body
from inference_svc.http_api.sessions.answers import Answers, LiveAnswer
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from shared.types.errors import ReportedError

MOST_CHOICES = 16  # most answers to one request

T = TypeVar("T")


def check_choices(num_prompts: int, n: int) -> None:
    """Check the number of a request's answers; for a body's validator.

    Args:
        num_prompts: number of its prompts.
        n: number of answers to each prompt.

    Raises:
        WrongMemberError: there are more than `MOST_CHOICES` answers.
    """
    num_choices = num_prompts * n
    if num_choices > MOST_CHOICES:
        raise WrongMemberError(
            f"{num_choices} answers to a request are too many", f"send at most {MOST_CHOICES}", "n"
        )


class Choice(Protocol):
    """Builds one choice, either for a whole object or for the chunks of a stream."""

    @property
    def num_thought(self) -> int:
        """Number of thought tokens so far."""

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Build the whole choice."""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Build the choice in the first chunks of a stream."""

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterable[dict[str, Any]]:
        """Build the choice in the chunks of the next tokens; there may be none."""

    def closing(self, finished: Finished) -> Iterable[dict[str, Any]]:
        """Build the choice in the last chunks: held-back text, and the finish reason."""


class StreamOptions(Body):
    """`stream_options` of a request.

    Attributes:
        include_usage: whether the stream ends with a chunk with the usage.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False


@dataclass(frozen=True)
class Envelope:
    """The members that all objects of one request have in common.

    Attributes:
        kind: type of the whole object.
        chunk_kind: type of a stream's chunks.
        answer_id: id of the object, and of all chunks.
        created: Unix time in seconds.
        model: the model's name as the client wrote it.
        fingerprint: the model's fingerprint.
        includes_usage: whether every chunk has the member `usage`, null except in the last one.
    """

    kind: str
    chunk_kind: str
    answer_id: str
    created: int
    model: str
    fingerprint: str
    includes_usage: bool = False

    def whole(
        self, choices: list[dict[str, Any]], session_id: str, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Build the object of a request that is not streamed."""
        return self._object(self.kind, choices, session_id) | {"usage": usage}

    def chunk(
        self, choices: list[dict[str, Any]], session_id: str, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Build a chunk of a stream."""
        chunk = self._object(self.chunk_kind, choices, session_id)
        return chunk | {"usage": usage} if self.includes_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]], session_id: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
            "service_tier": "default",
            "choices": choices,
            "session_id": session_id,
        }


class Choices:
    """The reply with all answers of a request; see `replies.Reply`.

    Args:
        envelope: the common members of all objects.
        answers: the turns' answers.
        choices: returns new builders of the choices, one for each answer.
        n: number of answers to each prompt.
        keep: stores the whole object, also of a stream, before the client gets its end; None: it
            is not stored.
    """

    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(
        self,
        envelope: Envelope,
        answers: Sequence[LiveAnswer],
        choices: Callable[[], Sequence[Choice]],
        n: int,
        keep: Callable[[Mapping[str, Any], Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        self._envelope = envelope
        self._answers = answers
        self._make_choices = choices
        self._choices = choices()
        self._n = n
        self._keep = keep
        self.session_id = answers[0].session_id

    async def whole(self) -> dict[str, Any]:
        """Return the object with all choices; if there are several, each names its session."""
        return await self._build_whole(await _run_all([answer.whole() for answer in self._answers]))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of all choices as they arrive, then the usage if it was asked for."""
        ended: list[Finished | None] = [None] * len(self._answers)
        tokens: list[list[AnswerToken]] = [[] for _ in self._answers]
        for choice, answer in zip(self._choices, self._answers, strict=True):
            for choice_object in choice.opening():
                yield self._envelope.chunk([choice_object], answer.session_id)
        async with aclosing(
            _merge_events(self._answers)
        ) as events:  # a client may leave in the middle
            async for index, event in events:
                choice, session_id = self._choices[index], self._answers[index].session_id
                if isinstance(event, Finished):
                    ended[index] = event
                    if self._keep is not None and all(ended):
                        await self._build_whole([*zip(tokens, filter(None, ended), strict=True)])
                    parts = choice.closing(event)
                else:
                    if self._keep is not None:
                        tokens[index] += event.tokens
                    parts = choice.piece(event.tokens)
                for choice_object in parts:
                    yield self._envelope.chunk([choice_object], session_id)
        if self._envelope.includes_usage:
            num_thought = sum(choice.num_thought for choice in self._choices)
            usage = self._sum_usage(
                [finished for finished in ended if finished is not None], num_thought
            )
            yield self._envelope.chunk([], self.session_id, usage)

    async def _build_whole(
        self, ended: Sequence[tuple[Sequence[AnswerToken], Finished]]
    ) -> dict[str, Any]:
        """Build the whole object, and store it if the client asked for that."""
        choices = self._make_choices()
        choice_objects = [choice.whole(*end) for choice, end in zip(choices, ended, strict=True)]
        sessions = [answer.session_id for answer in self._answers]
        if len(choice_objects) > 1:
            for choice, session_id in zip(choice_objects, sessions, strict=True):
                choice["session_id"] = session_id
        num_thought = sum(choice.num_thought for choice in choices)
        usage = self._sum_usage([finished for _, finished in ended], num_thought)
        whole = self._envelope.whole(choice_objects, self.session_id, usage)
        if self._keep is not None:
            await self._keep(whole, sessions)
        return whole

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Build the event of a request that failed."""
        return error_body(error)

    def _sum_usage(self, ended: Sequence[Finished], num_thought: int) -> dict[str, Any]:
        """Sum up the usage; a prompt counts once, by the usage of its first answer."""
        usages = [finished.usage for finished in ended]
        prompts = usages[:: self._n]
        total = Usage(
            history_tokens=sum(usage.history_tokens for usage in prompts),
            reused_tokens=sum(usage.reused_tokens for usage in prompts),
            recomputed_tokens=sum(usage.recomputed_tokens for usage in prompts),
            new_tokens=sum(usage.new_tokens for usage in prompts),
            output_tokens=sum(usage.output_tokens for usage in usages),
            drafted_tokens=sum(usage.drafted_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
            kept_tokens=sum(usage.kept_tokens for usage in prompts),
            healed_tokens=sum(usage.healed_tokens for usage in prompts),
            miss=next((usage.miss for usage in prompts if usage.miss is not None), None),
        )
        return shown_usage(total, num_thought)


@asynccontextmanager
async def open_answers(
    answers: Answers, caller: Caller, turns: Sequence[HttpTurn]
) -> AsyncIterator[list[LiveAnswer]]:
    """Start all turns of a request, and leave them at the end of the block.

    If one turn is refused, the others are cancelled.

    Raises:
        ReportedError: a turn was refused, or failed before its first tokens.
    """
    live: list[LiveAnswer] = []

    async def open_answer(turn: HttpTurn) -> LiveAnswer:
        answer = await answers.open(caller, turn)
        live.append(answer)
        return answer

    try:
        yield await _run_all([open_answer(turn) for turn in turns])
    finally:
        for answer in live:
            answer.close()


async def _run_all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently, and return their results; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _merge_events(
    answers: Sequence[LiveAnswer],
) -> AsyncGenerator[tuple[int, Tokens | Finished], None]:
    """Yield the events of all answers as they arrive, each with the index of its answer.

    Raises:
        ReportedError: a turn failed.
    """
    news: asyncio.Queue[tuple[int, Tokens | Finished | Exception]] = asyncio.Queue()

    async def follow(index: int, answer: LiveAnswer) -> None:
        try:
            async for event in answer.events():
                news.put_nowait((index, event))
        except Exception as error:  # noqa: BLE001  # raised again by the consumer, below
            news.put_nowait((index, error))

    following = [asyncio.create_task(follow(*each)) for each in enumerate(answers)]
    num_left = len(answers)
    try:
        while num_left:
            index, event = await news.get()
            if isinstance(event, Exception):
                raise event
            num_left -= isinstance(event, Finished)
            yield index, event
    finally:
        await _cancel(following)


def shown_usage(usage: Usage, num_thought: int = 0) -> dict[str, Any]:
    """Return the usage object of a request; reused tokens are its `cached_tokens`.

    Args:
        usage: the summed usage of its turns.
        num_thought: number of thought tokens in the answers.
    """
    prompt_tokens = usage.history_tokens + usage.new_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": num_thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
        **reuse_members(usage),
    }
