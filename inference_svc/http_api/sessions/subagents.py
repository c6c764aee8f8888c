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
