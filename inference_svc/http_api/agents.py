"""Hints of agents: the conversation and the agent that a request belongs to, by its headers. Pure.

Headers are only hints, unless the settings trust a client to name sessions by them
(`openai.named_by_header`, `openai.named_by_cache_key`). An agent sends the same name with its main
conversation, with its requests for titles, and with the tools of both. So a name alone never
selects a session: the messages do (`sessions/routing.py`). Names are logged. A session is deleted
when its client says that the conversation is over. A sub-agent's session is ended when it is idle
(`IdleSubagents`).

*Source:* what Claude Code 2.1, Codex 0.169 and OpenCode 1.18 send; Dynamo's and vLLM's docs.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from shared.types.session_key import SessionKey

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
MAX_LOGGED = 128  # characters of a name that are logged


@dataclass(frozen=True)
class AgentHints:
    """What a request's headers and body say about the agent that sent it.

    Attributes:
        conversation: the agent's name of the conversation, from a header; "" if there is none.
        agent: name of the sub-agent; "" if there is none.
        parent: the conversation or sub-agent that started this one; "" if none did.
        is_final: whether this is the conversation's last request.
        cache_key: another name of the conversation, from the body; "" if there is none.
    """

    conversation: str = ""
    agent: str = ""
    parent: str = ""
    is_final: bool = False
    cache_key: str = ""

    @property
    def is_subagent(self) -> bool:
        """Whether another agent started this one."""
        return bool(self.agent or self.parent)

    @property
    def log_fields(self) -> dict[str, str]:
        """The hints that are there, by their names in the log."""
        found = {
            "conversation": self.conversation or self.cache_key,
            "agent": self.agent,
            "parent": self.parent,
        }
        return {name: value[:MAX_LOGGED] for name, value in found.items() if value}


def hints_of(headers: Mapping[str, str], cache_key: str = "") -> AgentHints:
    """Read the hints of a request.

    Args:
        headers: the request's headers, by names without regard to case.
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


class IdleSubagents:
    """Finds the sessions of sub-agents that have been idle for a while.

    A sub-agent does one task, and does not report its end. So its session is ended when it has
    been idle: its KV cache is then evicted first. A client that returns nevertheless continues in
    a fork. Calls cost O(1) for each session that they return or take.

    Args:
        idle_s: seconds after which a session is idle.
        most: most sessions that are watched; beyond it the least recently used one is forgotten.
    """

    def __init__(self, idle_s: float, most: int) -> None:
        self.idle_s = idle_s
        self._most = most
        # The time of the last use, and the number of turns; the least recently used first.
        self._used: OrderedDict[SessionKey, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def record_use(self, key: SessionKey, turns: int, now_s: float) -> None:
        """Record that a sub-agent has used a session, which has `turns` turns now."""
        self._used[key] = now_s, turns
        self._used.move_to_end(key)
        if len(self._used) > self._most:
            self._used.popitem(last=False)

    def take_idle(self, now_s: float) -> list[tuple[SessionKey, int]]:
        """Remove the idle sessions and return them, each with its number of turns."""
        found = []
        while self._used:
            key, (used_s, turns) = next(iter(self._used.items()))
            if now_s - used_s < self.idle_s:
                break
            del self._used[key]
            found.append((key, turns))
        return found
