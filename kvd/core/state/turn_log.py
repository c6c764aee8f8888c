"""TurnLog: the most recent turns as the cache saw them, for `kvd plan --observe`.

Pure. A turn is what an engine asks and stores for one session between two arrivals. It begins when
its request runs, or with its first call if that comes before; of an engine that reports no queue,
with a load (or a first store) after the stores of the turn before. Each call costs O(1), none looks
at tokens; of a request that waits only its arrival is kept. A turn that neither asks nor is
reported to run (its history was in the engine, and it came and went between two reports of the
queue) counts as a part of the one before it.

Sessions are numbered as they come: a number says which turns belong together and nothing of whose
they are. One whose turns have all left the log gets a new number when it returns.

Invariants: 1. at most `max_turns` turns are kept, and of each session in them the newest is known;
2. arrivals are those of the requests that wait, by the newest report of their engines.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.core.records.records import Tier
from shared.types.queue_delta import QueueChange, QueuedRequest
from shared.types.session_key import SessionKey

MAX_TURNS = 8_192  # about 2 MiB; at a turn a second, two hours

Arrival = tuple[int, int]  # ns; history tokens of the request


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as operators see it.

    Attributes:
        session: a number; the same for all turns of a session.
        turn: 1 for the first one in the log, which need not be the session's first.
        arrived_ns: when it came to wait, or was first reported.
        started_ns: when it came to run, or was first reported.
        ended_ns: when it stored last; as started_ns if it has not.
        wanted_tokens: of the session's history, as far as it is known to be any.
        dram_tokens: granted from DRAM.
        ssd_tokens: granted that were read from SSD for it.
        stored_tokens: of the session after it; what it computed, even if not all found room.
        is_asked: whether the engine asked for the history; else it had it itself, or there is none.
        is_ended: whether the session was said to end with it.
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
        history_tokens: as the engine's queue says, or as the turn before has left them.
        request: engine id and request number; None: no queue has named it.
        prompt_tokens: the most that was asked for.
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
        """Whether the engine asked for what is stored."""
        return self.prompt_tokens > 0

    def covers(self, num_tokens: int) -> bool:
        """Whether it may be this turn that asks for so many tokens."""
        return num_tokens <= max(self.prompt_tokens, self.stored_tokens)

    def recorded(self) -> RecordedTurn:
        """Sum it up."""
        wanted = self.history_tokens
        if self.is_asked:
            wanted = min(wanted, self.prompt_tokens)
        wanted = max(wanted, self.dram_tokens + self.ssd_tokens)
        return RecordedTurn(
            session=self.session,
            turn=self.turn,
            arrived_ns=self.arrived_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            wanted_tokens=wanted,
            dram_tokens=self.dram_tokens,
            ssd_tokens=self.ssd_tokens,
            stored_tokens=max(self.stored_tokens, self.prompt_tokens),
            is_asked=self.is_asked,
            is_ended=self.is_ended,
        )


class TurnLog:
    """See the module docstring.

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
        """Oldest first, as far as they have asked or stored; the newest may be under way.

        Of the turns of now, each as it is when it is come to: other calls may be made meanwhile.
        """
        turns = tuple(self._turns)
        return (turn.recorded() for turn in turns if turn.is_asked or turn.is_stored)

    # -------------------------------------------------------------------------------------- queues

    def queue_replaced(self, engine_id: int, queue: QueueChange, now_ns: int) -> None:
        """Record all of an engine's queue: O(requests)."""
        before = self._arrivals.get(engine_id, {})
        self._arrivals[engine_id] = {
            rank[2]: (before.get(rank[2], (now_ns,))[0], history_tokens)
            for rank, _, history_tokens in queue.waiting
        }
        self._started(engine_id, queue, before, now_ns)

    def queue_changed(self, engine_id: int, change: QueueChange, now_ns: int) -> None:
        """Record a change of an engine's queue: O(requests in it)."""
        arrivals = self._arrivals.setdefault(engine_id, {})
        self._started(engine_id, change, arrivals, now_ns)
        for number in change.left:
            arrivals.pop(number, None)
        _note_arrivals(arrivals, change.waiting, now_ns)

    def engine_gone(self, engine_id: int) -> None:
        """Forget an engine's queue."""
        self._arrivals.pop(engine_id, None)

    # --------------------------------------------------------------------------------------- turns

    def requested(self, key: SessionKey, num_tokens: int, now_ns: int, *, is_running: bool) -> None:
        """Record that an engine asks for the KV of so many tokens.

        Args:
            key: whose.
            num_tokens: of the whole sequence it is to compute.
            now_ns: time.
            is_running: whether a queue says that a turn of the session runs. If that has stored
                something, this may be its load after a preemption, which wants what it had
                computed; more than that is wanted by the next turn, which the queue reports
                later.
        """
        turn = self._newest.get(key)
        if turn is None or (turn.is_stored and not (is_running and turn.covers(num_tokens))):
            turn = self._begin(key, now_ns)
        turn.prompt_tokens = max(turn.prompt_tokens, num_tokens)

    def loaded(self, key: SessionKey, tier: Tier, num_tokens: int) -> None:
        """Record what an engine was given of a tier."""
        turn = self._newest.get(key)
        if turn is None:
            return
        if tier is Tier.DRAM:
            turn.dram_tokens += num_tokens
        else:
            turn.ssd_tokens += num_tokens

    def stored(self, key: SessionKey, num_tokens: int, now_ns: int) -> None:
        """Note that an engine stores the KV of so many tokens, from the session's first one on."""
        turn = self._newest.get(key) or self._begin(key, now_ns)
        turn.stored_tokens = num_tokens
        turn.ended_ns = now_ns
        turn.is_stored = True

    def discarded(self, key: SessionKey, num_tokens: int) -> None:
        """Record how many tokens a session has left."""
        turn = self._newest.get(key)
        if turn is not None:
            turn.stored_tokens = num_tokens

    def ended(self, key: SessionKey) -> None:
        """Record that the session will not come back."""
        turn = self._newest.get(key)
        if turn is not None:
            turn.is_ended = True

    def check(self) -> None:
        """Raise AssertionError if the first invariant is broken."""
        assert len(self._turns) <= self._max_turns
        assert {turn.key: turn for turn in self._turns} == self._newest
        assert len({turn.session for turn in self._newest.values()}) == len(self._newest)

    # -------------------------------------------------------------------------------------- inside

    def _started(
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


def _note_arrivals(
    arrivals: dict[int, Arrival], waiting: Sequence[QueuedRequest], now_ns: int
) -> None:
    """Note when requests came to wait, and the history that they have by the newest report."""
    for request in waiting:
        arrived_ns, _ = arrivals.get(request.rank[2], (now_ns, 0))
        arrivals[request.rank[2]] = (arrived_ns, request.history_tokens)
