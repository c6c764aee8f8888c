"""Agents' headers, and idle sessions of sub-agents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from inference_svc.http_api.agents import MAX_LOGGED, AgentHints, IdleSubagents, hints_of
from shared.types.session_key import SessionKey


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
def test_headers_are_read(headers, hints):
    """Of each agent; an invalid name is ignored."""
    assert hints_of(CIMultiDict(headers)) == hints


def test_the_body_may_name_a_conversation():
    """With OpenAI's own parameter, if no header does."""
    assert hints_of({}, "key") == AgentHints(cache_key="key")
    assert hints_of({}, "key").log_fields == {"conversation": "key"}
    assert hints_of(CIMultiDict({"session-id": "s"}), "key").log_fields == {"conversation": "s"}


def test_long_names_are_cut_only_in_the_log():
    """Names with equal beginnings differ."""
    name = "x" * 1000
    assert hints_of({"X-Session-Id": name}).conversation == name
    assert hints_of({"X-Session-Id": name}).log_fields == {"conversation": "x" * MAX_LOGGED}


@pytest.mark.parametrize(
    ("hints", "is_subagent"),
    [
        (AgentHints("a"), False),
        (AgentHints("a", "b"), True),
        (AgentHints("a", "", "c"), True),
        (AgentHints(cache_key="a"), False),
    ],
)
def test_an_agent_with_a_parent_is_a_subagent(hints, is_subagent):
    assert hints.is_subagent is is_subagent


IDLE_S, MOST = 10.0, 4
keys = st.builds(SessionKey, st.just("acme"), st.just("m"), st.sampled_from("abcdef"))


@given(st.lists(st.tuples(st.floats(0, 8), st.none() | keys), max_size=30))
def test_long_unused_sessions_are_returned(steps):
    """Compared with a plain dict; of more than `most` the most recently used are watched."""
    idle, used, now_s = IdleSubagents(IDLE_S, MOST), {}, 0.0
    for turns, (passed_s, key) in enumerate(steps):
        now_s += passed_s
        if key is not None:
            idle.record_use(key, turns, now_s)
            used.pop(key, None)
            used[key] = now_s, turns
            if len(used) > MOST:
                del used[next(iter(used))]
            continue
        expected = [(one, turns) for one, (at_s, turns) in used.items() if now_s - at_s >= IDLE_S]
        assert idle.take_idle(now_s) == expected
        for one, _ in expected:
            del used[one]
    assert len(idle) == len(used)
