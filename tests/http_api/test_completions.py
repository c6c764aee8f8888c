"""/v1/completions, /tokenize, /detokenize and /health, by the official client and raw HTTP."""

import asyncio
import uuid

import aiohttp
import openai
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.http_api.conftest import CLIENTS, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 8  # tokens of an answer
PROMPT = "Keys and values are kept. " * 40


def prompt():
    """Return a new text that is long enough for whole blocks."""
    return f"This is {uuid.uuid4().hex}. {PROMPT}"


async def ask(client, text, **options):
    """Request a greedy answer of its full length."""
    extra_body = {"ignore_eos": True, **options.pop("extra_body", {})}
    return await client.completions.create(
        model=MODEL, prompt=text, max_tokens=LENGTH, extra_body=extra_body, **options
    )


async def call(api, path, method="POST", headers=None, **body):
    """Return status and body of a request without the official client."""
    address = api.url.removesuffix("/v1")
    given = {"Authorization": f"Bearer {CLIENTS['acme']}"} if headers is None else headers
    async with (
        aiohttp.ClientSession(address, headers=given) as session,
        session.request(method, path, json=body if method == "POST" else None) as response,
    ):
        return response.status, await response.json()


async def test_the_answer_equals_that_of_grpc(api):
    """The same text, or its tokens, gets the same greedy answer as by gRPC."""
    text = prompt()
    sampling = pb.Sampling(max_tokens=LENGTH, ignore_eos=True)
    async with api.service.client() as grpc_client:
        turn = await grpc_client.submit(turn_request(text, tenant="globex", sampling=sampling))
    _, encoded = await call(api, "/tokenize", prompt=text)
    async with api.client() as client:
        answers = [await ask(client, given) for given in (text, [text], encoded["tokens"])]
    for answer in answers:
        assert answer.choices[0].text == turn.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == encoded["count"] == turn.usage.new_tokens


async def test_a_prompts_computed_blocks_are_reused(api):
    """Whole blocks are reused, by a session of its own."""
    text = prompt()
    async with api.client() as client:
        first = await ask(client, text)
        await api.until_saved(first)
        second = await ask(client, f"{text}And then?")
    assert second.model_extra["session_id"] != first.model_extra["session_id"]
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2


async def test_several_prompts_have_several_answers(api):
    """Each answer is as if it were alone; texts and token ids may be mixed."""
    texts = [prompt() for _ in range(3)]
    _, encoded = await call(api, "/tokenize", prompt=texts[2])
    async with api.client() as client:
        alone = [(await ask(client, text)).choices[0].text for text in texts]
        answer = await ask(client, [*texts[:2], encoded["tokens"]])
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.completion_tokens == 3 * LENGTH


async def test_a_named_session_goes_on(api):
    """A named session takes new text; it is not found by its history."""
    name = f"story-{uuid.uuid4().hex}"
    async with api.client() as client:
        options = {"extra_body": {"session_id": name}}
        first = await ask(client, "Once upon a time", **options)
        second = await ask(client, " there was", **options)
    assert second.model_extra["session_id"] == first.model_extra["session_id"] == name
    assert await api.num_turns(name) == 2
    new_tokens = second.usage.prompt_tokens - first.usage.total_tokens
    assert 0 < new_tokens < first.usage.prompt_tokens + 1


async def test_a_raw_prompt_is_no_history_of_messages(api):
    """A chat that begins with its answer does not continue its session."""
    async with api.client() as client:
        raw = await ask(client, prompt())
        said = [
            {"role": "assistant", "content": raw.choices[0].text},
            {"role": "user", "content": "And then?"},
        ]
        chat = await client.chat.completions.create(model=MODEL, messages=said, max_tokens=2)
    assert chat.model_extra["session_id"] != raw.model_extra["session_id"]


async def test_a_stream_equals_the_whole_answer(api):
    """Text, log-probabilities, finish reason and usage are equal."""
    text = prompt()
    async with api.client() as client:
        whole = await ask(client, text, logprobs=2)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await ask(client, text, logprobs=2, **options)]
    *pieces, last = chunks
    choices = [chunk.choices[0] for chunk in pieces]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == "length"
    assert last.usage.total_tokens == whole.usage.total_tokens
    shown = [choice.logprobs for choice in choices if choice.logprobs]
    logprobs = whole.choices[0].logprobs
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for part in shown for value in getattr(part, name)]
        expected = getattr(logprobs, name)
        assert joined == (
            pytest.approx(expected, abs=1e-4) if name == "token_logprobs" else expected
        )
        assert len(joined) == LENGTH
    assert logprobs.text_offset[0] == 0
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs), "two may have one text"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": ""}, "send a text or a list of token ids"),
        ({"prompt": []}, "send a text or a list of token ids"),
        ({"prompt": ["a"] * 17}, "at most 16"),
        ({"prompt": ["a", 5]}, "send a text or a list of token ids"),
        ({"prompt": [1, "a"]}, "send a text or a list of token ids"),
        ({"prompt": [True]}, "send a text or a list of token ids"),
        ({"prompt": [10**9]}, "outside the vocabulary"),
        ({"prompt": "a", "echo": True}, "in front of the answer yourself"),
        ({"prompt": "a", "logprobs": 9}, "5 or less"),
        ({"prompt": "a", "n": 2, "extra_body": {"session_id": "s"}}, "leave the session out"),
    ],
)
async def test_bad_requests_are_refused(api, options, said):
    """The refusal names a remedy."""
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError, match=said):
            await client.completions.create(**{"model": MODEL, "max_tokens": 2, **options})


async def test_parameters_of_other_servers_change_nothing(api):
    """Known ones are ignored; unknown ones are refused by name."""
    async with api.client() as client:
        extra = {"cache_prompt": True, "id_slot": 3}
        assert (await ask(client, "Hello", extra_body=extra)).choices
        with pytest.raises(openai.BadRequestError, match="no parameter 'cache_prompts'"):
            await ask(client, "Hello", extra_body={"cache_prompts": True})


async def test_tokenizing_and_detokenizing(api):
    """Detokenizing returns the text; a chat's tokens are those that its turn reads."""
    text = "What is kept between two turns? é 漢"
    status, encoded = await call(api, "/tokenize", prompt=text, return_token_strs=True)
    assert (status, encoded["count"]) == (200, len(encoded["tokens"]))
    assert len(encoded["token_strs"]) == encoded["count"]
    _, decoded = await call(api, "/detokenize", tokens=encoded["tokens"])
    assert decoded["prompt"].endswith(text)
    messages = [{"role": "user", "content": text}]
    _, chat = await call(api, "/tokenize", model=MODEL, messages=messages)
    async with api.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "another"}, 404),
        ("/detokenize", {"tokens": [10**9]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {}, 400),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(api, path, body, status):
    """The error has OpenAI's form."""
    found, said = await call(api, path, **body)
    assert (found, set(said["error"])) == (status, {"message", "type", "param", "code"})


async def test_health_needs_no_account(api):
    """Everything else needs one; a stopping service reports it, and clients go elsewhere."""
    assert await call(api, "/health", "GET", headers={}) == (200, {"status": "ok"})
    assert (await call(api, "/tokenize", headers={}, prompt="a"))[0] == 401
    assert (await call(api, "/health", "POST"))[0] == 405
    async with api.client() as client:
        long = {
            "model": MODEL,
            "prompt": "a",
            "max_tokens": 300,
            "extra_body": {"ignore_eos": True},
        }
        stream = await client.completions.create(**long, stream=True)
        await anext(stream)
        stopping = asyncio.create_task(api.service.stop())
        statuses = []
        while not stopping.done() and statuses[-1:] not in ([503], [0]):
            try:
                statuses.append((await call(api, "/health", "GET", headers={}))[0])
            except aiohttp.ClientError:
                statuses.append(0)  # the service no longer listens
        async for _ in stream:
            pass
    await stopping
    await api.start()
    assert statuses[-1] in {503, 0}
