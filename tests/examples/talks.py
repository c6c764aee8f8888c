"""Conversations of a balancer's clients: OpenAI's, which are sent whole, and gRPC's."""

import asyncio
from collections.abc import Mapping, Sequence

import openai
from openai.types.chat import ChatCompletionChunk

from inference_svc.client import InferenceClient, TurnResult, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.examples.pairs import Pair, holder

MODEL = "tiny"
NUM_TALKS = 7
LENGTH = 8
LONG = 600  # tokens of an answer that is still being computed during an event


class Talk:
    """A conversation of OpenAI's API, which its client sends whole each time.

    Args:

    name: of it, in the header.

    header: that has its name.

    Attributes:

    name: of it, in the header.

    answers: each session that answered, in order.

    cached: tokens of each prompt that were not computed.
    """

    def __init__(self, name: str, header: str = "X-Session-Id") -> None:
        self.name = name
        self._header = header
        self.answers: list[str] = []
        self.cached: list[int] = []
        opening = f"This is {name}. " + "Keys and values are kept. " * 30
        self._messages = [{"role": "system", "content": opening}]

    async def say(self, client: openai.AsyncOpenAI, length: int = LENGTH, **fields) -> None:
        """Send a turn and read its answer."""
        answer = await client.chat.completions.create(**self._ask(length), **fields)
        self._note(answer.choices[0].message.content, answer)

    async def stream(
        self, client: openai.AsyncOpenAI, begun: asyncio.Semaphore, length: int = LONG
    ) -> None:
        """Send a streamed turn; `begun` is released at its first token."""
        stream = await client.chat.completions.create(
            **self._ask(length), stream=True, stream_options={"include_usage": True}
        )
        text, is_begun, last = "", False, None
        async for chunk in stream:
            said = chunk.choices[0].delta.content if chunk.choices else None
            if said and not is_begun:
                is_begun = True
                begun.release()
            text += said or ""
            last = chunk
        session_id = stream.response.headers["X-Session-Id"]
        assert last is not None
        assert last.usage.completion_tokens == length
        self._note(text, last, session_id)

    async def stream_unread(
        self, client: openai.AsyncOpenAI, begun: asyncio.Semaphore, length: int = LONG
    ) -> None:
        """Do as `stream`, but read only once everything has arrived.

        Clients that are slower than their servers begin to read after the answer's end.
        """
        streamed = client.chat.completions.with_streaming_response
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks: list[ChatCompletionChunk] = []
        async with streamed.create(**self._ask(length), **options) as response:
            lines = (line async for line in response.iter_lines() if line.startswith("data: {"))
            async for line in lines:
                chunks.append(_chunk_of(line))
                if _text_of(chunks[-1]):
                    begun.release()
                    break
            rest = [line async for line in lines]
        chunks += map(_chunk_of, rest)
        assert chunks[-1].usage.completion_tokens == length
        text = "".join(map(_text_of, chunks))
        self._note(text, chunks[-1], response.headers["X-Session-Id"])

    def _ask(self, length: int) -> dict:
        self._messages.append({"role": "user", "content": f"Question {len(self.answers)}?"})
        return {
            "model": MODEL,
            "messages": self._messages,
            "max_tokens": length,
            "extra_body": {"ignore_eos": True},
            "extra_headers": {self._header: self.name},
        }

    def _note(self, text: str, answer, session_id: str = "") -> None:
        self._messages.append({"role": "assistant", "content": text})
        self.answers.append(session_id or answer.model_extra["session_id"])
        self.cached.append(answer.usage.prompt_tokens_details.cached_tokens)


def _chunk_of(line: str) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate_json(line.removeprefix("data: "))


def _text_of(chunk: ChatCompletionChunk) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def some_talks(name: str, number: int = NUM_TALKS) -> list[Talk]:
    """Return some conversations with different names."""
    return [Talk(f"{name}-{index}") for index in range(number)]


async def say_all(talks: Sequence[Talk], client: openai.AsyncOpenAI, length: int = LENGTH) -> None:
    """Send a turn of each conversation."""
    await asyncio.gather(*(talk.say(client, length) for talk in talks))


def answers_of(talks: Sequence[Talk]) -> set[str]:
    """Return every session that has answered in one of them."""
    return {session_id for talk in talks for session_id in talk.answers}


async def by_pair(pairs: Mapping[str, Pair], talks: Sequence[Talk]) -> dict[str, list[Talk]]:
    """Return the conversations by the pair of their last answer; each has some."""
    found: dict[str, list[Talk]] = {}
    for talk in talks:
        found.setdefault(await holder(pairs, talk.answers[-1]), []).append(talk)
    return found


async def tell(client: InferenceClient, name: str, length: int = LENGTH, **fields) -> TurnResult:
    """Send a turn of a session: only a new message, which no other session has."""
    sampling = pb.Sampling(max_tokens=length, ignore_eos=True)
    text = f"This is {name}. " + "Keys and values are kept. " * 30
    request = turn_request(text, name, sampling=sampling, **fields)
    return await client.submit(request)
