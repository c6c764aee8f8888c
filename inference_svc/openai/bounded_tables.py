"""Tables of the remembered file that are bounded: what was not used for longest goes first.

The bound is for all tenants together, and one of them cannot push out another's rows by adding its
own: who has the most rows gives up its oldest, again and again, until the bound holds.

Methods run on one thread: that of the database.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PRUNE_EVERY = 256  # rows that are added between two looks at the bound


@dataclass(frozen=True)
class Table:
    """What is said to a table; `prune` and `take` get how many rows are to go."""

    insert: str
    last_use: str
    touch: str = ""
    count: str = ""
    prune: str = ""
    take: str = ""


HISTORIES = Table(
    "INSERT OR REPLACE INTO histories VALUES (?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM histories",
    "UPDATE histories SET used = ? WHERE digest = ?",
    "SELECT count(*) FROM histories",
    "DELETE FROM histories WHERE digest IN (SELECT digest FROM (SELECT digest, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM histories)"
    " ORDER BY place DESC, used LIMIT ?)",
)
RESPONSES = Table(
    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM responses",
    "UPDATE responses SET used = ? WHERE id = ?",
    "SELECT count(*) FROM responses",
    "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM responses)"
    " ORDER BY place DESC, used LIMIT ?)",
)
REQUESTS = Table(
    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM requests",
    "UPDATE requests SET used = ? WHERE id = ?",
    "SELECT count(*) FROM requests",
    "DELETE FROM requests WHERE id IN (SELECT id FROM (SELECT id, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM requests)"
    " ORDER BY place DESC, used LIMIT ?)",
)
SESSIONS = Table(  # who takes a row away takes the session, too
    "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM sessions",
    "UPDATE sessions SET used = ? WHERE (tenant, session) = (?, ?)",
    "SELECT count(*) FROM sessions",
    take="DELETE FROM sessions WHERE (tenant, session) IN (SELECT tenant, session FROM"
    " (SELECT tenant, session, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM sessions)"
    " ORDER BY place DESC, used LIMIT ?) RETURNING tenant, session",
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

    def touch(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        """Note that rows were used, if they are there."""
        with self._transaction():
            self._db.executemany(table.touch, [(self._use(), *key) for key in keys])

    def take(self, table: Table, most: int) -> list[tuple[str, str]]:
        """Remove what is beyond a bound of its own; the caller looks after what they name."""
        excess = self._excess(table, most)
        return self._db.execute(table.take, (excess,)).fetchall() if excess > 0 else []

    def _prune(self) -> None:
        for table in PRUNED:
            excess = self._excess(table, self._max_rows)
            if excess > 0:
                self._db.execute(table.prune, (excess,))

    def _excess(self, table: Table, most: int) -> int:
        (num_rows,) = self._db.execute(table.count).fetchone()
        return int(num_rows) - most

    def _use(self) -> int:
        self._last_use += 1
        return self._last_use

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk rolls back by itself, or fails to commit
                self._db.execute("ROLLBACK")
            raise
