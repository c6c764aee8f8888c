"""Python libraries as docs/clients.md sets them up: conversations through a kill of kvd.

The page's code is run in an environment with the library (tests/clients/talker.py).
"""

import json
import re
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.clients.conftest import libraries
from tests.clients.page import MODEL, commands, sections

pytestmark = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]
TALKER = Path(__file__).with_name("talker.py")
CASES = [  # client, talk, environment
    ("openai", "openai", "openai3"),
    ("openai", "openai", "openai2"),
    ("anthropic", "anthropic", "openai3"),
    ("LangChain", "LangChain", "openai3"),
    ("LangChain", "LangChain, responses", "openai3"),
    ("LiteLLM", "LiteLLM", "openai3"),
    ("LlamaIndex", "LlamaIndex", "openai2"),
]
LISTED = "import {0}; print([one.id for one in {0}.{1}().models.list()])"


@asynccontextmanager
async def talking(shell, programs, talk, code, setting):
    """Start a conversation; return a function that asks a question and returns the answer."""
    process = await shell(programs, setting).start(
        f"exec python -P {TALKER} '{talk}'", stdin=PIPE, stdout=PIPE
    )

    async def ask(question, *, streamed):
        send({"question": question, "streamed": streamed})
        line = await process.stdout.readline()
        assert line, "it has ended: what it says is on stderr"
        answer = json.loads(line)
        assert answer["text"]
        assert (answer["pieces"] > 1) == streamed
        return answer["cached_tokens"]

    def send(line):
        process.stdin.write(json.dumps(line).encode() + b"\n")

    send({"code": code})
    try:
        yield ask
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("client", "talk", "environment"), CASES)
async def test_a_conversation(pair, shell, record_property, client, talk, environment):
    """Whole and streamed; nothing is cached while kvd is down, and everything after its return."""
    section = sections()[client].at(pair.address)
    setting = commands(section.block("sh"))[0] if client == "LiteLLM" else ""
    async with talking(
        shell, libraries(environment), talk, section.block("python"), setting
    ) as ask:
        cached = [await ask("What is kept?", streamed=False)]
        cached += [await ask("And then?", streamed=True), await ask("Why?", streamed=False)]
        await pair.kill_kvd()
        cached.append(await ask("Where?", streamed=True))
        await pair.start_kvd()
        cached += [await ask("Until when?", streamed=False), await ask("Who?", streamed=True)]
    record_property("cached_tokens", cached)
    first, second, third, away, back, last = cached
    assert 0 == first < second < third
    assert away == 0
    assert third <= back < last


@pytest.mark.parametrize(("client", "maker"), [("openai", "OpenAI"), ("anthropic", "Anthropic")])
async def test_the_environment_is_enough(pair, shell, client, maker):
    """The setting works for a program that cannot be changed."""
    setting, _ = commands(sections()[client].at(pair.address).block("sh"))
    listed = await shell(libraries("openai3"), setting).run(
        f"python -c '{LISTED.format(client, maker)}'"
    )
    assert MODEL in listed


async def test_llms_commands(pair, shell, record_property):
    """The page's commands; the last one again when kvd has returned."""
    section = sections()["llm"].at(pair.address)
    person = shell(libraries("openai3"))
    directory = Path((await person.run('dirname "$(llm logs path)"')).strip())
    (directory / "extra-openai-models.yaml").write_text(section.block("yaml"))
    _, (first, second, third) = commands(section.block("sh"))
    cached = [_num_cached(await person.run(command)) for command in (first, second)]
    await pair.kill_kvd()
    cached.append(_num_cached(await person.run(third)))
    await pair.start_kvd()
    cached.append(_num_cached(await person.run(third)))
    record_property("cached_tokens", cached)
    assert cached[0] == cached[2] == 0
    assert 0 < cached[1] <= cached[3]


def _num_cached(printed):
    """Return the cached tokens that -u shows, 0 if it shows none."""
    assert re.search(r"Token usage: \d+ input, \d+ output", printed), printed
    found = re.search(r'"cached_tokens": (\d+)', printed)
    return int(found[1]) if found else 0
