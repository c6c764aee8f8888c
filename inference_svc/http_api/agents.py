"""Which conversation of which agent a request is of, as the headers of agents say it. Pure.

These are hints, unless the settings trust a client to name sessions by them
(`openai.named_by_header`, `openai.named_by_cache_key`). An agent sends one name with its main
conversation, with the titles it asks for and with the tools of either, so nobody goes on with a
session because of a name: what is said decides (`sessions/routing.py`). Names are told in the log,
who says that a conversation is over has its session deleted, and a sub-agent's is ended when it is
idle (`IdleSubagents`).

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


class IdleSubagents:
    """Which sessions of sub-agents nobody has used for long.

    A sub-agent is asked for one thing, and does not say when it has done it. Its session is ended
    when it has been idle: its KV is then the first to go. Whoever comes back all the same goes on
    in a fork. Calls are O(1) for each session that they return or take.

    Args:
        idle_s: seconds after which a session is idle.
        most: so many sessions are watched; the one that was used longest ago is forgotten.
    """

    def __init__(self, idle_s: float, most: int) -> None:
        self.idle_s = idle_s
        self._most = most
        self._used: OrderedDict[SessionKey, tuple[float, int]] = OrderedDict()  # the idlest first

    def __len__(self) -> int:
        return len(self._used)

    def used(self, key: SessionKey, turns: int, now_s: float) -> None:
        """Record that a sub-agent has used a session, which now has so many turns."""
        self._used[key] = now_s, turns
        self._used.move_to_end(key)
        if len(self._used) > self._most:
            self._used.popitem(last=False)

    def take_idle(self, now_s: float) -> list[tuple[SessionKey, int]]:
        """Take the sessions out that are idle, with the turns that they had."""
        found = []
        while self._used:
            key, (used_s, turns) = next(iter(self._used.items()))
            if now_s - used_s < self.idle_s:
                break
            del self._used[key]
            found.append((key, turns))
        return found
