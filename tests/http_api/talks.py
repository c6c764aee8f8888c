"""Helpers for the tests of /v1/conversations."""

import asyncio

import openai
import pytest

from tests.http_api.conftest import MODEL
from tests.inference_processes import pause

LENGTH = 8


async def ask(client, conversation, given, **options):
    """Request a greedy response of its full length in a conversation."""
    extra = {"ignore_eos": "tool_choice" not in options, **options.pop("extra_body", {})}
    options = {"max_output_tokens": LENGTH, **options, "extra_body": extra}
    return await client.responses.create(
        model=MODEL, input=given, conversation=conversation.id, **options
    )


async def list_items(client, conversation, **options):
    """Return all items, oldest first."""
    found = client.conversations.items.list(conversation.id, order="asc", **options)
    return [item.to_dict() async for item in found]


def texts(items):
    return [item["content"][0]["text"] for item in items if item["type"] == "message"]


def session_of(answer):
    return answer.model_extra["session_id"]


def question(text):
    return {"type": "message", "role": "user", "content": text}


async def refusal(awaited):
    """Return the error that a request ends with."""
    with pytest.raises(openai.APIStatusError) as refused:
        await awaited
    return refused.value


async def until_gone(api, session_id):
    """Return when the background clean-up has removed the session."""
    async with asyncio.timeout(60):
        while await api.num_turns(session_id) != -1:
            await pause()
