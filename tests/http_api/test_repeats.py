"""Requests with an Idempotency-Key, repeated: the same answers, to the byte."""

import asyncio
import json
import time

import pytest

from tests.http_api.conftest import MODEL, name_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def wait_past(unix_s):
    """Wait until the clock shows another second than this one."""
    await asyncio.sleep(max(0.0, unix_s + 1.01 - time.time()))


def create_call(client, kind, opening):
    """Return a call that requests one kind of answer, and the name of its time."""
    if kind == "response":
        return client.responses, {"input": opening, "max_output_tokens": 8}, "created_at"
    if kind == "chat":
        return client.chat.completions, {"messages": opening, "max_tokens": 8}, "created"
    return client.completions, {"prompt": str(opening), "max_tokens": 8}, "created"


@pytest.mark.parametrize("kind", ["response", "chat", "completion"])
async def test_a_repeat_is_the_same_to_the_byte(api, opening, kind):
    """Its time is that of the first request, in the store too, and in simultaneous requests."""
    async with api.client() as client:
        path, body, time_name = create_call(client, kind, opening)
        body |= {"model": MODEL, "extra_headers": {"Idempotency-Key": name_of(opening)}}

        async def ask():
            return (await path.with_raw_response.create(**body)).text

        first, simultaneous = await asyncio.gather(ask(), ask())
        created_s = json.loads(first)[time_name]
        await wait_past(created_s)
        assert {simultaneous, await ask()} == {first}
        if kind == "response":
            stored = await client.responses.retrieve(json.loads(first)["id"])
            assert stored.created_at == created_s
