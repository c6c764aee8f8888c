"""Which sessions of sub-agents nobody has used for long. Pure.

A sub-agent is asked for one thing, and does not say when it has done it. Its session is ended when
it has been idle: its KV is then the first to go. Whoever comes back all the same goes on in a fork.
"""

from collections import OrderedDict

from shared.types.session_key import SessionKey


class IdleSubagents:
    """See the module docstring. Calls are O(1) for each session that they return or take.

    Args:
        idle_s: seconds after which a session is idle.
        most: so many sessions are watched; the one that was used longest ago is forgotten.
    """

    def __init__(self, idle_s: float, most: int) -> None:
        self.idle_s = idle_s
        self._most = most
        self._used_s: OrderedDict[SessionKey, float] = OrderedDict()  # the idlest first

    def __len__(self) -> int:
        return len(self._used_s)

    def used(self, key: SessionKey, now_s: float) -> None:
        """Record that a sub-agent has used a session."""
        self._used_s[key] = now_s
        self._used_s.move_to_end(key)
        if len(self._used_s) > self._most:
            self._used_s.popitem(last=False)

    def take_idle(self, now_s: float) -> list[SessionKey]:
        """Take the sessions out that are idle."""
        found = []
        while self._used_s:
            key, used_s = next(iter(self._used_s.items()))
            if now_s - used_s < self.idle_s:
                break
            del self._used_s[key]
            found.append(key)
        return found
