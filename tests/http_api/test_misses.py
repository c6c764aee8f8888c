"""Conversations that return changed: how much is computed again, and why."""

import asyncio
import json
import sys

import pytest

from shared.types.errors import NotFoundError
from tests.http_api.conftest import CLIENTS, MODEL, next_messages

LENGTH = 8
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "write", "search")
]


async def send_chat(client, messages, **options):
    options = {"max_tokens": LENGTH, "extra_body": {"ignore_eos": True}, **options}
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


async def grown(client, messages, num_turns=3, **options):
    """Run a conversation of some turns; return it with the next question, and its last answer."""
    for number in range(num_turns):
        answer = await send_chat(client, messages, **options)
        text = answer.choices[0].message.content
        messages = next_messages(
            messages, text, f"And then, for the {number}th time? " + "Say more. " * 8
        )
    return messages, answer


def edit_message(messages, place, content):
    return [
        {**message, "content": content} if index == place else message
        for index, message in enumerate(messages)
    ]


def miss_of(answer):
    """Return what the usage reports of a miss; it must have a cost."""
    extra = answer.usage.model_extra
    found = extra["cache_miss"]
    assert 0 < found["lost_tokens"] <= answer.usage.prompt_tokens
    assert found["lost_s"] > 0
    return extra["cache_miss_reason"], found


async def test_a_continued_conversation_has_no_miss(api, opening):
    """Nor does a new one, or one that returns to an earlier answer."""
    async with api.client() as client:
        messages, _ = await grown(client, opening)
        again = await send_chat(client, messages)
        back = await send_chat(client, messages[:4])
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
async def test_an_edit_is_named(api, opening, place, change, cause):
    """The miss names the message that differs, and the similar session."""
    opening[0]["content"] += " Today is Mon 17 Nov 2026, 09:41."
    async with api.client() as client:
        messages, first = await grown(client, opening)
        other = edit_message(messages, place, change(messages[place]["content"]))
        assert other != messages
        answer = await send_chat(client, other)
        found, miss = miss_of(answer)
        assert (found, miss["message_index"]) == (cause, place)
        assert miss["session_id"] == first.model_extra["session_id"]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached <= miss["token_index"]
        assert cached + miss["lost_tokens"] <= answer.usage.prompt_tokens
        onward = await send_chat(client, next_messages(other, answer.choices[0].message.content))
        assert "cache_miss" not in onward.usage.model_extra


async def test_changed_tools_are_named(api, opening):
    """In another order, or different ones."""
    async with api.client() as client:
        messages, _ = await grown(client, opening, tools=TOOLS)
        reordered = await send_chat(client, messages, tools=TOOLS[::-1])
        fewer = await send_chat(client, messages, tools=TOOLS[:2])
        assert miss_of(reordered)[0] == "tools_reordered"
        assert miss_of(fewer)[0] == "tools_changed"


async def test_deleted_sessions_are_named(api, opening):
    """The same for answers that this service never gave."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        async with api.service.client() as service:
            await service.delete_session(first.model_extra["session_id"], tenant="acme")
        reason, miss = miss_of(await send_chat(client, messages))
        assert (reason, miss["session_id"], miss["token_index"]) == ("session_gone", None, None)
        stranger = next_messages(opening, "Nobody ever gave this answer.")
        assert miss_of(await send_chat(client, stranger))[0] == "history_unknown"


async def test_a_miss_names_only_sessions_of_the_same_tenant(api, opening):
    """Otherwise a client could learn about other tenants' conversations."""
    async with api.client() as client, api.client("small") as other:
        messages, _ = await grown(client, opening)
        changed = edit_message(messages, 3, "Another question altogether.")
        reason, miss = miss_of(await send_chat(other, changed))
        assert (reason, miss["session_id"]) == ("history_unknown", None)


async def test_differing_texts_are_shown(api, opening, tmp_path):
    """As the command shows them, to the tenant only."""
    async with api.client() as client:
        messages, first = await grown(client, opening)
        answer = await send_chat(client, edit_message(messages, 3, "Another question altogether."))
        _, miss = miss_of(answer)
        session_id = answer.model_extra["session_id"]
    async with api.service.client() as service:
        explained = await service.explain_miss(session_id, tenant="acme")
        assert explained.miss.session_id == first.model_extra["session_id"]
        assert explained.miss.token_index == miss["token_index"]
        assert explained.common.endswith("user\nAn")
        assert explained.was.startswith("d then, for the 0th time?")
        assert explained.now.startswith("other question altogether.")
        with pytest.raises(NotFoundError, match="no turn of the session has missed"):
            await service.explain_miss(first.model_extra["session_id"], tenant="acme")
        with pytest.raises(NotFoundError, match="turn 99 of the session has not missed"):
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


async def test_the_other_apis_report_misses_too(api, opening):
    """Responses in their usage; the metrics count misses by cause."""
    async with api.client() as client:
        messages, _ = await grown(client, opening)
        changed = edit_message(messages, 3, "Another question altogether.")
        answer = await client.responses.create(
            model=MODEL, input=changed, max_output_tokens=LENGTH, store=False
        )
        assert answer.usage.model_extra["cache_miss_reason"] == "message_edited"
