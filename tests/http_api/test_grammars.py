"""Answers by a grammar, by the official clients: any model's answer matches."""

import json
import re
from typing import Literal

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from jsonschema import validate
from pydantic import BaseModel

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError
from tests.http_api.conftest import CLIENTS, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 200  # tokens: enough for the requests here
ASKED = [{"role": "user", "content": "Which is it?"}]


class Weather(BaseModel):
    """A client's schema; bounded, so that any model's answer ends."""

    kind: Literal["sun", "rain", "snow"]
    degrees: Literal[-5, 0, 25]
    is_sure: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}


async def test_a_chat_is_parsed_into_a_class(api):
    """Greedy, sampled and several at once; a stop string does not cut it."""
    async with api.client() as client:
        parse = client.chat.completions.parse
        options = {
            "model": MODEL,
            "messages": ASKED,
            "max_tokens": LONG,
            "response_format": Weather,
        }
        answers = [
            await parse(**options),
            await parse(**options, temperature=2, seed=1, n=3, stop=['"', "}"]),
        ]
    assert [len(answer.choices) for answer in answers] == [1, 3]
    for answer in answers:
        for choice in answer.choices:
            assert isinstance(choice.message.parsed, Weather)
            assert choice.finish_reason == "stop"


async def test_a_stream_adds_up_to_a_document(api):
    """Any JSON object or one by a schema; the conversation continues after it."""
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    async with api.client() as client:
        create = client.chat.completions.create
        options = {"model": MODEL, "max_tokens": LONG}
        stream = await create(**options, messages=ASKED, response_format=form, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        validate(json.loads(text), SCHEMA)
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        going_on = await create(
            **options, messages=[*ASKED, *said], response_format=form, temperature=1, seed=2
        )
    validate(json.loads(going_on.choices[0].message.content), SCHEMA)
    assert going_on.usage.prompt_tokens_details.cached_tokens > 0


async def test_an_object_begins_with_a_brace(api):
    """Nothing else is known about it; only the token limit may cut it."""
    async with api.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=8, response_format={"type": "json_object"}
        )
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    assert choice.finish_reason in {"length", "stop"}


async def test_a_response_repeats_its_format(api):
    """The response is parsed, also when it is retrieved."""
    async with api.client() as client:
        response = await client.responses.parse(
            model=MODEL, input="Which is it?", max_output_tokens=LONG, text_format=Weather
        )
        again = await client.responses.retrieve(response.id)
    assert isinstance(response.output_parsed, Weather)
    assert again.text.format.type == "json_schema"
    assert again.text.format.name == "Weather"
    assert set(again.text.format.schema_["properties"]) == {"kind", "degrees", "is_sure"}


async def test_a_message_has_its_schema_in_its_output(api):
    """This is Anthropic's parameter."""
    url = api.url.removesuffix("/v1")
    form = {"type": "json_schema", "schema": SCHEMA}
    options = {"model": MODEL, "messages": ASKED, "max_tokens": LONG}
    async with AsyncAnthropic(api_key=CLIENTS["acme"], base_url=url, max_retries=0) as client:
        message = await client.messages.create(**options, output_config={"format": form})
        bad = {"type": "json_schema", "schema": {"type": "nope"}}
        with pytest.raises(anthropic.BadRequestError, match="the grammar is not valid"):
            await client.messages.create(**options, output_config={"format": bad})
    validate(json.loads(message.content[0].text), SCHEMA)
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"regex": "[a-f]{3,9}!"}, r"[a-f]{3,9}!"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
    ],
)
async def test_completions_and_chats_take_other_grammars(api, given, fits):
    """vLLM's parameters work in completions and chats."""
    extra = {"structured_outputs": given}
    async with api.client() as client:
        options = {"model": MODEL, "max_tokens": LONG, "temperature": 1.5, "seed": 3}
        raw = await client.completions.create(**options, prompt="It is ", extra_body=extra)
        chat = await client.chat.completions.create(**options, messages=ASKED, extra_body=extra)
    for choice in (raw.choices[0], chat.choices[0]):
        text = choice.text if choice is raw.choices[0] else choice.message.content
        if choice.finish_reason == "stop":
            assert re.fullmatch(fits, text)
        else:
            assert given.keys() == {"grammar"}, "only that one has no end"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "is needed with type 'json_schema'"),
        ({"response_format": {"type": "xml"}}, "'json_object'"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"unevaluatedItems": False}},
                }
            },
            "unevaluatedItems",
        ),
        ({"extra_body": {"structured_outputs": {}}}, "one kind"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "unclosed group"),
        ({"extra_body": {"structured_outputs": {"json": {"$ref": "#"}}}}, "no text follows"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a"{100000}'}}}, "Too many"),
        ({"extra_body": {"structured_outputs": {"json": {"multipleOf": 9999991}}}}, "remainders"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}, "ignore_eos": True}},
            "ends where the grammar does",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "extra_body": {"structured_outputs": {"regex": "a"}},
            },
            "send one of them",
        ),
    ],
)
async def test_unsupported_grammars_are_refused(api, options, said):
    """The error has the reason; no turn starts."""
    before = await api.counter("turns_finished")
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError, match=said):
            await client.chat.completions.create(
                model=MODEL, messages=ASKED, max_tokens=LONG, **options
            )
    assert await api.counter("turns_finished") == before


async def test_grammars_by_grpc(api):
    """They give the same answers as by HTTP."""
    async with api.service.client() as client:
        for grammar, fits in (
            (pb.Grammar(json_schema='{"enum": ["a", "b"]}'), '"a"|"b"'),
            (pb.Grammar(regex="[0-9]{4}"), "[0-9]{4}"),
            (pb.Grammar(lark='start: "x" | "y"'), "x|y"),
        ):
            sampling = pb.Sampling(max_tokens=LONG, grammar=grammar)
            turn = await client.submit(turn_request("It is ", tenant="acme", sampling=sampling))
            assert re.fullmatch(fits, turn.text)
        off = turn_request("x", tenant="acme", sampling=pb.Sampling(grammar=pb.Grammar(regex="(")))
        with pytest.raises(InvalidInputError) as refused:
            await client.submit(off)
    assert refused.value.reason == "invalid_grammar"
