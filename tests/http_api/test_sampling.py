"""Sampling parameters, by the official client and by gRPC, with equal effects."""

import openai
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError
from tests.http_api.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 12  # tokens of an answer


async def grpc_turn(api, messages, request_id="", **values):
    """Run the same turn by gRPC in a session of its own, unless it is a repeat."""
    chat = [pb.ChatMessage(**message) for message in messages]
    sampling = pb.Sampling(**{"max_tokens": LENGTH, "ignore_eos": True, **values})
    async with api.service.client() as client:
        request = turn_request(chat, request_id, tenant="globex", sampling=sampling)
        request.request_id = request_id
        return await client.submit(request)


async def ask(client, messages, **options):
    """Return a chat's text, its finish reason, and its number of tokens."""
    extra_body = {"ignore_eos": True, **options.pop("extra_body", {})}
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=LENGTH, extra_body=extra_body, **options
    )
    choice = answer.choices[0]
    return choice.message.content, choice.finish_reason, answer.usage.completion_tokens


@pytest.mark.parametrize(
    "values",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -0.5, "presence_penalty": 1.5, "temperature": 1.0, "seed": 5},
    ],
)
async def test_penalties_and_a_bias(api, opening, values):
    """By OpenAI's names; the answer equals that of gRPC.

    With the bias alone it could repeat itself.
    """
    bias = {40: 100.0, 41: 99.0}
    named = {str(token_id): value for token_id, value in bias.items()}
    async with api.client() as client:
        changed = await ask(client, opening, **values, logit_bias=named, store=False)
        plain = await ask(client, opening, store=False)
    turn = await grpc_turn(api, opening, **values, logit_bias=bias)
    assert changed == (turn.text, "length", LENGTH)
    assert changed != plain
    assert len(set(turn.text)) <= 2, "the two that are favoured"


async def test_stop_tokens_and_min_tokens(api, opening):
    """A stop token ends the answer at once, or after the least number of tokens."""
    first = (await grpc_turn(api, opening)).tokens[0].token_id
    stop = {"stop_token_ids": [first]}
    bias = {str(first): 100}
    async with api.client() as client:
        at_once = await ask(client, opening, extra_body=stop)
        later = await ask(client, opening, logit_bias=bias, extra_body={**stop, "min_tokens": 5})
        response = await client.responses.create(
            model=MODEL, input=opening, max_output_tokens=LENGTH, extra_body=stop
        )
    assert at_once[1:] == ("stop", 1)
    assert later[1:] == ("stop", 6)
    assert (response.output_text, response.usage.output_tokens) == (at_once[0], 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logit_bias": {"1000000": 1}}, "send ids below"),
        ({"extra_body": {"stop_token_ids": [1000000]}}, "send ids below"),
        ({"extra_body": {"stop_token_ids": [5] * 65}}, "more than 64"),
        ({"extra_body": {"min_tokens": LENGTH + 1}}, f"more than max_tokens {LENGTH}"),
        ({"frequency_penalty": 2.5}, "2 or less"),
        ({"logit_bias": {"Hello": 1}}, '{"50256": -100}'),
    ],
)
async def test_bad_sampling_parameters_are_refused(api, opening, options, said):
    """The error has the remedy."""
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, opening, **options)
    assert said in refused.value.message


async def test_responses_and_completions_take_sampling_parameters(api):
    """Also where OpenAI has none; a bias of 100 leaves no other token."""
    bias = {"logit_bias": {"70": 100}, "ignore_eos": True}
    async with api.client() as client:
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            extra_body=bias,
        )
        response = await client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=4, extra_body=bias
        )
        completion = await client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=4, extra_body=bias
        )
    text = chat.choices[0].message.content
    assert len(set(text.split()) | {text[: len(text) // 4]}) <= 2
    assert response.output_text == text
    assert completion.choices[0].text.strip() == text.strip()


async def test_a_repeat_must_have_the_same_sampling(api, opening):
    """By gRPC, a repeat is answered from the record, also later; other sampling is refused."""
    values = {"request_id": opening[0]["content"][8:24], "frequency_penalty": 1.5}
    first = await grpc_turn(api, opening, **values, logit_bias={5: 2.0, 6: 1.0})
    again = await grpc_turn(api, opening, **values, logit_bias={6: 1.0, 5: 2.0})
    assert (first.accepted.replayed, again.accepted.replayed) == (False, True)
    assert again.text == first.text
    with pytest.raises(InvalidInputError) as refused:
        await grpc_turn(api, opening, **values, logit_bias={5: 2.0, 6: 1.5})
    assert refused.value.reason == "request_id_reused"
