"""Background responses while processes are killed: polled states stay correct."""

import openai
import pytest

from inference_svc.http_api.sessions.background import response_stopped
from tests.http_api.conftest import MODEL
from tests.http_api.talks import list_items
from tests.http_api.test_background import until_over

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 250  # tokens: fits the window, and takes much longer than a kill
SEEN = 6  # events that a follower has read before the kill


@pytest.fixture
def long(opening):
    """Return a request for a response that runs for a long time."""
    return {
        "model": MODEL,
        "input": opening,
        "max_output_tokens": LONG,
        "extra_body": {"ignore_eos": True},
    }


async def begin_and_follow(client, **options):
    """Start a background response; return it and the number of its last event."""
    number = -1
    begun = await client.responses.create(background=True, **options)
    async with await client.responses.retrieve(begun.id, stream=True) as stream:
        async for event in stream:
            number = event.sequence_number
            if number == SEEN:
                break
    return begun, number


async def test_the_service_is_killed(api, long, opening):
    """The response has failed, its follower gets an error, and the conversation is unchanged."""
    short = {"model": MODEL, "max_output_tokens": 8}
    async with api.client() as client:
        talk = await client.conversations.create()
        first = await client.responses.create(input=opening, conversation=talk.id, **short)
        await api.until_saved(first)
        before = await list_items(client, talk)
        begun, number = await begin_and_follow(
            client, conversation=talk.id, **{**long, "input": "Go on."}
        )
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        await api.service.kill()
    await api.start()
    async with api.client() as client:
        for _ in range(2):  # for each request, however often
            found = await client.responses.retrieve(begun.id)
            assert (found.status, found.output, found.background) == ("failed", [], True)
            assert found.error.message == str(response_stopped())
        stream = await client.responses.retrieve(begun.id, stream=True, starting_after=number)
        (end,) = [event async for event in stream]
        assert (end.type, end.sequence_number) == ("response.failed", number + 1)
        assert end.response.error == found.error
        with pytest.raises(openai.BadRequestError, match="has failed"):
            await client.responses.create(input="?", previous_response_id=begun.id, **short)
        assert await list_items(client, talk) == before
        again = await client.responses.create(input="Go on.", conversation=talk.id, **short)
        assert again.usage.input_tokens_details.cached_tokens > 0
        assert len(await list_items(client, talk)) == len(before) + 2
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_kvd_is_killed(api, long):
    """The response completes as without a kill, and can be followed with and without kvd."""
    async with api.client() as client:
        whole = await client.responses.create(**long)
        begun, _ = await begin_and_follow(client, **long)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        await api.kvd.kill()
        try:
            ended = await until_over(client, begun)
            assert (ended.status, ended.usage.output_tokens) == ("incomplete", LONG)
            assert ended.output_text == whole.output_text
            more = {"model": MODEL, "input": "More?", "max_output_tokens": 8}
            alone = await client.responses.create(previous_response_id=ended.id, **more)
        finally:  # other tests use the same one
            await api.kvd.start()
        await api.until_attached()
        back = await client.responses.create(previous_response_id=alone.id, **more)
        assert back.usage.input_tokens > alone.usage.input_tokens
