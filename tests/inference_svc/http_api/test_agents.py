"""What agents say of themselves in headers."""

import pytest
from multidict import CIMultiDict

from inference_svc.http_api.agents import MAX_NAME, AgentHints, hints_of


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
        ({"x-session-id": "x" * 1000}, AgentHints("x" * MAX_NAME)),
    ],
)
def test_what_headers_say(headers, hints):
    """By whichever agent; what is no name says nothing."""
    assert hints_of(CIMultiDict(headers)) == hints


def test_the_body_names_a_conversation_that_no_header_does():
    """OpenAI's own parameter."""
    assert hints_of({}, "key").conversation == "key"
    assert hints_of(CIMultiDict({"session-id": "s"}), "key").told == {"conversation": "s"}
