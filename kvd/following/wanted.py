"""Sessions that waiting turns want from the remote store, and the answers kvd is owed. Pure.

    wanted ─► under way ─► done
      └─► given up: too many sessions are wanted, or this one has waited for too long

kvd is owed an answer for each request: the task that fetches a session gives it. `take_answers`
returns the answers that no fetching task gives: for requests that were given up, and for requests
of a session that is under way and was already announced to come.
"""

from collections import OrderedDict

from shared.types.session_key import SessionKey

MOST = 1000
STALE_S = 60.0  # by then its turn has recomputed the history


class Wanted:
    """The queue of wanted sessions, oldest first. At most MOST: beyond, the oldest are given up."""

    def __init__(self) -> None:
        self._queue: OrderedDict[SessionKey, float] = OrderedDict()  # when it was wanted
        self._under_way: dict[SessionKey, bool] = {}  # whether it was announced to come
        self._answers: dict[SessionKey, bool] = {}  # whether it comes

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, key: SessionKey, now_s: float) -> None:
        """Add a wanted session, unless it waits or is fetched already."""
        if self._under_way.get(key):
            self._answers[key] = True
        if key in self._under_way or key in self._queue:
            return
        self._queue[key] = now_s
        if len(self._queue) > MOST:
            self._give_up()

    def next(self, now_s: float) -> SessionKey | None:
        """Return the session to fetch now; None: none. The caller owes `done`."""
        while self._queue:
            key, wanted_s = next(iter(self._queue.items()))
            if now_s < wanted_s + STALE_S:
                del self._queue[key]
                self._under_way[key] = False
                return key
            self._give_up()
        return None

    def on_found(self, key: SessionKey) -> None:
        """Record that a session under way was found, and will be announced to kvd."""
        self._under_way[key] = True

    def done(self, key: SessionKey) -> None:
        """Record that a session is not being fetched any more."""
        self._under_way.pop(key, None)

    def take_answers(self) -> dict[SessionKey, bool]:
        """Return, and forget, the answers to give now: for each session, whether it comes."""
        answers, self._answers = self._answers, {}
        return answers

    def _give_up(self) -> None:
        key, _ = self._queue.popitem(last=False)
        self._answers[key] = False
