"""The inputs of stored responses, which clients can read again.

Inputs are users' text, and large compared with the other rows. So their bytes are bounded: beyond
the bound, the tenant with the most bytes loses its oldest inputs, and no tenant loses any because
another one added its own. An input is deleted with its response, and with the response's session.

Methods run on the database's thread.
"""

import sqlite3

from inference_svc.http_api.sessions.store_file import INPUTS, BoundedTables, KeptBytes

_FIND = "SELECT items FROM inputs WHERE id = ? AND tenant = ?"
_FORGET = (
    "DELETE FROM inputs WHERE id IN (SELECT id FROM responses WHERE tenant = ? AND session = ?)"
)


class KeptInputs:
    """Stores inputs, and deletes the oldest ones beyond a bound of bytes.

    Args:
        db: the database with the tables.
        tables: adds rows to them.
        max_bytes: most bytes of all inputs together.
    """

    def __init__(self, db: sqlite3.Connection, tables: BoundedTables, max_bytes: int) -> None:
        self._db = db
        self._rows = KeptBytes(db, tables, INPUTS, max_bytes)

    def keep(self, tenant: str, response_id: str, items: str) -> None:
        """Store the input of a stored response."""
        size = len(items.encode())
        self._rows.add((response_id, tenant, items, size), size)

    def find(self, tenant: str, response_id: str) -> str | None:
        """Return the input of a tenant's response; None if it is not stored."""
        row = self._db.execute(_FIND, (response_id, tenant)).fetchone()
        return None if row is None else str(row[0])

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete the inputs of a session's responses."""
        self._db.execute(_FORGET, (tenant, session_id))
