"""Which conversation of which agent a request is of, as the headers of agents say it. Pure.

These are hints, unless the settings trust a client to name sessions by them
(`openai.named_by_header`, `openai.named_by_cache_key`). An agent sends one name with its main
conversation, with the titles it asks for and with the tools of either, so nobody goes on with a
session because of a name: what is said decides (`sessions/routing.py`). Names are told in the log,
who says that a conversation is over has its session deleted, and a sub-agent's is ended when it is
idle (`sessions/subagents.py`).

*Source:* what Claude Code 2.1, Codex 0.169 and OpenCode 1.18 send; Dynamo's and vLLM's docs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CONVERSATIONS = (
    "X-Claude-Code-Session-Id",
    "X-Dynamo-Session-Id",
    "X-Session-Id",  # OpenCode's, and vLLM's
    "Session-Id",  # Codex's
)
AGENTS = ("X-Claude-Code-Agent-Id",)
PARENTS = (
    "X-Claude-Code-Parent-Agent-Id",
    "X-Dynamo-Parent-Session-Id",
    "X-Parent-Session-Id",
)
FINAL = "X-Dynamo-Session-Final"
MAX_TOLD = 128  # characters; the rest of a longer one is left out


@dataclass(frozen=True)
class AgentHints:
    """What the headers of a request say about who sends it.

    Attributes:
        conversation: the agent's name of the conversation, in a header; "" if there is none.
        agent: of which sub-agent it is; "" if of none.
        parent: the conversation, or sub-agent, that it comes from; "" if from none.
        is_final: whether nothing follows in this conversation.
        cache_key: another name of the conversation, in the body; "" if there is none.
    """

    conversation: str = ""
    agent: str = ""
    parent: str = ""
    is_final: bool = False
    cache_key: str = ""

    @property
    def is_subagent(self) -> bool:
        """Whether another agent has asked for this one."""
        return bool(self.agent or self.parent)

    @property
    def told(self) -> dict[str, str]:
        """What there is to tell, by names for the log."""
        found = {
            "conversation": self.conversation or self.cache_key,
            "agent": self.agent,
            "parent": self.parent,
        }
        return {name: value[:MAX_TOLD] for name, value in found.items() if value}


def hints_of(headers: Mapping[str, str], cache_key: str = "") -> AgentHints:
    """Read what headers say.

    Args:
        headers: of a request, whatever the case of their names.
        cache_key: `prompt_cache_key` of its body.
    """
    return AgentHints(
        conversation=_first(headers, CONVERSATIONS),
        cache_key=_printable(cache_key),
        agent=_first(headers, AGENTS),
        parent=_first(headers, PARENTS),
        is_final=headers.get(FINAL, "").lower() in {"1", "true"},
    )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((found for name in names if (found := _printable(headers.get(name, "")))), "")


def _printable(name: str) -> str:
    return name if name.isascii() and name.isprintable() else ""
