"""The cache lifetime that clients request protects sessions from kvd's eviction."""

import uuid

import anthropic
import openai
import pytest

from tests.http_api.conftest import MODEL, ApiService
from tests.http_api.test_messages import LOOK_UP, ask, client_of, going_on
from tests.inference_processes import wait_kvd_state
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOUR, MINUTES = ({"type": "ephemeral", "ttl": ttl} for ttl in ("1h", "5m"))
SMALL = ("--dram", "3MB", "--ssd", "3MB")  # about four sessions of those below
PREFIX = "prefix-"


def block(text, control=None):
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


def system_text():
    """Return a new text that is long enough for whole blocks."""
    return f"This is {uuid.uuid4().hex}. " + "Keys and values are kept. " * 40


def prompt_with(of_system=None, of_message=None, text=""):
    """Return a new conversation with cache settings at different places."""
    question = block(f"What is kept of {uuid.uuid4().hex}?", of_message)
    return {
        "system": [block(text or system_text(), of_system)],
        "messages": [{"role": "user", "content": [question]}],
    }


async def wishes(api):
    """Return how long each session is retained."""
    return {info.session.session_id: info.retain_s for info in await sessions_of(api.kvd)}


async def retention_of(api, session_id):
    return (await wishes(api)).get(session_id, 0)


async def of_prefixes(api):
    """Return what kvd has of sessions that are prefixes."""
    infos = await sessions_of(api.kvd)
    return {i.session.session_id: i for i in infos if i.session.session_id.startswith(PREFIX)}


async def num_retentions(api):
    return sum(layout.counters["retentions"] for layout in (await reader_stats(api.kvd)).layouts)


async def until_saved(api, message):
    """Return when kvd has what an answer's turn computed."""
    usage, session_id = message.usage, message.model_extra["session_id"]
    asked = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens

    async def is_saved():
        stored = {i.session.session_id: i.num_tokens for i in await sessions_of(api.kvd)}
        return stored.get(session_id, 0) >= asked + usage.output_tokens - 1

    await eventually(is_saved, wanted=True)


async def test_a_message_sets_the_retention_of_its_session(api):
    """One breakpoint, or the top-level one; without any, kvd gets no hint."""
    async with client_of(api) as client:
        quiet = await ask(client, prompt_with())
        for prompt, seconds, options in (
            (prompt_with(of_message=MINUTES), 300, {}),
            (prompt_with(of_message=HOUR), 3600, {}),
            (prompt_with(), 300, {"cache_control": {"type": "ephemeral"}}),
        ):
            message = await ask(client, prompt, **options)
            session_id = message.model_extra["session_id"]
            await eventually(lambda name=session_id: retention_of(api, name), seconds)
            later = await ask(client, going_on(prompt, message))
            assert later.model_extra["session_id"] == session_id
    assert await retention_of(api, quiet.model_extra["session_id"]) == 0


async def test_common_beginnings_are_retained_separately(api):
    """A common beginning has its own retention, is kept once, and the next session finds it."""
    before, text = await of_prefixes(api), system_text()
    tools = [{**LOOK_UP, "cache_control": HOUR}]
    async with client_of(api) as client:
        first = await ask(client, prompt_with(MINUTES, None, text), tools=tools)
        await eventually(lambda: num_new(api, before), 1)
        second = await ask(client, prompt_with(HOUR, MINUTES, text), tools=tools)
        await eventually(lambda: retention_of(api, second.model_extra["session_id"]), 300)
    (prefix,) = [info for name, info in (await of_prefixes(api)).items() if name not in before]
    assert (prefix.retain_s, prefix.ttl_s) == (3600, 3600)
    assert prefix.num_blocks == prefix.shared_blocks >= 2
    assert second.usage.cache_read_input_tokens >= prefix.num_tokens
    created = second.usage.cache_creation
    assert created.ephemeral_1h_input_tokens == second.usage.cache_creation_input_tokens > 0
    assert await retention_of(api, first.model_extra["session_id"]) == 0


async def num_new(api, before):
    return len((await of_prefixes(api)).keys() - before)


async def test_openais_cache_options_set_the_retention(api):
    """The options, the older member, and the settings' default."""
    messages = [{"role": "user", "content": system_text()}]
    async with api.client() as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, prompt_cache_options={"ttl": "30m"}
        )
        response = await client.responses.create(
            model=MODEL,
            input=system_text(),
            max_output_tokens=8,
            extra_body={"prompt_cache_retention": "24h"},
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=MODEL, messages=messages, extra_body={"prompt_cache_options": {"ttl": "soon"}}
            )
    assert refused.value.param == "prompt_cache_options.ttl"
    await eventually(lambda: retention_of(api, chat.model_extra["session_id"]), 1800)
    await eventually(lambda: retention_of(api, response.model_extra["session_id"]), 3600)


async def test_a_bad_retention_is_refused_in_anthropics_form(api):
    """Before anything is computed."""
    async with client_of(api) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"cache_control\.ttl"):
            await ask(client, prompt_with(), cache_control={"type": "ephemeral", "ttl": "2h"})


async def test_a_retained_session_outlives_others(tiny_model, tmp_path):
    """On a small SSD, over restarts of kvd: a session, and the common beginning of another."""
    api = ApiService(tiny_model, tmp_path, SMALL, keep="none")
    await api.kvd.start()
    try:
        await api.start()
        text = system_text()
        prompts = [prompt_with(of_message=HOUR), prompt_with(), prompt_with(HOUR, None, text)]
        async with client_of(api) as client:
            messages = [await ask(client, prompt) for prompt in prompts]
        await eventually(lambda: num_retentions(api), 2)
        await all_clean(api.kvd)
        kept, other, beginner = (message.model_extra["session_id"] for message in messages)
        (prefix,) = await of_prefixes(api)
        await api.kvd.stop()
        await api.kvd.start()
        async with api.service.client() as client:
            await wait_kvd_state(client, "attached")
        found = await wishes(api)
        assert [found[name] for name in (kept, other, beginner, prefix)] == [3600, 0, 0, 3600]
        async with client_of(api) as client:
            for _ in range(12):
                await until_saved(api, await ask(client, prompt_with()))
        await api.service.stop()  # with the KV in its own memory
        await api.kvd.kill()  # and what was still to be written
        await api.kvd.start()
        await api.start()
        stored = await wishes(api)
        assert {kept, prefix} <= stored.keys()
        assert other not in stored
        async with client_of(api) as client:
            again = [
                await ask(client, going_on(prompt, message))
                for prompt, message in zip(prompts[:2], messages, strict=False)
            ]
            begun = await ask(client, prompt_with(text=text))
        cached = [message.usage.cache_read_input_tokens for message in (*again, begun)]
        assert cached[0] >= messages[0].usage.cache_creation_input_tokens
        assert cached[1] == 0
        assert cached[2] > 0
    finally:
        await api.service.stop()
        await api.kvd.stop()


async def test_without_kvd_nothing_fails(tiny_model, tmp_path):
    """Such a hint is lost with the unsaved rest; the next turn's hint takes effect."""
    api = ApiService(tiny_model, tmp_path, SMALL)
    await api.kvd.start()
    try:
        await api.start()
        await api.kvd.kill()
        async with api.service.client() as client:
            await wait_kvd_state(client, "detached")
        prompt = prompt_with(HOUR, HOUR)
        async with client_of(api) as client:
            message = await ask(client, prompt)
            await api.kvd.start()
            async with api.service.client() as service:
                await wait_kvd_state(service, "attached")
            assert await num_retentions(api) == 0
            await ask(client, going_on(prompt, message))
        session_id = message.model_extra["session_id"]
        await eventually(lambda: retention_of(api, session_id), 3600)
    finally:
        await api.service.stop()
        await api.kvd.stop()
