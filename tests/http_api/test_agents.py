"""Requests as agents send them: session names in headers, and conversations that end."""

from tests.http_api.conftest import MODEL, name_of, next_messages

NAMES = {"X-Session-Id": "ses_1", "X-Parent-Session-Id": "ses_0"}


async def test_conversations_that_share_a_name_have_separate_sessions(api, opening):
    """An agent sends one name for its title request, too: the history decides the session."""
    options = {"model": MODEL, "max_tokens": 8, "extra_headers": NAMES}
    async with api.client() as client:
        create = client.chat.completions.create
        title = await create(messages=[{"role": "user", "content": "A title."}], **options)
        first = await create(messages=opening, **options)
        assert first.model_extra["session_id"] != title.model_extra["session_id"]
        more = next_messages(opening, first.choices[0].message.content)
        second = await create(messages=more, **options)
        assert second.model_extra["session_id"] == first.model_extra["session_id"]
    logged = api.service.log_path.read_text().splitlines()
    lines = [
        line for line in logged if '"conversation": "ses_1"' in line and "http_request" in line
    ]
    assert len(lines) == 3
    assert all('"parent": "ses_0"' in line for line in lines)


async def test_an_agents_end_of_conversation_deletes_its_session(api, opening):
    """The turn is answered in its own session, which is then deleted, and no other one."""
    options = {"model": MODEL, "max_tokens": 8}
    async with api.client() as client:
        create = client.chat.completions.create
        first = await create(messages=opening, **options)
        other = await create(messages=opening, **options)
        session_id = other.model_extra["session_id"]
        more = next_messages(opening, other.choices[0].message.content)
        final = {"X-Dynamo-Session-Final": "true"}
        last = await create(messages=more, extra_headers=final, **options)
        assert last.model_extra["session_id"] == session_id
        assert last.usage.prompt_tokens_details.cached_tokens > 0
        assert await api.num_turns(session_id) == -1
        assert await api.num_turns(first.model_extra["session_id"]) == 1


async def test_a_cache_key_names_a_session_only_for_trusted_clients(api, opening):
    """For a trusted client only new messages are sent; for others the key is only a hint."""
    key = name_of(opening)
    options = {"model": MODEL, "max_tokens": 8, "prompt_cache_key": key}
    async with api.client("keyed") as client:
        first = await client.chat.completions.create(messages=opening, **options)
        second = await client.chat.completions.create(messages=opening[1:], **options)
    assert [one.model_extra["session_id"] for one in (first, second)] == [key, key]
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert await api.num_turns(key, tenant="keyed") == 2
    async with api.client() as client:
        other = await client.chat.completions.create(messages=opening, **options)
    assert other.model_extra["session_id"] != key
