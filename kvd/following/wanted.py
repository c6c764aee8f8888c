"""Which sessions are wanted from the store, and soon: turns wait for them. Pure.

    asked ─► under way ─► done
      └─► given up: there are too many, or it has waited for too long

Each ask is owed an answer: whoever fetches a session gives it. What `owed` returns nobody else
answers: asks that were given up, and those for a session that is under way and was said to come.
"""

from collections import OrderedDict

from shared.types.session_key import SessionKey

MOST = 1000
STALE_S = 60.0  # by then its turn has computed the history anew


class Wanted:
    """Sessions in the order in which they were asked for; of too many the oldest go."""

    def __init__(self) -> None:
        self._asked: OrderedDict[SessionKey, float] = OrderedDict()
        self._under_way: dict[SessionKey, bool] = {}  # whether it was said to come
        self._owed: dict[SessionKey, bool] = {}  # whether it comes

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, key: SessionKey, now_s: float) -> None:
        """Take that a session is wanted; one that is being fetched is fetched once."""
        if self._under_way.get(key):
            self._owed[key] = True
        if key in self._under_way or key in self._asked:
            return
        self._asked[key] = now_s
        if len(self._asked) > MOST:
            self._give_up()

    def next(self, now_s: float) -> SessionKey | None:
        """Return the session to be fetched now, if there is one; `done` is owed."""
        while self._asked:
            key, asked_s = next(iter(self._asked.items()))
            if now_s < asked_s + STALE_S:
                del self._asked[key]
                self._under_way[key] = False
                return key
            self._give_up()
        return None

    def comes(self, key: SessionKey) -> None:
        """Take that a session under way was found, and that this is said."""
        self._under_way[key] = True

    def done(self, key: SessionKey) -> None:
        """Take that a session is not being fetched any more."""
        self._under_way.pop(key, None)

    def owed(self) -> dict[SessionKey, bool]:
        """Return the answers that are to be given now, each once: whether a session comes."""
        owed, self._owed = self._owed, {}
        return owed

    def _give_up(self) -> None:
        key, _ = self._asked.popitem(last=False)
        self._owed[key] = False
