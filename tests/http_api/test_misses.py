"""Conversations that come back in other words: what of them is computed again, and why."""

import asyncio
import json
import sys

import pytest

from shared.types.errors import NotFoundError
from tests.http_api.conftest import CLIENTS, MODEL, said

LENGTH = 8
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "write", "search")
]


async def chatted(client, messages, **options):
    options = {"max_tokens": LENGTH, "extra_body": {"ignore_eos": True}, **options}
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


async def grown(client, messages, num_turns=3, **options):
    """A conversation of some turns, ready for the next one; and its last answer."""
    for number in range(num_turns):
        answer = await chatted(client, messages, **options)
        text = answer.choices[0].message.content
        messages = said(messages, text, f"And then, for the {number}th time? " + "Say more. " * 8)
    return messages, answer


def edited(messages, place, content):
    return [
        {**message, "content": content} if index == place else message
        for index, message in enumerate(messages)
    ]


def missed(answer):
    """What the usage says of a miss; all of it has a cost."""
    extra = answer.usage.model_extra
    found = extra["cache_miss"]
    assert 0 < found["lost_tokens"] <= answer.usage.prompt_tokens
    assert found["lost_s"] > 0
    return extra["cache_miss_reason"], found


async def test_a_conversation_that_goes_on_misses_nothing(api, opening):
    """Nor does one that begins, or that goes back to an earlier answer."""
    async with api.client() as client:
        messages, _ = await grown(client, opening)
        again = await chatted(client, messages)
        back = await chatted(client, messages[:4])
        assert not {"cache_miss", "cache_miss_reason"} & {
            *again.usage.model_extra,
            *back.usage.model_extra,
        }


@pytest.mark.parametrize(
    ("place", "change", "cause"),
    [
        (3, lambda text: "Another question altogether.", "message_edited"),
        (4, lambda text: "An answer that nobody gave.", "answer_edited"),
        (0, lambda text: "Be brief. " + text, "system_changed"),
        (0, lambda text: text.replace("17 Nov", "18 Nov"), "date_changed"),
        (0, lambda text: text.replace("09:41", "10:02"), "date_changed"),
        (3, lambda text: text.replace("0th", "7th"), "message_edited"),
    ],
)
async def test_what_was_edited_is_named(api, opening, place, change, cause):
    """With the message that differs, and the session that it resembles."""
    opening[0]["content"] += " Today is Mon 17 Nov 2026, 09:41."
    async with api.client() as client:
        messages, first = await grown(client, opening)
        other = edited(messages, place, change(messages[place]["content"]))
        assert other != messages
        answer = await chatted(client, other)
        found, miss = missed(answer)
        assert (found, miss["message_index"]) == (cause, place)
        assert miss["session_id"] == first.model_extra["session_id"]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached <= miss["token_index"]
        assert cached + miss["lost_tokens"] <= answer.usage.prompt_tokens
        onward = await chatted(client, said(other, answer.choices[0].message.content))
        assert "cache_miss" not in onward.usage.model_extra


async def test_tools(api, opening):
    """In another order, or others."""
    async with api.client() as client:
        messages, _ = await grown(client, opening, tools=TOOLS)
        reordered = await chatted(client, messages, tools=TOOLS[::-1])
        fewer = await chatted(client, messages, tools=TOOLS[:2])
        assert missed(reordered)[0] == "tools_reordered"
        assert missed(fewer)[0] == "tools_changed"


async def test_sessions_that_are_gone(api, opening):
    """And answers that were never given here."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        async with api.service.client() as service:
            await service.delete_session(first.model_extra["session_id"], tenant="acme")
        reason, miss = missed(await chatted(client, messages))
        assert (reason, miss["session_id"], miss["token_index"]) == ("session_gone", None, None)
        stranger = said(opening, "Nobody ever gave this answer.")
        assert missed(await chatted(client, stranger))[0] == "history_unknown"


async def test_nobody_resembles_another_tenants_conversation(api, opening):
    """Whatever it says: who asks must not learn what others talk about."""
    async with api.client() as client, api.client("small") as other:
        messages, _ = await grown(client, opening)
        changed = edited(messages, 3, "Another question altogether.")
        reason, miss = missed(await chatted(other, changed))
        assert (reason, miss["session_id"]) == ("history_unknown", None)


async def test_the_texts_that_differ(api, opening, tmp_path):
    """As the command shows them: to the tenant, and to nobody else."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        answer = await chatted(client, edited(messages, 3, "Another question altogether."))
        _, miss = missed(answer)
        session_id = answer.model_extra["session_id"]
    async with api.service.client() as service:
        explained = await service.explain_miss(session_id, tenant="acme")
        assert explained.miss.session_id == first.model_extra["session_id"]
        assert explained.miss.token_index == miss["token_index"]
        assert explained.common.endswith("user\nAn")
        assert explained.was.startswith("d then, for the 0th time?")
        assert explained.now.startswith("other question altogether.")
        with pytest.raises(NotFoundError, match="none of its turns has missed"):
            await service.explain_miss(first.model_extra["session_id"], tenant="acme")
        with pytest.raises(NotFoundError, match="turn 99 has not missed"):
            await service.explain_miss(session_id, turn=99, tenant="acme")
    token = tmp_path / "token"
    for name, code in (("acme", 0), ("small", 3)):
        token.write_text(CLIENTS[name])
        token.chmod(0o600)
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inference_svc.cli.main", "why", session_id, "--json"),
            *("--address", api.service.address, "--token-file", token),
            stdout=-1,
            stderr=-1,
        )
        out, error = await run.communicate()
        assert run.returncode == code, error
        if not code:
            assert json.loads(out)["miss"]["cause"] == "message_edited"


async def test_the_other_apis_say_it_too(api, opening):
    """Responses in their usage; and the metrics count it by cause."""
    async with api.client() as client:
        messages, _ = await grown(client, opening)
        changed = edited(messages, 3, "Another question altogether.")
        answer = await client.responses.create(
            model=MODEL, input=changed, max_output_tokens=LENGTH, store=False
        )
        assert answer.usage.model_extra["cache_miss_reason"] == "message_edited"
