"""What agents say of themselves in headers."""

import pytest
from multidict import CIMultiDict

from inference_svc.http_api.agents import MAX_TOLD, AgentHints, hints_of


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, AgentHints()),
        (
            {
                "x-claude-code-session-id": "a",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "c",
            },
            AgentHints("a", "b", "c"),
        ),
        ({"session-id": "codex"}, AgentHints("codex")),
        ({"x-session-id": "o", "x-parent-session-id": "p"}, AgentHints("o", "", "p")),
        (
            {
                "x-dynamo-session-id": "d",
                "x-dynamo-parent-session-id": "e",
                "x-dynamo-session-final": "TRUE",
                "x-session-id": "of a router",
            },
            AgentHints("d", "", "e", is_final=True),
        ),
        ({"x-dynamo-session-final": "false"}, AgentHints()),
        ({"x-session-id": "\n"}, AgentHints()),
    ],
)
def test_what_headers_say(headers, hints):
    """By whichever agent; what is no name says nothing."""
    assert hints_of(CIMultiDict(headers)) == hints


def test_the_body_names_a_conversation_that_no_header_does():
    """OpenAI's own parameter."""
    assert hints_of({}, "key") == AgentHints(cache_key="key")
    assert hints_of({}, "key").told == {"conversation": "key"}
    assert hints_of(CIMultiDict({"session-id": "s"}), "key").told == {"conversation": "s"}


def test_long_names_are_cut_in_the_log_only():
    """Two names are not one because they begin alike."""
    name = "x" * 1000
    assert hints_of({"X-Session-Id": name}).conversation == name
    assert hints_of({"X-Session-Id": name}).told == {"conversation": "x" * MAX_TOLD}


@pytest.mark.parametrize(
    ("hints", "is_subagent"),
    [
        (AgentHints("a"), False),
        (AgentHints("a", "b"), True),
        (AgentHints("a", "", "c"), True),
        (AgentHints(cache_key="a"), False),
    ],
)
def test_who_comes_from_another_is_a_subagent(hints, is_subagent):
    assert hints.is_subagent is is_subagent
