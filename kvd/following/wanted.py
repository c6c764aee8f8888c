"""Which sessions are wanted from the store, and soon: turns wait for them. Pure."""

from collections import OrderedDict

from shared.types.session_key import SessionKey

MOST = 1000
STALE_S = 60.0  # by then its turn has computed the history anew


class Wanted:
    """Sessions in the order in which they were asked for; of too many the oldest go."""

    def __init__(self) -> None:
        self._asked: OrderedDict[SessionKey, float] = OrderedDict()
        self._under_way: set[SessionKey] = set()

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, key: SessionKey, now_s: float) -> None:
        """Take that a session is wanted; one that is being fetched is fetched once."""
        if key in self._under_way or key in self._asked:
            return
        self._asked[key] = now_s
        if len(self._asked) > MOST:
            self._asked.popitem(last=False)

    def next(self, now_s: float) -> SessionKey | None:
        """Return the session to be fetched now, if there is one; `done` is owed."""
        while self._asked:
            key, asked_s = self._asked.popitem(last=False)
            if now_s < asked_s + STALE_S:
                self._under_way.add(key)
                return key
        return None

    def done(self, key: SessionKey) -> None:
        """Take that a session is not being fetched any more."""
        self._under_way.discard(key)
