"""Conversations, as clients have them: what the tests of /v1/conversations do again and again."""

import asyncio

import openai
import pytest

from tests.http_api.conftest import MODEL
from tests.inference_processes import pause

LENGTH = 8


async def ask(client, conversation, given, **options):
    """A greedy response of its full length, in a conversation."""
    extra = {"ignore_eos": "tool_choice" not in options, **options.pop("extra_body", {})}
    options = {"max_output_tokens": LENGTH, **options, "extra_body": extra}
    return await client.responses.create(
        model=MODEL, input=given, conversation=conversation.id, **options
    )


async def listed(client, conversation, **options):
    """All items, the oldest first."""
    found = client.conversations.items.list(conversation.id, order="asc", **options)
    return [item.to_dict() async for item in found]


def texts(items):
    return [item["content"][0]["text"] for item in items if item["type"] == "message"]


def session_of(answer):
    return answer.model_extra["session_id"]


def question(text):
    return {"type": "message", "role": "user", "content": text}


async def refusal(awaited):
    """The error that a request ends in."""
    with pytest.raises(openai.APIStatusError) as refused:
        await awaited
    return refused.value


async def until_gone(api, session_id):
    """Wait for what is tidied up beside everything else."""
    async with asyncio.timeout(60):
        while await api.num_turns(session_id) != -1:
            await pause()
