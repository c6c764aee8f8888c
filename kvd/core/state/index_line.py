"""IndexLine: changes that wait to be written to the index, in order.

The index takes a bounded number of bytes at a time (`take`), and may be slow or stuck. Changes wait
here meanwhile. A waiting session is only a key: it costs the same however long the session is and
however often it changes. Its entry is made when it is taken, from the session as it is then. A mere
use of a session is written apart, after everything else: it is a few bytes, and losing it costs
only the session's place in the eviction order after the next start. So uses wait a while for other
entries, or for each other: the index syncs the disk for whatever it takes.

A session's entry keeps the place of its first change since it was last taken. So an entry may name
blocks whose own entries come later, but never blocks whose removal came earlier. Recovery cuts a
session at the first block that it does not find. A change that needs the entries of blocks to be
written first asks for a place behind them.

Pure. Invariants:
1. entries of blocks, removals and requests to commit are taken in the order in which they were
   added;
2. a session is in the line once;
3. a session that is gone waits only if the index may have an entry of it.
So what waits is bounded by the sessions and blocks there are, or were when the index took its last
entry.
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
    ReplaceBlock,
)
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

ENTRY_BYTES = 256  # estimated size of an entry, without its spans
MOST_ENTRIES_WAITING = 65_536  # 20 MB: with more, the index is far behind
NO_BOUND = 1 << 62
USE_WAIT_NS = NS_PER_S  # how long the first use waits

NumberedAction = PutBlock | ReplaceBlock | DropBlock | CommitIndex
IndexAction = NumberedAction | PutSession | DropSession | PutUse


class IndexLine:
    """Changes that wait to be written to the index. Every call but `take` is O(1).

    Args:
        sessions: all sessions, by key.

    Attributes:
        num_blocks: number of waiting entries of new blocks, without removals and replacements.
    """

    def __init__(self, sessions: Mapping[SessionKey, Session]) -> None:
        self._sessions = sessions
        # In order: keys of sessions, whose entries are made when taken, and numbered actions.
        self._line: OrderedDict[SessionKey | int, NumberedAction | None] = OrderedDict()
        self._used: OrderedDict[SessionKey, None] = OrderedDict()
        self._uses_due_ns = 0  # when the uses that wait are to be taken
        self._gone: set[SessionKey] = set()  # dropped; the index may have an entry of each
        self._next_number = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        """Return how many entries wait, without uses."""
        return len(self._line)

    @property
    def is_far_behind(self) -> bool:
        """Whether so many entries wait that no more blocks should be written to SSD for now."""
        return len(self) > MOST_ENTRIES_WAITING

    @property
    def num_uses(self) -> int:
        """Number of sessions that wait only for their last use to be written."""
        return len(self._used)

    def are_uses_due(self, now_ns: int) -> bool:
        """Whether uses that wait are to be taken now."""
        return bool(self._used) and now_ns >= self._uses_due_ns

    def next_deadline_ns(self, now_ns: int) -> int | None:
        """Return when uses will be due; None: there are none, or they are due already."""
        return self._uses_due_ns if self._used and now_ns < self._uses_due_ns else None

    def add(self, action: NumberedAction) -> None:
        """Put an action at the end of the line."""
        self._line[self._next_number] = action
        self.num_blocks += isinstance(action, PutBlock)
        self._next_number += 1

    def put_session(self, key: SessionKey, *, behind_blocks: bool = False) -> None:
        """Write the session's entry, as it has changed.

        Args:
            key: the session.
            behind_blocks: whether to write it after the entries of blocks that wait now. The new
                entry names these blocks in place of older ones, so they have to be there first.
        """
        self._line.setdefault(key)
        if behind_blocks:
            self._line.move_to_end(key)

    def put_use(self, key: SessionKey, now_ns: int) -> None:
        """Write the time of a session's last use, if nothing else of it has to be written."""
        if not self._used:
            self._uses_due_ns = now_ns + USE_WAIT_NS
        self._used[key] = None

    def drop_session(self, key: SessionKey, *, is_indexed: bool) -> None:
        """Remove the entry of a session that is dropped, if the index may have one."""
        if is_indexed:
            self._gone.add(key)
        if key in self._gone:
            self._line.setdefault(key)
        else:
            self._line.pop(key, None)
        self._used.pop(key, None)

    def take(self, max_bytes: int = NO_BOUND, now_ns: int = NO_BOUND) -> list[IndexAction]:
        """Take the next actions.

        Args:
            max_bytes: bytes that they have at most, or a little more.
            now_ns: the time. Uses are taken when they are due, or with other entries.
        """
        taken: list[IndexAction] = []
        left_bytes = max_bytes
        while self._line and left_bytes > 0:
            place, action = self._line.popitem(last=False)
            entry = action or self._session_entry(place)
            taken.append(entry)
            self.num_blocks -= isinstance(entry, PutBlock)
            left_bytes -= _size(entry)
        takes_uses = bool(taken) or self.are_uses_due(now_ns)
        while takes_uses and self._used and left_bytes > 0:
            key, _ = self._used.popitem(last=False)
            taken.append(PutUse(key, self._sessions[key].last_access_ns))
            left_bytes -= ENTRY_BYTES
        return taken

    def _session_entry(self, key: SessionKey | int) -> PutSession | DropSession:
        """Return the entry of a session as it is now; DropSession if it is gone."""
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
