"""docs/openai.md says what there is."""

import asyncio
import re
from pathlib import Path

import openai
import pytest

from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.responses import ResponseBody
from tests.http_api.conftest import CLIENTS

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_examples_run(api):
    """One after another, as the official client's user would type them."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = "\n".join(blocks)
    for written, real in (("http://127.0.0.1:8000/v1", api.url), ("the token", CLIENTS["acme"])):
        assert script.count(written) == 1
        script = script.replace(written, real)
    names: dict[str, object] = {}
    await asyncio.to_thread(exec, compile(script, "docs/openai.md", "exec"), names)
    with pytest.raises(openai.NotFoundError):
        await asyncio.to_thread(names["client"].responses.retrieve, names["question"].id)


def test_every_parameter_is_named():
    """Those that are ignored, and those that are refused."""
    _, _, table = PAGE.partition("## Parameters")
    named = set(re.findall(r"`([a-z_]+)", table))
    for body in (ChatBody, ResponseBody):
        assert named >= body.ignored | set(body.refused)
        assert named >= set(body.model_fields)
