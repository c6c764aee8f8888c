"""Responses in the background, by the official client: polled, followed and cancelled."""

import asyncio

import openai
import pytest

from tests.http_api.conftest import MODEL

LONG = 2000  # tokens: long enough that no test waits for its end


async def until_over(client, response):
    """Poll a response as the vendor's guide does."""
    async with asyncio.timeout(60):
        while response.status in {"queued", "in_progress"}:
            await asyncio.sleep(0.01)
            response = await client.responses.retrieve(response.id)
    return response


def long(opening):
    return {
        "model": MODEL,
        "input": opening,
        "background": True,
        "max_output_tokens": LONG,
        "extra_body": {"ignore_eos": True},
        "truncation": "auto",
    }


async def test_a_response_is_polled(api, opening):
    """The response exists at once and completes without a client; the next one follows it."""
    client = api.client()
    options = {"model": MODEL, "input": opening, "max_output_tokens": 8}
    begun = await client.responses.create(background=True, metadata={"a": "b"}, **options)
    assert begun.status in {"queued", "in_progress"}
    assert (begun.background, begun.output, begun.metadata) == (True, [], {"a": "b"})
    ended = await until_over(client, begun)
    whole = await client.responses.create(**options)
    assert ended.output_text == whole.output_text
    assert (ended.status, ended.background) == (whole.status, True)
    after = await client.responses.create(
        model=MODEL, input="More?", previous_response_id=begun.id, max_output_tokens=4
    )
    assert after.usage.input_tokens_details.cached_tokens > 0
    again = await client.responses.cancel(begun.id)  # it has ended: nothing changes
    assert again.output == ended.output
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_response_is_cancelled(api, opening):
    """Cancelling twice equals once; until then it cannot be followed, then nothing is left."""
    client = api.client()
    begun = await client.responses.create(**long(opening))
    with pytest.raises(openai.ConflictError) as refused:
        await client.responses.create(model=MODEL, input="?", previous_response_id=begun.id)
    assert refused.value.code == "response_not_complete"
    for _ in range(2):
        cancelled = await client.responses.cancel(begun.id)
        assert (cancelled.id, cancelled.status, cancelled.output) == (begun.id, "cancelled", [])
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="was cancelled") as refused:
        await client.responses.create(model=MODEL, input="?", previous_response_id=begun.id)
    assert refused.value.code == "response_without_answer"
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="ended without any") as refused:
        await client.responses.input_items.list(begun.id)
    assert refused.value.code == "input_not_kept"
    other = api.client("globex").responses
    for call in (other.retrieve, other.cancel, other.delete, other.input_items.list):
        with pytest.raises(openai.NotFoundError) as refused:
            await call(begun.id)
        assert refused.value.code == "response_not_found"
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(begun.id)


async def test_deleting_a_running_response_cancels_it(api, opening):
    """Deleting a running response cancels it."""
    client = api.client()
    begun = await client.responses.create(**long(opening))
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_stream_resumes_after_any_event(api, opening):
    """A stream resumes after any event number, during the response and after its end."""
    client = api.client()
    options = {"model": MODEL, "input": opening, "max_output_tokens": 12, "background": True}
    events = [event async for event in await client.responses.create(stream=True, **options)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    final = events[-1].response
    for after in (None, 0, 5, len(events) - 2, len(events)):
        more = {} if after is None else {"starting_after": after}
        stream = await client.responses.retrieve(final.id, stream=True, **more)
        again = [event async for event in stream]
        assert again == events[0 if after is None else after + 1 :], after
    begun = await client.responses.create(**long(opening))
    stream = await client.responses.retrieve(begun.id, stream=True)
    followed = []
    async for event in stream:
        followed.append(event)
        if len(followed) == 8:
            await client.responses.cancel(begun.id)
    assert [event.sequence_number for event in followed] == list(range(len(followed)))
    assert (followed[-1].type, followed[-1].response.status) == ("response.failed", "cancelled")
    for after in (0, len(followed) - 2):  # written text is not kept: the final event follows
        stream = await client.responses.retrieve(begun.id, stream=True, starting_after=after)
        again = [event async for event in stream]
        assert again[0].sequence_number == after + 1
        assert again[-1].sequence_number == max(3, after + 1)
        assert (again[-1].type, again[-1].response.status) == ("response.failed", "cancelled")


async def test_a_stored_response_is_streamed(api, opening):
    """A stored response that was not in the background can be streamed from its start only."""
    client = api.client()
    made = await client.responses.create(model=MODEL, input=opening, max_output_tokens=6)
    events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
    assert events[-1].response.output == made.output
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.retrieve(made.id, stream=True, starting_after=1)
    assert refused.value.param == "starting_after"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.cancel(made.id)
    assert "background: true" in refused.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"top_logprobs": 1},
        {"include": ["message.output_text.logprobs"]},
        {"max_output_tokens": 8, "text": {"format": {"type": "json_schema", "name": "n"}}},
    ],
)
async def test_requests_that_cannot_run_in_the_background_are_refused(api, opening, fields):
    """Such a request is refused at once, with a status."""
    with pytest.raises(openai.BadRequestError):
        await api.client().responses.create(model=MODEL, input=opening, background=True, **fields)


async def test_what_the_engine_refuses_is_refused_at_once(api):
    """Tenant limits are refused at once; later failures mark the response as failed."""
    client = api.client("slow")
    options = {"model": MODEL, "input": "Hi", "max_output_tokens": 2, "background": True}
    for _ in range(2):
        await until_over(client, await client.responses.create(**options))
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(**options)
    failed = await api.client().responses.create(
        model=MODEL,
        input="Hi",
        background=True,
        extra_body={"structured_outputs": {"grammar": "start: nothing"}},
    )
    failed = await until_over(api.client(), failed)
    assert (failed.status, failed.error.code) == ("failed", "invalid_grammar")


async def test_a_background_response_locks_its_conversation(api, opening):
    """A conversation is locked until its background response has ended."""
    client = api.client()
    conversation = await client.conversations.create()
    begun = await client.responses.create(conversation=conversation.id, **long(opening))
    with pytest.raises(openai.ConflictError):
        await client.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": "?"}]
        )
    await client.responses.cancel(begun.id)
    short = {"model": MODEL, "input": opening, "max_output_tokens": 4}
    begun = await client.responses.create(conversation=conversation.id, background=True, **short)
    ended = await until_over(client, begun)
    items = await client.conversations.items.list(conversation.id, limit=1)
    assert items.data[0].content[0].text == ended.output_text
