"""The inputs of stored responses, as their clients may read them again.

They are text of users, and large beside the other rows. So they are bounded in bytes: beyond the
bound the oldest go, of the tenant that has the most, and never because another has added its own.
An input goes with its response, whatever deletes that, and with the session of its response.

Methods run on one thread: that of the database.
"""

import sqlite3

from inference_svc.http_api.sessions.store_file import INPUTS, BoundedTables

LEFT_OF_16 = 15  # sixteenths of the bound that are left when it was reached: then there is peace

_TOTAL = "SELECT coalesce(sum(size), 0) FROM inputs"
_FIND = "SELECT items FROM inputs WHERE id = ? AND tenant = ?"
_FORGET = (
    "DELETE FROM inputs WHERE id IN (SELECT id FROM responses WHERE tenant = ? AND session = ?)"
)
# By what a tenant has up to a row, its newest first: what is furthest down goes until it is enough.
_TAKE = (
    "DELETE FROM inputs WHERE id IN (SELECT id FROM (SELECT id, size,"
    " sum(size) OVER (ORDER BY upto DESC, used) AS freed FROM (SELECT id, size, used,"
    " sum(size) OVER (PARTITION BY tenant ORDER BY used DESC) AS upto FROM inputs))"
    " WHERE freed - size < ?)"
)


class KeptInputs:
    """Keeps inputs, and deletes those that are too many bytes.

    Args:
        db: the database with the tables.
        tables: adds rows to them.
        max_bytes: bound of all inputs together.
    """

    def __init__(self, db: sqlite3.Connection, tables: BoundedTables, max_bytes: int) -> None:
        self._db = db
        self._tables = tables
        self._max_bytes = max_bytes
        self._most_bytes = self._total()  # there may be less: who deletes does not count

    def keep(self, tenant: str, response_id: str, items: str) -> None:
        """Keep the input of a response that is stored."""
        size = len(items.encode())
        self._tables.insert(INPUTS, [(response_id, tenant, items, size)])
        self._most_bytes += size
        if self._most_bytes > self._max_bytes:
            self._make_room()

    def find(self, tenant: str, response_id: str) -> str | None:
        """Return the input of a tenant's response; None if it is not kept."""
        row = self._db.execute(_FIND, (response_id, tenant)).fetchone()
        return None if row is None else str(row[0])

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete what a session's responses were asked."""
        self._db.execute(_FORGET, (tenant, session_id))

    def _make_room(self) -> None:
        total = self._total()
        if total > self._max_bytes:
            excess = total - self._max_bytes * LEFT_OF_16 // 16
            self._db.execute(_TAKE, (excess,))
            total = self._total()
        self._most_bytes = total

    def _total(self) -> int:
        (total,) = self._db.execute(_TOTAL).fetchone()
        return int(total)
