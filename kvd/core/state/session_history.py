"""SessionHistory: what recently happened to each session's KV, for `kvd show`.

Pure. Each transition records its event, called a *move*, where it happens. Events of many blocks
within a moment become one move. A move of a block that several sessions share is recorded for the
session that used it last. A dropped session keeps its history: it says why the next turn had to
recompute. The history is not kept across restarts.

Invariant: at most `max_moves` moves are kept, and MOST_OF_A_SESSION of each session. The oldest
move of the session without a move for the longest time is forgotten first.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum

from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MAX_MOVES = 32_768  # about 6 MiB
MOST_OF_A_SESSION = 32
MOMENT_NS = NS_PER_S  # moves of one kind that are no farther apart are merged
_LOOK_BACK = 4  # how many of a session's last moves may still be extended


class MoveKind(Enum):
    """What happened; the value is its name for operators."""

    STORED = "stored"  # an engine stored blocks
    LOADED = "loaded"  # an engine was granted tokens; why: the tier they were found in
    READ = "read"  # blocks came from SSD because a load waited
    READ_AHEAD = "read_ahead"  # blocks came from SSD before a load did
    WRITTEN = "written"  # blocks were written to SSD
    EVICTED_DRAM = "evicted_dram"  # blocks left DRAM, SSD has them
    EVICTED_SSD = "evicted_ssd"  # blocks left SSD, DRAM has them
    CUT = "cut"  # its last blocks left all tiers; why: evicted, corrupt
    PARTS_DROPPED = "parts_dropped"  # a state or window left all tiers; why: evicted, corrupt
    DISCARDED = "discarded"  # tokens were discarded by overflow, a policy or a client
    GRAFTED = "grafted"  # it was given KV of another session's tokens
    COMPACTED = "compacted"  # sparse blocks were put together
    CORRUPT = "corrupt"  # a copy was not what was stored; why: its tier
    DROPPED = "dropped"  # all of it left all tiers, for room; why: evicted, corrupt
    EXPIRED = "expired"  # its TTL passed
    FLUSHED = "flushed"  # an operator dropped it
    ENDED = "ended"  # its engine reported that it will not come back
    AWAITING = "awaiting"  # its answer calls tools; why: their names
    SUPERSEDED = "superseded"  # another session continues in its place
    PINNED = "pinned"
    UNPINNED = "unpinned"
    TTL_SET = "ttl_set"
    RETAINED = "retained"  # its client wants it kept for a while, or for another while
    UNRETAINED = "unretained"  # its retention is over
    MISSED = "missed"  # an engine asked for tokens that kvd did not have; why


REMOVALS = frozenset({MoveKind.DROPPED, MoveKind.EXPIRED, MoveKind.FLUSHED})
_OF_TURNS = frozenset({MoveKind.STORED, MoveKind.LOADED, MoveKind.MISSED, MoveKind.AWAITING})


@dataclass(slots=True)
class Move:
    """One event of a session's KV, perhaps of many blocks.

    Attributes:
        first_ns: when it began, if it was many events one after the other.
        last_ns: when it ended.
    """

    kind: MoveKind
    first_ns: int
    last_ns: int
    num_blocks: int = 0
    num_tokens: int = 0
    why: str = ""


class SessionHistory:
    """The recent moves of each session."""

    def __init__(self, max_moves: int = MAX_MOVES) -> None:
        self._max_moves = max_moves
        self._moves: OrderedDict[SessionKey, deque[Move]] = OrderedDict()
        self._num_moves = 0

    def record(
        self,
        key: SessionKey | None,
        kind: MoveKind,
        now_ns: int,
        *,
        num_blocks: int = 0,
        num_tokens: int = 0,
        why: str = "",
    ) -> None:
        """Record a move; without effect if `key` is None (blocks without a known session). O(1)."""
        if key is None:
            return
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = deque()
        self._moves.move_to_end(key)
        move = _extendable(moves, kind, why, now_ns)
        if move is None:
            self._add(moves, Move(kind, now_ns, now_ns, num_blocks, num_tokens, why))
        else:
            move.last_ns = now_ns
            move.num_blocks += num_blocks
            if kind is MoveKind.MISSED:  # loads in parts, or that wait for slots, ask repeatedly
                move.num_tokens = max(move.num_tokens, num_tokens)
            else:
                move.num_tokens += num_tokens

    def of(self, key: SessionKey) -> tuple[Move, ...]:
        """Return copies of a session's moves, oldest first."""
        return tuple(
            Move(m.kind, m.first_ns, m.last_ns, m.num_blocks, m.num_tokens, m.why)
            for m in self._moves.get(key, ())
        )

    def removal(self, key: SessionKey) -> Move | None:
        """Return the move by which a session left all tiers; None: it did not, as far as known."""
        moves = reversed(self._moves.get(key, ()))
        last = next((move for move in moves if move.kind is not MoveKind.MISSED), None)
        return last if last is not None and last.kind in REMOVALS else None

    def awaited_tools(self, key: SessionKey) -> bool:
        """Whether the newest known event of a session's turns is that its answer called tools."""
        moves = reversed(self._moves.get(key, ()))
        last = next((move for move in moves if move.kind in _OF_TURNS), None)
        return last is not None and last.kind is MoveKind.AWAITING

    def knows(self, key: SessionKey) -> bool:
        """Whether any move of a session is remembered."""
        return key in self._moves

    def forget(self, tenant: str | None) -> None:
        """Forget a tenant's sessions (None: all tenants'), so that no trace of them remains."""
        for key in [key for key in self._moves if tenant in (None, key.tenant)]:
            self._num_moves -= len(self._moves.pop(key))

    def check(self) -> None:
        """Raise AssertionError if the invariant is broken."""
        lengths = [len(moves) for moves in self._moves.values()]
        assert sum(lengths) == self._num_moves <= self._max_moves
        assert all(0 < length <= MOST_OF_A_SESSION for length in lengths)

    def _add(self, moves: deque[Move], move: Move) -> None:
        if len(moves) == MOST_OF_A_SESSION:
            moves.popleft()
            self._num_moves -= 1
        elif self._num_moves == self._max_moves:
            self._forget_oldest_move()
        moves.append(move)
        self._num_moves += 1

    def _forget_oldest_move(self) -> None:
        """Forget the oldest move of the session without a move for the longest time."""
        key, oldest = next(iter(self._moves.items()))
        oldest.popleft()
        self._num_moves -= 1
        if not oldest:
            del self._moves[key]


def _extendable(moves: deque[Move], kind: MoveKind, why: str, now_ns: int) -> Move | None:
    """Return the recent move that this one extends; None if there is none."""
    for back in range(1, min(_LOOK_BACK, len(moves)) + 1):
        move = moves[-back]
        if move.kind in REMOVALS:  # what is stored after a removal is another life of the session
            return None
        if move.kind is kind and move.why == why:
            return move if now_ns - move.last_ns <= MOMENT_NS else None
    return None
