"""Tables of the remembered file that are bounded: what was not used for longest goes first.

Methods run on one thread: that of the database.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PRUNE_EVERY = 256  # rows that are added between two looks at the bound


@dataclass(frozen=True)
class Table:
    """What is said to a table."""

    insert: str
    last_use: str
    touch: str = ""
    count: str = ""
    prune: str = ""


HISTORIES = Table(
    "INSERT OR REPLACE INTO histories VALUES (?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM histories",
    "UPDATE histories SET used = ? WHERE digest = ?",
    "SELECT count(*) FROM histories",
    "DELETE FROM histories WHERE digest IN"
    " (SELECT digest FROM histories ORDER BY used LIMIT max(0, ?))",
)
RESPONSES = Table(
    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM responses",
    "UPDATE responses SET used = ? WHERE id = ?",
    "SELECT count(*) FROM responses",
    "DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY used LIMIT max(0, ?))",
)
REQUESTS = Table(
    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM requests",
    "UPDATE requests SET used = ? WHERE id = ?",
    "SELECT count(*) FROM requests",
    "DELETE FROM requests WHERE id IN (SELECT id FROM requests ORDER BY used LIMIT max(0, ?))",
)
SESSIONS = Table(  # who takes a row away takes the session, too
    "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM sessions",
)
PRUNED = (HISTORIES, RESPONSES, REQUESTS)


class BoundedTables:
    """See the module docstring.

    Args:
        db: where they are.
        max_rows: of each table.
    """

    def __init__(self, db: sqlite3.Connection, max_rows: int) -> None:
        self._db = db
        self._max_rows = max_rows
        self._num_added = 0
        self._last_use: int = max(
            db.execute(table.last_use).fetchone()[0] for table in (*PRUNED, SESSIONS)
        )

    def insert(self, table: Table, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows, or put them in the place of those with the same key."""
        with self._transaction():
            self._db.executemany(table.insert, [(*row, self._use()) for row in rows])
            self._num_added += len(rows)
            if self._num_added >= PRUNE_EVERY:
                self._num_added = 0
                self._prune()

    def touch(self, table: Table, keys: Sequence[object]) -> None:
        """Note that rows were used."""
        with self._transaction():
            self._db.executemany(table.touch, [(self._use(), key) for key in keys])

    def _prune(self) -> None:
        for table in PRUNED:
            (num_rows,) = self._db.execute(table.count).fetchone()
            self._db.execute(table.prune, (num_rows - self._max_rows,))

    def _use(self) -> int:
        self._last_use += 1
        return self._last_use

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
