"""Chats that are stored at their clients' request, by the official client."""

import openai
import pytest

from tests.http_api.conftest import MODEL, name_of


async def test_a_chat_is_stored_on_request(api, opening):
    """It can be retrieved, listed, updated and deleted; its session stays, as of any chat."""
    client = api.client()
    options = {"model": MODEL, "messages": opening, "max_tokens": 6}
    notes = {"case": name_of(opening)}
    made = await client.chat.completions.create(store=True, metadata=notes, **options)
    silent = await client.chat.completions.create(metadata=notes, **options)
    unstored = await client.chat.completions.create(store=False, **options)
    for one in (silent, unstored):
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.retrieve(one.id)
        assert (refused.value.code, "store: true" in refused.value.message) == (
            "chat_not_found",
            True,
        )
    found = await client.chat.completions.retrieve(made.id)
    assert found.choices[0].message == made.choices[0].message
    assert (found.usage, found.metadata) == (made.usage, notes)
    listed = [one async for one in client.chat.completions.list(metadata=notes, model=MODEL)]
    assert [one.id for one in listed] == [made.id]
    asked = [one async for one in client.chat.completions.messages.list(made.id, limit=1)]
    assert [one.content for one in asked] == [message["content"] for message in opening]
    assert [one.role for one in asked] == ["system", "user"]
    updated = await client.chat.completions.update(made.id, metadata={"case": "other"})
    assert updated.metadata == {"case": "other"}
    assert [one async for one in client.chat.completions.list(metadata=notes)] == []
    deleted = await client.chat.completions.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for gone in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            await gone(made.id)
    assert await api.num_turns(made.session_id) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_chat_is_stored_whole(api, opening, n):
    """By the end of the stream."""
    client = api.client()
    options = {"model": MODEL, "messages": opening, "max_tokens": 6, "n": n, "store": True}
    stream = await client.chat.completions.create(stream=True, **options)
    said = [""] * n
    async for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            is_over = choice.finish_reason
    assert is_over
    found = await client.chat.completions.retrieve(chunk.id)
    assert [choice.message.content for choice in found.choices] == said
    async with api.service.client() as grpc_client:
        await grpc_client.delete_session(found.session_id, tenant="acme")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.retrieve(chunk.id)


async def test_a_stored_chat_belongs_to_its_tenant(api, opening):
    """Other tenants cannot retrieve, list, change or delete it."""
    made = await api.client().chat.completions.create(
        model=MODEL, messages=opening, max_tokens=2, store=True
    )
    other = api.client("globex")
    calls = other.chat.completions
    for refused in (
        calls.retrieve(made.id),
        calls.delete(made.id),
        calls.update(made.id, metadata={}),
        calls.messages.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    assert made.id not in [one.id async for one in calls.list(limit=100)]


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"order": "up"}, {"after": "chatcmpl-none"}, {"extra_query": {"x": 1}}]
)
async def test_bad_list_parameters_are_refused(api, query):
    """The error names the parameter."""
    with pytest.raises(openai.BadRequestError) as refused:
        await api.client().chat.completions.list(**query)
    assert refused.value.param in {"limit", "order", "after", "x"}
