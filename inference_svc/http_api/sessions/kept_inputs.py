"""The inputs of stored responses, as their clients may read them again.

They are text of users, and large beside the other rows. So they are bounded in bytes: beyond the
bound the oldest go, of the tenant that has the most, and never because another has added its own.
An input goes with its response, whatever deletes that, and with the session of its response.

Methods run on one thread: that of the database.
"""

import sqlite3

from inference_svc.http_api.sessions.store_file import INPUTS, BoundedTables, KeptBytes

_FIND = "SELECT items FROM inputs WHERE id = ? AND tenant = ?"
_FORGET = (
    "DELETE FROM inputs WHERE id IN (SELECT id FROM responses WHERE tenant = ? AND session = ?)"
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
        self._rows = KeptBytes(db, tables, INPUTS, max_bytes)

    def keep(self, tenant: str, response_id: str, items: str) -> None:
        """Keep the input of a response that is stored."""
        size = len(items.encode())
        self._rows.add((response_id, tenant, items, size), size)

    def find(self, tenant: str, response_id: str) -> str | None:
        """Return the input of a tenant's response; None if it is not kept."""
        row = self._db.execute(_FIND, (response_id, tenant)).fetchone()
        return None if row is None else str(row[0])

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete what a session's responses were asked."""
        self._db.execute(_FORGET, (tenant, session_id))
