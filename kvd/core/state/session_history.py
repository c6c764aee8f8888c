"""SessionHistory: what happened to a session's KV lately, for `kvd show`.

Pure. Each transition notes its move where it happens; what happens to many blocks within a moment
becomes one move. A move of a block that several sessions share is noted with the one that used it
last. A session that is dropped keeps its history: it says why the next turn was recomputed. It is
not kept across restarts.

Invariant: at most `max_moves` moves are kept, MOST_OF_A_SESSION of each session; the history
of the session in which nothing happened for longest goes first.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum

from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MAX_MOVES = 32_768  # about 6 MiB
MOST_OF_A_SESSION = 32
MOMENT_NS = NS_PER_S  # moves of one kind that are no farther apart become one
_LOOK_BACK = 4  # moves of a session that may still be extended, beside each other


class MoveKind(Enum):
    """What happened; the value is its name for operators."""

    STORED = "stored"  # an engine stored blocks
    LOADED = "loaded"  # an engine was given tokens; why: the tier they were found in
    READ = "read"  # blocks came from SSD because a load waited
    READ_AHEAD = "read_ahead"  # blocks came from SSD before a load did
    WRITTEN = "written"  # blocks were written to SSD
    EVICTED_DRAM = "evicted_dram"  # blocks left DRAM, SSD has them
    EVICTED_SSD = "evicted_ssd"  # blocks left SSD, DRAM has them
    CUT = "cut"  # its last blocks left all tiers; why: evicted, corrupt
    PARTS_DROPPED = "parts_dropped"  # a state or window left all tiers; why: evicted, corrupt
    DISCARDED = "discarded"  # tokens were discarded by an overflow, a policy, a client
    GRAFTED = "grafted"  # it was given KV of another session's tokens
    COMPACTED = "compacted"  # what discards left was put together
    CORRUPT = "corrupt"  # a copy was not what was stored; why: its tier
    DROPPED = "dropped"  # all of it left all tiers, for room; why: evicted, corrupt
    EXPIRED = "expired"  # its TTL passed
    FLUSHED = "flushed"  # an operator dropped it
    ENDED = "ended"  # its engine said that it will not come back
    AWAITING = "awaiting"  # its answer calls tools; why: their names
    SUPERSEDED = "superseded"  # another session goes on in its place
    PINNED = "pinned"
    UNPINNED = "unpinned"
    TTL_SET = "ttl_set"
    RETAINED = "retained"  # its client wants it to be kept for a while, or for another one
    UNRETAINED = "unretained"  # that is over
    MISSED = "missed"  # an engine asked for tokens that were not to be had; why


REMOVALS = frozenset({MoveKind.DROPPED, MoveKind.EXPIRED, MoveKind.FLUSHED})
_OF_TURNS = frozenset({MoveKind.STORED, MoveKind.LOADED, MoveKind.MISSED, MoveKind.AWAITING})


@dataclass(slots=True)
class Move:
    """One move.

    Attributes:
        first_ns: when it began, if it is many that came one after the other.
        last_ns: when it ended.
    """

    kind: MoveKind
    first_ns: int
    last_ns: int
    num_blocks: int = 0
    num_tokens: int = 0
    why: str = ""


class SessionHistory:
    """See the module docstring."""

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
        """Record a move; None: of blocks that no session is known to use. O(1)."""
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
            move.num_tokens += num_tokens

    def of(self, key: SessionKey) -> tuple[Move, ...]:
        """Return a session's moves, oldest first; copies."""
        return tuple(
            Move(m.kind, m.first_ns, m.last_ns, m.num_blocks, m.num_tokens, m.why)
            for m in self._moves.get(key, ())
        )

    def removal(self, key: SessionKey) -> Move | None:
        """Return the move by which a session left all tiers; None: it did not, or who knows."""
        moves = reversed(self._moves.get(key, ()))
        last = next((move for move in moves if move.kind is not MoveKind.MISSED), None)
        return last if last is not None and last.kind in REMOVALS else None

    def awaited_tools(self, key: SessionKey) -> bool:
        """Whether a session's last turn called tools, as far as is known: all else came later."""
        moves = reversed(self._moves.get(key, ()))
        last = next((move for move in moves if move.kind in _OF_TURNS), None)
        return last is not None and last.kind is MoveKind.AWAITING

    def knows(self, key: SessionKey) -> bool:
        """Whether anything is remembered of a session."""
        return key in self._moves

    def forget(self, tenant: str | None) -> None:
        """Forget a tenant's sessions (None: all), because nothing of them shall remain."""
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
            self._forget_a_move()
        moves.append(move)
        self._num_moves += 1

    def _forget_a_move(self) -> None:
        """Forget the oldest move of the session in which nothing happened for longest."""
        key, oldest = next(iter(self._moves.items()))
        oldest.popleft()
        self._num_moves -= 1
        if not oldest:
            del self._moves[key]


def _extendable(moves: deque[Move], kind: MoveKind, why: str, now_ns: int) -> Move | None:
    """Return the move that this one extends, if there is one."""
    for back in range(1, min(_LOOK_BACK, len(moves)) + 1):
        move = moves[-back]
        if move.kind in REMOVALS:  # what comes after it is another life
            return None
        if move.kind is kind and move.why == why:
            return move if now_ns - move.last_ns <= MOMENT_NS else None
    return None
