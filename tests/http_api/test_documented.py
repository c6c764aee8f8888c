"""docs/openai.md and docs/anthropic.md describe the API correctly."""

import asyncio
import re
from pathlib import Path

import openai
import pytest

from inference_svc.http_api.anthropic.bodies import MessagesBody
from inference_svc.http_api.bodies.body import FOREIGN
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.completions import CompletionBody
from inference_svc.http_api.openai.conversations import ConversationBody, ItemsBody
from inference_svc.http_api.openai.embeddings import EmbeddingsBody
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from tests.http_api.conftest import CLIENTS

DOCS = Path(__file__).parents[2] / "docs"
OPENAI, ANTHROPIC = ((DOCS / f"{name}.md").read_text() for name in ("openai", "anthropic"))


async def run_examples(api, page):
    """Run the examples one after another, as a user of the official client types them."""
    script = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    address = api.url.removesuffix("/v1")
    for written, real in (("http://127.0.0.1:8000", address), ("the token", CLIENTS["acme"])):
        assert script.count(written) == 1
        script = script.replace(written, real)
    names: dict[str, object] = {}
    await asyncio.to_thread(exec, compile(script, "docs", "exec"), names)
    return names


@pytest.mark.asyncio(loop_scope="session")
async def test_the_openai_examples_run(api):
    """What the examples delete is deleted."""
    names = await run_examples(api, OPENAI)
    with pytest.raises(openai.NotFoundError):
        await asyncio.to_thread(names["client"].responses.retrieve, names["question"].id)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_examples_of_anthropic_run(api):
    """The second question and a tool's result use what the first one computed."""
    names = await run_examples(api, ANTHROPIC)
    assert names["usage"].cache_read_input_tokens > 0
    assert names["called"].stop_reason == "tool_use"
    assert names["told"].usage.cache_read_input_tokens > 0


def test_every_parameter_is_documented():
    """Accepted, ignored and refused parameters are all documented."""
    openai_bodies = (
        *(ChatBody, CompletionBody, EmbeddingsBody),
        *(ResponseBody, ConversationBody, ItemsBody),
    )
    for page, bodies in ((OPENAI, openai_bodies), (ANTHROPIC, (MessagesBody,))):
        _, _, table = page.partition("## Parameters")
        named = set(re.findall(r"`([a-z_]+)", table))
        for body in bodies:
            taken = {field.alias or name for name, field in body.model_fields.items()}
            assert named >= body.ignored | set(body.refused) | taken
    assert set(re.findall(r"`([a-z_]+)", OPENAI)) >= FOREIGN
