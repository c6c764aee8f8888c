"""Agents' CLIs as docs/clients.md sets them up: each calls a tool, and works without kvd."""

from asyncio import to_thread
from dataclasses import dataclass

import pytest
from transformers import AutoTokenizer

from tests.clients.calling_model import ANSWER, build_calling_model
from tests.clients.conftest import AGENTS
from tests.clients.local_pair import LocalPair
from tests.clients.page import MODEL, commands, sections

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2400)]
NOTE = "The word is tier."
LOOK = "cat note.txt"


@dataclass(frozen=True)
class Agent:
    """What is not on the page.

    Attributes:

    program: its command.

    tool: its tool that runs a command, and the arguments of a call.

    settings: language of the block that is its settings file, and that file's path in its shell;
    none: "".
    """

    program: str
    tool: str
    arguments: dict[str, str]
    settings: tuple[str, str] = ("", "")


TOLD = {"command": LOOK, "description": "Look"}
OF = {
    "Claude Code": Agent("claude", "Bash", TOLD),
    "Codex": Agent("codex", "exec_command", {"cmd": LOOK}, ("toml", "../.codex/config.toml")),
    "OpenCode": Agent("opencode", "bash", TOLD, ("json", "opencode.json")),
}


@pytest.mark.parametrize("name", OF)
async def test_an_agents_conversation_is_read_from_the_cache(
    short_dir, shell, record_property, name
):
    """Only a tool's result and the next question are computed, except while kvd is down."""
    agent = OF[name]
    if not (AGENTS / agent.program).exists():
        pytest.skip(f"{agent.program} is not installed: `make test-clients` does it where npm is")
    model = await to_thread(build_calling_model, short_dir / MODEL, agent.tool, agent.arguments)
    async with LocalPair(model, short_dir) as pair:
        section = sections()[name].at(pair.address)
        setting, (asks, goes_on) = commands(section.block("sh"))
        person = shell(AGENTS, setting)
        await person.run("git init --quiet")
        (person.directory / "note.txt").write_text(NOTE)
        language, path = agent.settings
        if language:
            settings = person.directory / path
            settings.parent.mkdir(exist_ok=True)
            settings.write_text(section.block(language))
        said = [await person.run(asks)]
        await pair.kill_kvd()
        said.append(await person.run(goes_on))
        await pair.start_kvd()
        said.append(await person.run(goes_on))
        assert all("".join(ANSWER) in text for text in said)
        ((conversation, sessions),) = pair.named().items()  # the agent's own name, throughout
        assert conversation
        found = {session: await pair.turns(session) for session in sessions}
    (turns,) = [some for some in found.values() if len(some) > 1]  # beside that of a title
    record_property("turns", [(t.usage.history_tokens, t.usage.reused_tokens) for t in turns])
    assert len(turns) == 6
    tokenizer = AutoTokenizer.from_pretrained(model)
    for call, told in zip(turns[::2], turns[1::2], strict=True):
        assert agent.tool in call.text
        assert NOTE in tokenizer.decode(told.input_ids)
        assert told.text == "".join(ANSWER)
    reused = [turn.usage.reused_tokens for turn in turns]
    history = [turn.usage.history_tokens for turn in turns]
    assert reused[0] == reused[2] == 0
    assert 0.95 * history[1] < reused[1]
    assert 0.95 * history[4] < reused[4] <= reused[5]
