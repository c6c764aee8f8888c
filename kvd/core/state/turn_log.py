"""TurnLog: the most recent turns as the cache saw them, for `kvd plan --observe`.

Pure. A turn is what an engine loads and stores for one session between two arrivals. It begins when
its request runs, or with its first call if that comes before. For an engine that reports no queue,
it begins with a load (or a first store) after the stores of the turn before. Each call costs O(1),
and none looks at tokens. For a waiting request only its arrival is kept. A turn may make no call
and not be reported to run, because its history was in the engine and it came and went between two
reports of the queue. Then it counts as a part of the turn before it.

Sessions are numbered as they come. A number tells which turns belong together, and nothing about
whose they are. A session whose turns have all left the log gets a new number when it returns.

Invariants:
1. at most `max_turns` turns are kept, and the newest of each session in them is known;
2. arrivals are those of the requests that wait, by the newest report of their engines.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from kvd.core.records.tier import Tier
from shared.types.queue_delta import QueueChange, QueuedRequests
from shared.types.session_key import SessionKey

MAX_TURNS = 8_192  # about 2 MiB; at a turn a second, two hours

Arrival = tuple[int, int]  # ns; history tokens of the request


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as operators see it.

    Attributes:
        session: number of the session, the same for all its turns.
        turn: number of the turn, from 1 for the first in the log (which need not be the session's).
        arrived_ns: when it was queued, or was first reported.
        started_ns: when it began to run, or was first reported.
        ended_ns: when it last stored; as started_ns if it has not stored.
        wanted_tokens: tokens of the session's history, as far as they are known.
        dram_tokens: tokens granted from DRAM.
        ssd_tokens: tokens granted that were read from SSD for it.
        stored_tokens: tokens of the session after it: all that it computed, stored or not.
        is_asked: whether the engine asked for the history; otherwise it had it, or there is none.
        is_ended: whether the session was reported to end with it.
    """

    session: int
    turn: int
    arrived_ns: int
    started_ns: int
    ended_ns: int
    wanted_tokens: int
    dram_tokens: int
    ssd_tokens: int
    stored_tokens: int
    is_asked: bool
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn of the log.

    Attributes:
        history_tokens: as reported by the engine's queue, or as left by the turn before.
        request: engine id and request number; None if no queue has named it.
        prompt_tokens: the most tokens that a load asked for.
    """

    key: SessionKey
    session: int
    turn: int
    arrived_ns: int
    started_ns: int
    ended_ns: int
    history_tokens: int
    request: tuple[int, int] | None = None
    prompt_tokens: int = 0
    dram_tokens: int = 0
    ssd_tokens: int = 0
    stored_tokens: int = 0
    is_stored: bool = False
    is_ended: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether the engine made a load for it."""
        return self.prompt_tokens > 0

    def covers(self, num_tokens: int) -> bool:
        """Whether a load of this many tokens may be one of this turn."""
        return num_tokens <= max(self.prompt_tokens, self.stored_tokens)

    def to_record(self) -> RecordedTurn:
        """Return the turn as operators see it."""
        wanted_tokens = self.history_tokens
        if self.is_asked:
            wanted_tokens = min(wanted_tokens, self.prompt_tokens)
        wanted_tokens = max(wanted_tokens, self.dram_tokens + self.ssd_tokens)
        return RecordedTurn(
            session=self.session,
            turn=self.turn,
            arrived_ns=self.arrived_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            wanted_tokens=wanted_tokens,
            dram_tokens=self.dram_tokens,
            ssd_tokens=self.ssd_tokens,
            stored_tokens=max(self.stored_tokens, self.prompt_tokens),
            is_asked=self.is_asked,
            is_ended=self.is_ended,
        )


class TurnLog:
    """The most recent turns, and the arrivals of requests that wait.

    Args:
        max_turns: how many are kept; at least 1.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._turns: deque[_Turn] = deque()
        self._newest: dict[SessionKey, _Turn] = {}
        self._arrivals: dict[int, dict[int, Arrival]] = {}  # by engine id and request number
        self._next_session = 1

    def __iter__(self) -> Iterator[RecordedTurn]:
        """Iterate over the turns that have loaded or stored, oldest first.

        The newest may be under way. The list of turns is that of now, but each turn is read when
        the iteration reaches it: other calls may be made meanwhile.
        """
        turns = tuple(self._turns)
        return (turn.to_record() for turn in turns if turn.is_asked or turn.is_stored)

    # -------------------------------------------------------------------------------------- queues

    def on_queue_replace(self, engine_id: int, queue: QueueChange, now_ns: int) -> None:
        """Record an engine's whole queue: O(requests)."""
        before = self._arrivals.get(engine_id, {})
        rows = zip(repeat(now_ns), queue.waiting.history_tokens)
        arrivals = self._arrivals[engine_id] = dict(zip(queue.waiting.numbers, rows, strict=True))
        for number in before.keys() & arrivals.keys():
            arrivals[number] = (before[number][0], arrivals[number][1])
        self._record_started(engine_id, queue, before, now_ns)

    def on_queue_change(self, engine_id: int, change: QueueChange, now_ns: int) -> None:
        """Record a change of an engine's queue: O(requests in the change)."""
        arrivals = self._arrivals.setdefault(engine_id, {})
        self._record_started(engine_id, change, arrivals, now_ns)
        for number in change.left:
            arrivals.pop(number, None)
        _record_arrivals(arrivals, change.waiting, now_ns)

    def on_engine_gone(self, engine_id: int) -> None:
        """Forget an engine's queue."""
        self._arrivals.pop(engine_id, None)

    # --------------------------------------------------------------------------------------- turns

    def on_request(
        self, key: SessionKey, num_tokens: int, now_ns: int, *, is_running: bool
    ) -> None:
        """Record that an engine asks for KV.

        Args:
            key: the session.
            num_tokens: tokens of the whole sequence that the engine computes.
            now_ns: the time.
            is_running: whether a queue reports that a turn of the session runs. If that turn has
                stored something, this may be its load after a preemption, which asks for what it
                had computed. A request for more belongs to the next turn, which the queue reports
                later.
        """
        turn = self._newest.get(key)
        if turn is None or (turn.is_stored and not (is_running and turn.covers(num_tokens))):
            turn = self._begin(key, now_ns)
        turn.prompt_tokens = max(turn.prompt_tokens, num_tokens)

    def on_load(self, key: SessionKey, tier: Tier, num_tokens: int) -> None:
        """Record how many tokens of a tier an engine was granted."""
        turn = self._newest.get(key)
        if turn is None:
            return
        if tier is Tier.DRAM:
            turn.dram_tokens += num_tokens
        else:
            turn.ssd_tokens += num_tokens

    def on_store(self, key: SessionKey, num_tokens: int, now_ns: int) -> None:
        """Record that an engine stores KV of the session's first `num_tokens` tokens."""
        turn = self._newest.get(key) or self._begin(key, now_ns)
        turn.stored_tokens = num_tokens
        turn.ended_ns = now_ns
        turn.is_stored = True

    def on_discard(self, key: SessionKey, num_tokens: int) -> None:
        """Record how many tokens a session has after a discard."""
        turn = self._newest.get(key)
        if turn is not None:
            turn.stored_tokens = num_tokens

    def on_end(self, key: SessionKey) -> None:
        """Record that a session has ended."""
        turn = self._newest.get(key)
        if turn is not None:
            turn.is_ended = True

    def check(self) -> None:
        """Raise AssertionError if the first invariant is broken."""
        assert len(self._turns) <= self._max_turns
        assert {turn.key: turn for turn in self._turns} == self._newest
        assert len({turn.session for turn in self._newest.values()}) == len(self._newest)

    # -------------------------------------------------------------------------------------- inside

    def _record_started(
        self, engine_id: int, change: QueueChange, arrivals: dict[int, Arrival], now_ns: int
    ) -> None:
        for request in change.running:
            arrival = arrivals.pop(request.number, None)
            turn = self._newest.get(request.key)
            if turn is not None and turn.request == (engine_id, request.number):
                continue
            arrived_ns, history_tokens = arrival or (now_ns, 0)
            is_over = turn is not None and turn.is_stored and turn.arrived_ns < arrived_ns
            if turn is None or turn.request is not None or (arrival is not None and is_over):
                turn = self._begin(request.key, now_ns)
            turn.request = (engine_id, request.number)
            turn.arrived_ns = min(turn.arrived_ns, arrived_ns)
            turn.history_tokens = history_tokens or turn.history_tokens

    def _begin(self, key: SessionKey, now_ns: int) -> _Turn:
        """Add a turn of a session; the oldest turn leaves a full log."""
        before = self._newest.get(key)
        if len(self._turns) == self._max_turns:
            oldest = self._turns.popleft()
            if self._newest[oldest.key] is oldest:
                del self._newest[oldest.key]
        session, index, history_tokens = self._next_session, 1, 0
        if before is None:
            self._next_session += 1
        else:
            session, index, history_tokens = before.session, before.turn + 1, before.stored_tokens
        turn = _Turn(key, session, index, now_ns, now_ns, now_ns, history_tokens)
        self._turns.append(turn)
        self._newest[key] = turn
        return turn


def _record_arrivals(arrivals: dict[int, Arrival], waiting: QueuedRequests, now_ns: int) -> None:
    """Record when requests were queued, and their history by the newest report."""
    for number, history_tokens in zip(waiting.numbers, waiting.history_tokens, strict=True):
        arrived_ns, _ = arrivals.get(number, (now_ns, 0))
        arrivals[number] = (arrived_ns, history_tokens)
