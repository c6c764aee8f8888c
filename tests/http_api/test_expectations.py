"""What kvd is told of sessions: tools that an answer calls, and edits that leave one behind."""

import pytest

from tests.http_api.conftest import MODEL, ApiService, name_of, said
from tests.http_api.test_messages import calling, client_of, prompt_of
from tests.http_api.test_misses import chatted, edited, grown
from tests.http_api.test_tools import CHAT_TOOLS, THE_ONE, TOOLS, answered
from tests.inference_processes import wait_kvd_state
from tests.kvd_polling import eventually, reader_stats, sessions_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORCED = {"model": MODEL, "tools": CHAT_TOOLS, "tool_choice": THE_ONE, "max_tokens": 80}
LONG = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}  # longer than anybody waits for
SUB_AGENT = {"X-Claude-Code-Agent-Id": "helper"}


async def info_of(api, answer):
    """What kvd has of an answer's session."""
    name = answer.model_extra["session_id"]
    found = {info.session.session_id: info for info in await sessions_of(api.kvd)}
    return found[name]


async def awaited(api, answer):
    return list((await info_of(api, answer)).awaited_tools)


async def is_superseded(api, answer):
    return (await info_of(api, answer)).superseded


async def counts(api, *names):
    stats = await reader_stats(api.kvd)
    return [sum(layout.counters[name] for layout in stats.layouts) for name in names]


async def test_a_chat_awaits_the_tools_that_it_calls(api, opening):
    """Until their results come, which kvd counts as a return from DRAM.

    Their turn runs until kvd has heard of it: of one that comes and goes between two reports of the
    queue nothing is counted.
    """
    client = api.client()
    first = await client.chat.completions.create(messages=opening, **FORCED)
    await eventually(lambda: awaited(api, first), ["look_up"])
    before = await counts(api, "returns_dram", "tool_returns_dram")
    messages = answered(opening, first.choices[0].message)
    returns = [n + 1 for n in before]
    async with await client.chat.completions.create(
        messages=messages, model=MODEL, tools=CHAT_TOOLS, tool_choice="none", stream=True, **LONG
    ) as second:
        chunk = await anext(aiter(second))
        assert chunk.model_extra["session_id"] == first.model_extra["session_id"]
        await eventually(lambda: counts(api, "returns_dram", "tool_returns_dram"), returns)
    assert await awaited(api, first) == []


async def test_so_does_a_response(api, opening):
    """Streamed, too; in its conversation or not."""
    options = {"model": MODEL, "tools": TOOLS, "max_output_tokens": 80}
    options["tool_choice"] = {"type": "function", "name": "look_up"}
    async with api.client() as client:
        first = await client.responses.create(input=opening, **options)
        await eventually(lambda: awaited(api, first), ["look_up"])
        conversation = await client.conversations.create()
        async with client.responses.stream(
            input=opening, conversation=conversation.id, **options
        ) as stream:
            _ = [event async for event in stream]
        found = {info.session.session_id: info for info in await sessions_of(api.kvd)}
        assert conversation.id in found

        async def tools():
            infos = {info.session.session_id: info for info in await sessions_of(api.kvd)}
            return list(infos[conversation.id].awaited_tools)

        await eventually(tools, ["look_up"])


async def test_so_does_a_message(api, opening):
    async with client_of(api) as client:
        choice = {"type": "tool", "name": "look_up"}
        message = await client.messages.create(**calling(prompt_of(opening), choice))
        await eventually(lambda: awaited(api, message), ["look_up"])


async def test_an_answer_that_calls_nothing_awaits_nothing(api, opening):
    """Another one, which comes later, does: it is the only one of which anything is told."""
    async with api.client() as client:
        before = await api.counter("expectations")
        answer = await chatted(client, opening)
        other = await client.chat.completions.create(
            messages=[*opening[:1], {"role": "user", "content": "Something else."}], **FORCED
        )
        await eventually(lambda: awaited(api, other), ["look_up"])
        assert await awaited(api, answer) == []
        assert await api.counter("expectations") == before + 1


async def test_an_edited_conversation_supersedes_the_session_before(api, opening):
    """Until that is used again; each further edit leaves the one before it."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        await api.until_saved(first)
        second = await chatted(client, edited(messages, 3, "Another question altogether."))
        await eventually(lambda: is_superseded(api, first), wanted=True)
        await api.until_saved(second)
        again = await chatted(client, messages)
        assert again.model_extra["session_id"] == first.model_extra["session_id"]
        await eventually(lambda: is_superseded(api, first), wanted=False)
        assert not await is_superseded(api, second)


async def test_branches_of_a_conversation_live(api, opening):
    """One that goes back, one that began alike, a sub-agent's, and one whose client named it."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        await api.until_saved(first)
        await chatted(client, messages[:4])
        await chatted(client, edited(messages, 1, "What was kept?")[:6])
        changed = edited(messages, 3, "Another question altogether.")
        await chatted(client, changed, extra_headers=SUB_AGENT)
        named = {"session_id": name_of(opening), "ignore_eos": True}
        mine = await chatted(client, opening, extra_body=named)
        answer = mine.choices[0].message.content
        await api.until_saved(mine)
        asked = [{"role": "system", "content": "Be brief."}, *said(opening, answer)[1:]]
        await chatted(client, asked)
        last = await client.chat.completions.create(messages=opening, **FORCED)
        await eventually(lambda: awaited(api, last), ["look_up"])  # what was to be told is told
        assert not await is_superseded(api, first)
        assert not await is_superseded(api, mine)
        await chatted(client, edited(messages, 1, "What is kept, and why?"))
        await eventually(lambda: is_superseded(api, first), wanted=True)


async def test_hints_are_lost_without_kvd_and_nothing_else(tiny_model, tmp_path):
    """A kvd that was killed has forgotten them; the next turn's come to the one that is back."""
    api = ApiService(tiny_model, tmp_path)
    await api.kvd.start()
    try:
        await api.start()
        opening = [{"role": "user", "content": "What is kept? " * 60}]
        async with api.client() as client, api.service.client() as service:
            first = await client.chat.completions.create(messages=opening, **FORCED)
            await eventually(lambda: awaited(api, first), ["look_up"])
            await api.kvd.kill()
            await wait_kvd_state(service, "detached")
            messages = answered(opening, first.choices[0].message)
            second = await client.chat.completions.create(messages=messages, **FORCED)
            await eventually(lambda: api.counter("expectations_lost"), 1)
            await api.kvd.start()
            await wait_kvd_state(service, "attached")
            messages = answered(messages, second.choices[0].message)
            third = await client.chat.completions.create(messages=messages, **FORCED)
            assert third.model_extra["session_id"] == first.model_extra["session_id"]
            await eventually(lambda: awaited(api, third), ["look_up"])
    finally:
        await api.service.stop()
        await api.kvd.stop()
