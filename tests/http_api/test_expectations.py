"""Hints that kvd gets about sessions: awaited tool results, and superseded sessions."""

import pytest

from tests.http_api.conftest import MODEL, ApiService, name_of, next_messages
from tests.http_api.test_messages import calling, client_of, prompt_of
from tests.http_api.test_misses import edit_message, grown, send_chat
from tests.http_api.test_tools import CHAT_TOOLS, THE_ONE, TOOLS, return_results
from tests.inference_processes import wait_kvd_state
from tests.kvd_polling import eventually, reader_stats, sessions_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORCED = {"model": MODEL, "tools": CHAT_TOOLS, "tool_choice": THE_ONE, "max_tokens": 80}
LONG = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}  # longer than any test waits
SUB_AGENT = {"X-Claude-Code-Agent-Id": "helper"}


async def info_of(api, answer):
    """Return kvd's information about an answer's session, once kvd has it."""
    name = answer.model_extra["session_id"]

    async def found():
        return [info for info in await sessions_of(api.kvd) if info.session.session_id == name]

    async def is_there():
        return bool(await found())

    await eventually(is_there, wanted=True)
    return (await found())[0]


async def awaited_tools_of(api, answer):
    return list((await info_of(api, answer)).awaited_tools)


async def is_superseded(api, answer):
    return (await info_of(api, answer)).superseded


async def counts(api, *names):
    stats = await reader_stats(api.kvd)
    return [sum(layout.counters[name] for layout in stats.layouts) for name in names]


async def test_a_chat_with_calls_awaits_their_results(api, opening):
    """The session is awaited until the results come, which kvd counts as a return from DRAM.

    Each turn lasts until kvd has its hint: a session that comes and goes between two reports of the
    queue is not counted.
    """
    client = api.client()
    first = await client.chat.completions.create(messages=opening, **FORCED)
    await eventually(lambda: awaited_tools_of(api, first), ["look_up"])
    before = await counts(api, "returns_dram", "tool_returns_dram")
    messages = return_results(opening, first.choices[0].message)
    returns = [n + 1 for n in before]
    async with await client.chat.completions.create(
        messages=messages, model=MODEL, tools=CHAT_TOOLS, tool_choice="none", stream=True, **LONG
    ) as second:
        chunk = await anext(aiter(second))
        assert chunk.model_extra["session_id"] == first.model_extra["session_id"]
        await eventually(lambda: counts(api, "returns_dram", "tool_returns_dram"), returns)
    assert await awaited_tools_of(api, first) == []


async def test_a_response_with_calls_awaits_their_results(api, opening):
    """Streamed, too; in a conversation or not."""
    options = {"model": MODEL, "tools": TOOLS, "max_output_tokens": 80}
    options["tool_choice"] = {"type": "function", "name": "look_up"}
    async with api.client() as client:
        first = await client.responses.create(input=opening, **options)
        await eventually(lambda: awaited_tools_of(api, first), ["look_up"])
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


async def test_a_message_with_calls_awaits_their_results(api, opening):
    async with client_of(api) as client:
        choice = {"type": "tool", "name": "look_up"}
        message = await client.messages.create(**calling(prompt_of(opening), choice))
        await eventually(lambda: awaited_tools_of(api, message), ["look_up"])


async def test_an_answer_without_calls_awaits_nothing(api, opening):
    """A later answer with a call is the only one that is hinted."""
    async with api.client() as client:
        before = await api.counter("expectations")
        answer = await send_chat(client, opening)
        other = await client.chat.completions.create(
            messages=[*opening[:1], {"role": "user", "content": "Something else."}], **FORCED
        )
        await eventually(lambda: awaited_tools_of(api, other), ["look_up"])
        assert await awaited_tools_of(api, answer) == []
        assert await api.counter("expectations") == before + 1


async def test_an_edited_conversation_supersedes_its_previous_session(api, opening):
    """Until the session is used again; each further edit supersedes the previous one."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        await api.until_saved(first)
        second = await send_chat(client, edit_message(messages, 3, "Another question altogether."))
        await eventually(lambda: is_superseded(api, first), wanted=True)
        await api.until_saved(second)
        again = await send_chat(client, messages)
        assert again.model_extra["session_id"] == first.model_extra["session_id"]
        await eventually(lambda: is_superseded(api, first), wanted=False)
        assert not await is_superseded(api, second)


async def test_branches_of_a_conversation_are_not_superseded(api, opening):
    """An earlier turn, a common beginning, a sub-agent, and a named session are all kept."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        await api.until_saved(first)
        await send_chat(client, messages[:4])
        await send_chat(client, edit_message(messages, 1, "What was kept?")[:6])
        changed = edit_message(messages, 3, "Another question altogether.")
        await send_chat(client, changed, extra_headers=SUB_AGENT)
        named = {"session_id": name_of(opening), "ignore_eos": True}
        mine = await send_chat(client, opening, extra_body=named)
        answer = mine.choices[0].message.content
        await api.until_saved(mine)
        asked = [{"role": "system", "content": "Be brief."}, *next_messages(opening, answer)[1:]]
        await send_chat(client, asked)
        last = await client.chat.completions.create(messages=opening, **FORCED)
        await eventually(
            lambda: awaited_tools_of(api, last), ["look_up"]
        )  # all hints have been sent
        assert not await is_superseded(api, first)
        assert not await is_superseded(api, mine)
        await send_chat(client, edit_message(messages, 1, "What is kept, and why?"))
        await eventually(lambda: is_superseded(api, first), wanted=True)


async def test_without_kvd_only_hints_are_lost(tiny_model, tmp_path):
    """A restarted kvd has no hints; those of the next turn reach it."""
    api = ApiService(tiny_model, tmp_path)
    await api.kvd.start()
    try:
        await api.start()
        opening = [{"role": "user", "content": "What is kept? " * 60}]
        async with api.client() as client, api.service.client() as service:
            first = await client.chat.completions.create(messages=opening, **FORCED)
            await eventually(lambda: awaited_tools_of(api, first), ["look_up"])
            await api.kvd.kill()
            await wait_kvd_state(service, "detached")
            messages = return_results(opening, first.choices[0].message)
            second = await client.chat.completions.create(messages=messages, **FORCED)
            await eventually(lambda: api.counter("expectations_lost"), 1)
            await api.kvd.start()
            await wait_kvd_state(service, "attached")
            messages = return_results(messages, second.choices[0].message)
            third = await client.chat.completions.create(messages=messages, **FORCED)
            assert third.model_extra["session_id"] == first.model_extra["session_id"]
            await eventually(lambda: awaited_tools_of(api, third), ["look_up"])
    finally:
        await api.service.stop()
        await api.kvd.stop()
