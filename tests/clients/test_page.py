"""docs/clients.md names the tested clients, and the versions that `make test-clients` uses."""

import json
import re
from pathlib import Path

import pytest

from tests.clients.page import sections
from tests.clients.test_agents import OF
from tests.clients.test_libraries import CASES

HERE = Path(__file__).parent
BY_HAND = {"Open WebUI"}  # a server with a database and pages
PACKAGES = {  # in the order of the versions in the heading, with the files that pin them
    "openai": [("openai2.txt", "openai"), ("openai3.txt", "openai")],
    "anthropic": [("openai3.txt", "anthropic")],
    "LangChain": [("openai3.txt", "langchain-openai")],
    "LiteLLM": [("openai3.txt", "litellm")],
    "llm": [("openai3.txt", "llm")],
    "LlamaIndex": [("openai2.txt", "llama-index-llms-openai-like")],
    "Claude Code": [("package.json", "@anthropic-ai/claude-code")],
    "Codex": [("package.json", "@openai/codex")],
    "OpenCode": [("package.json", "opencode-ai")],
}


def pinned_version(file, package):
    """Return the installed version of a package."""
    text = (HERE / file).read_text()
    if file.endswith(".json"):
        return json.loads(text)["dependencies"][package]
    return re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)[1]


def test_every_client_is_tested():
    """All but those named here."""
    tried = {client for client, _, _ in CASES} | {"llm"} | set(OF)
    assert tried == set(PACKAGES) == set(sections()) - BY_HAND


@pytest.mark.parametrize("name", PACKAGES)
def test_the_versions_are_those_tested(name):
    versions = re.findall(r"\d+(?:\.\d+)+", sections()[name].versions)
    assert versions == [pinned_version(*package) for package in PACKAGES[name]]
