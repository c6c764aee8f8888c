"""IndexLine: what waits to be written to the index, in order, while that may be slow or stuck.

The index takes a bounded number of bytes at a time (`take`). What waits meanwhile waits here: of a
session only its name, so that it costs the same however long the session is and however often it
changes. Its entry is made when it is taken, as the session is then. A mere use of a session is
written apart, behind everything else: it is a few bytes, and its loss costs a place in the order
of eviction after the next start.

A session's entry keeps its place in the line, that of its first change since it was taken last.
So an entry may name blocks whose own entries come later, and never blocks whose removal came
earlier; recovery cuts a session at the first block that it does not find. A change that needs
entries of blocks before it asks for a place behind them.

Pure. Invariants: 1. entries of blocks, removals and requests to commit are taken in the order
they were added in; 2. a session is in the line once; 3. a session that is gone waits only if the
index may have an entry of it. So what waits is bounded by the sessions and blocks there are, or
were when the index took its last entry.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvd.core.records.actions import (
    CommitIndex,
    DropBlock,
    DropSession,
    PutBlock,
    PutSession,
    PutUse,
)
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

ENTRY_BYTES = 256  # of an entry, beside what it holds of spans
NO_BOUND = 1 << 62

IndexAction = PutBlock | DropBlock | CommitIndex | PutSession | DropSession | PutUse


class IndexLine:
    """See the module docstring. Every call but `take` is O(1).

    Args:
        sessions: those that there are, by key.

    Attributes:
        num_blocks: entries of blocks that wait, removals excluded.
    """

    def __init__(self, sessions: Mapping[SessionKey, Session]) -> None:
        self._sessions = sessions
        # In order: sessions, whose entries are made when they are taken, and numbered actions.
        self._line: OrderedDict[SessionKey | int, PutBlock | DropBlock | CommitIndex | None] = (
            OrderedDict()
        )
        self._used: OrderedDict[SessionKey, None] = OrderedDict()
        self._gone: set[SessionKey] = set()  # the index may have an entry of each
        self._next_number = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        """How many entries wait, uses excluded."""
        return len(self._line)

    @property
    def num_uses(self) -> int:
        """How many sessions wait of which only the last use is to be written."""
        return len(self._used)

    def add(self, action: PutBlock | DropBlock | CommitIndex) -> None:
        """Put an action at the end of the line."""
        self._line[self._next_number] = action
        self.num_blocks += isinstance(action, PutBlock)
        self._next_number += 1

    def session_changed(self, key: SessionKey, *, behind_blocks: bool = False) -> None:
        """Have the session's entry written.

        Args:
            key: names the session.
            behind_blocks: not before the entries of blocks that wait now: what they replace may
                not be missed from the session's entry before they are there.
        """
        self._line.setdefault(key)
        if behind_blocks:
            self._line.move_to_end(key)

    def session_used(self, key: SessionKey) -> None:
        """Have the time of its last use written, of a session that is the same otherwise."""
        self._used[key] = None

    def session_gone(self, key: SessionKey, *, is_indexed: bool) -> None:
        """Have the entry of a session that is dropped removed, if the index may have one."""
        if is_indexed:
            self._gone.add(key)
        if key in self._gone:
            self._line.setdefault(key)
        else:
            self._line.pop(key, None)
        self._used.pop(key, None)

    def take(self, max_bytes: int = NO_BOUND) -> list[IndexAction]:
        """Take what comes next, until it is `max_bytes` or a little more."""
        taken: list[IndexAction] = []
        left_bytes = max_bytes
        while self._line and left_bytes > 0:
            place, action = self._line.popitem(last=False)
            entry = action or self._session_entry(place)
            taken.append(entry)
            self.num_blocks -= isinstance(entry, PutBlock)
            left_bytes -= _size(entry)
        while self._used and left_bytes > 0:
            key, _ = self._used.popitem(last=False)
            taken.append(PutUse(key, self._sessions[key].last_access_ns))
            left_bytes -= ENTRY_BYTES
        return taken

    def _session_entry(self, key: SessionKey | int) -> PutSession | DropSession:
        assert not isinstance(key, int), "a numbered entry has its action"
        self._gone.discard(key)
        self._used.pop(key, None)
        session = self._sessions.get(key)
        if session is None:
            return DropSession(key)
        session.is_indexed = True
        return PutSession(session.record())


def _size(entry: IndexAction) -> int:
    return ENTRY_BYTES + (len(entry.session.spans) if isinstance(entry, PutSession) else 0)
