"""Chats that their clients asked to have stored: what was asked and answered, with their notes.

They are bounded in bytes: beyond the bound the oldest go, of the tenant that has the most, and
never because another has added its own. A chat goes with any of the sessions that have answered it.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_svc.http_api.sessions.conversations import PAGE_CHARACTERS, Run
from inference_svc.http_api.sessions.store_file import CHATS, BoundedTables, KeptBytes, transaction

Objects = Sequence[Mapping[str, Any]]

_KNOWN = "SELECT 1 FROM chats WHERE id = ?"
_FIND = "SELECT completion, metadata FROM chats WHERE id = ? AND tenant = ?"
_MESSAGES = "SELECT messages FROM chats WHERE id = ? AND tenant = ?"
_PLACE = "SELECT used FROM chats WHERE id = ? AND tenant = ?"
_SET = (
    "UPDATE chats SET metadata = :metadata, size = size + length(CAST(:metadata AS BLOB))"
    " - length(CAST(metadata AS BLOB)) WHERE id = :id AND tenant = :tenant"
)
_DELETE = "DELETE FROM chats WHERE id = ? AND tenant = ?"
_FORGET = (
    "DELETE FROM chats WHERE id IN"
    " (SELECT chat FROM chat_sessions WHERE tenant = ? AND session = ?)"
)
_PAGE = (
    "SELECT completion, metadata FROM chats WHERE tenant = :tenant"
    " AND (:model = '' OR model = :model)"
    " AND NOT EXISTS (SELECT 1 FROM json_each(:metadata) AS wanted WHERE NOT EXISTS (SELECT 1"
    " FROM json_each(chats.metadata) AS found WHERE found.key = wanted.key"
    " AND found.value = wanted.value))"
)
_ORDERS = {  # by whether the oldest come first
    True: f"{_PAGE} AND used > :place ORDER BY used",
    False: f"{_PAGE} AND used < :place ORDER BY used DESC",
}
_AFTER_ALL = 2**62


@dataclass(frozen=True)
class StoredChat:
    """A chat that is to be stored.

    Attributes:
        completion: the object that its client got.
        messages: what was asked, each with its id.
        metadata: the client's own notes.
        sessions: that have answered it.
    """

    completion: Mapping[str, Any]
    messages: Objects
    metadata: Mapping[str, str]
    sessions: Sequence[str]


@dataclass(frozen=True)
class Wanted:
    """Which chats a list has.

    Attributes:
        model: by its name as their clients wrote it; "": any.
        metadata: notes that they have, among others.
        after: id of the one that they follow; "": from the beginning.
        limit: most of them; there may be fewer, lest a page has too many bytes.
        is_ascending: whether the oldest come first.
    """

    model: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    after: str = ""
    limit: int = 20
    is_ascending: bool = True


class StoredChats:
    """Stores chats; each method may raise StoreUnavailableError.

    Args:
        db: the database with the tables.
        run: runs calls on its thread.
        tables: adds rows to them.
        max_bytes: bound of all chats together; 0: none is stored.
    """

    def __init__(
        self, db: sqlite3.Connection, run: Run, tables: BoundedTables, max_bytes: int
    ) -> None:
        self._db = db
        self._run = run
        self._rows = KeptBytes(db, tables, CHATS, max_bytes)

    async def keep(self, tenant: str, chat: StoredChat) -> None:
        """Store a chat; a repeat of one that is stored changes nothing."""
        made = chat.completion
        name, metadata = made["id"], _text(chat.metadata)
        texts = (_text(made), _text(chat.messages))
        size = sum(len(text.encode()) for text in (*texts, metadata))
        row = (name, tenant, made["model"], metadata, *texts, size)

        def keep() -> None:
            if self._db.execute(_KNOWN, (name,)).fetchone():
                return
            self._rows.add(row, size)
            with transaction(self._db):
                if self._db.execute(_KNOWN, (name,)).fetchone():  # it may be more than the bound
                    rows = [(tenant, session, name) for session in set(chat.sessions)]
                    self._db.executemany("INSERT INTO chat_sessions VALUES (?, ?, ?)", rows)

        await self._run(keep)

    async def find(self, tenant: str, chat_id: str) -> dict[str, Any] | None:
        """Return a tenant's chat with its notes; None if it has none of that id."""
        row = await self._run(lambda: self._db.execute(_FIND, (chat_id, tenant)).fetchone())
        return None if row is None else _shown(*row)

    async def messages(self, tenant: str, chat_id: str) -> list[dict[str, Any]] | None:
        """Return what was asked in a tenant's chat; None if it has none of that id."""
        row = await self._run(lambda: self._db.execute(_MESSAGES, (chat_id, tenant)).fetchone())
        return None if row is None else list(json.loads(row[0]))

    async def page(self, tenant: str, wanted: Wanted) -> tuple[list[dict[str, Any]], bool] | None:
        """Return a tenant's chats, and whether there are more; None if there is none to follow."""

        def find() -> tuple[list[dict[str, Any]], bool] | None:
            place = 0 if wanted.is_ascending else _AFTER_ALL
            if wanted.after:
                row = self._db.execute(_PLACE, (wanted.after, tenant)).fetchone()
                if row is None:
                    return None
                place = row[0]
            values = {
                "tenant": tenant,
                "model": wanted.model,
                "metadata": _text(wanted.metadata),
                "place": place,
            }
            return _first(self._db.execute(_ORDERS[wanted.is_ascending], values), wanted.limit)

        return await self._run(find)

    async def set_metadata(self, tenant: str, chat_id: str, metadata: Mapping[str, str]) -> None:
        """Put a client's notes in the place of those that are there."""
        values = {"metadata": _text(metadata), "id": chat_id, "tenant": tenant}
        await self._run(lambda: self._db.execute(_SET, values))

    async def delete(self, tenant: str, chat_id: str) -> bool:
        """Delete a tenant's chat; return whether it had one of that id."""
        changed = await self._run(lambda: self._db.execute(_DELETE, (chat_id, tenant)).rowcount)
        return changed > 0

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Delete the chats that a session has answered; on the thread of the database."""
        self._db.execute(_FORGET, (tenant, session_id))


def _first(rows: sqlite3.Cursor, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the first chats of some, and whether there are more."""
    found: list[dict[str, Any]] = []
    size = 0
    for completion, metadata in rows:
        size += len(completion)
        if found and (len(found) == limit or size > PAGE_CHARACTERS):
            return found, True
        found.append(_shown(completion, metadata))
    return found, False


def _shown(completion: str, metadata: str) -> dict[str, Any]:
    return {**json.loads(completion), "metadata": json.loads(metadata)}


def _text(value: Mapping[str, Any] | Objects) -> str:
    return json.dumps(value, ensure_ascii=False)
