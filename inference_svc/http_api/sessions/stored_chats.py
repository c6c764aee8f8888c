"""Stored chats: chat completions that clients asked to store, with their messages and metadata.

Their bytes are bounded: beyond the bound, the tenant with the most bytes loses its oldest chats,
and no tenant loses any because another one added its own. A chat is deleted with any of the
sessions that answered it.
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
_BEHIND_ALL = 2**62


@dataclass(frozen=True)
class StoredChat:
    """A chat to be stored.

    Attributes:
        completion: the completion object that the client got.
        messages: the messages of the request, each with its id.
        metadata: the client's own notes.
        sessions: ids of the sessions that answered it.
    """

    completion: Mapping[str, Any]
    messages: Objects
    metadata: Mapping[str, str]
    sessions: Sequence[str]


@dataclass(frozen=True)
class ChatFilter:
    """The filter of a list of chats, and the page of it.

    Attributes:
        model: the model's name as the client wrote it; "": any model.
        metadata: notes that each chat has, among others.
        after: id of the chat before the page; "": from the beginning.
        limit: most chats; there are fewer if they exceed `PAGE_CHARACTERS`.
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
        run: runs calls on the database's thread.
        tables: adds rows to the tables.
        max_bytes: most bytes of all chats together; 0: none is stored.
    """

    def __init__(
        self, db: sqlite3.Connection, run: Run, tables: BoundedTables, max_bytes: int
    ) -> None:
        self._db = db
        self._run = run
        self._rows = KeptBytes(db, tables, CHATS, max_bytes)

    async def keep(self, tenant: str, chat: StoredChat) -> None:
        """Store a chat; nothing changes if it is already stored."""
        completion = chat.completion
        name, metadata = completion["id"], _text(chat.metadata)
        texts = (_text(completion), _text(chat.messages))
        size = sum(len(text.encode()) for text in (*texts, metadata))
        row = (name, tenant, completion["model"], metadata, *texts, size)

        def keep() -> None:
            if self._db.execute(_KNOWN, (name,)).fetchone():
                return
            self._rows.add(row, size)
            with transaction(self._db):
                # A chat above the bound was not added, or is deleted again.
                if self._db.execute(_KNOWN, (name,)).fetchone():
                    rows = [(tenant, session, name) for session in set(chat.sessions)]
                    self._db.executemany("INSERT INTO chat_sessions VALUES (?, ?, ?)", rows)

        await self._run(keep)

    async def find(self, tenant: str, chat_id: str) -> dict[str, Any] | None:
        """Return a tenant's chat with its metadata; None if it has none of that id."""
        row = await self._run(lambda: self._db.execute(_FIND, (chat_id, tenant)).fetchone())
        return None if row is None else _as_object(*row)

    async def messages(self, tenant: str, chat_id: str) -> list[dict[str, Any]] | None:
        """Return the messages of a tenant's chat; None if it has none of that id."""
        row = await self._run(lambda: self._db.execute(_MESSAGES, (chat_id, tenant)).fetchone())
        return None if row is None else list(json.loads(row[0]))

    async def page(
        self, tenant: str, query: ChatFilter
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Return a page of a tenant's chats, and whether there are more.

        None if the tenant has no chat `query.after`.
        """

        def find() -> tuple[list[dict[str, Any]], bool] | None:
            place = 0 if query.is_ascending else _BEHIND_ALL
            if query.after:
                row = self._db.execute(_PLACE, (query.after, tenant)).fetchone()
                if row is None:
                    return None
                place = row[0]
            values = {
                "tenant": tenant,
                "model": query.model,
                "metadata": _text(query.metadata),
                "place": place,
            }
            return _read_page(self._db.execute(_ORDERS[query.is_ascending], values), query.limit)

        return await self._run(find)

    async def set_metadata(self, tenant: str, chat_id: str, metadata: Mapping[str, str]) -> None:
        """Replace a chat's metadata."""
        values = {"metadata": _text(metadata), "id": chat_id, "tenant": tenant}
        await self._run(lambda: self._db.execute(_SET, values))

    async def delete(self, tenant: str, chat_id: str) -> bool:
        """Delete a tenant's chat; return whether it had one of that id."""
        changed = await self._run(lambda: self._db.execute(_DELETE, (chat_id, tenant)).rowcount)
        return changed > 0

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Delete the chats that a session answered; runs on the database's thread."""
        self._db.execute(_FORGET, (tenant, session_id))


def _read_page(rows: sqlite3.Cursor, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the chats of the first rows, and whether there are more rows."""
    found: list[dict[str, Any]] = []
    size = 0
    for completion, metadata in rows:
        size += len(completion)
        if found and (len(found) == limit or size > PAGE_CHARACTERS):
            return found, True
        found.append(_as_object(completion, metadata))
    return found, False


def _as_object(completion: str, metadata: str) -> dict[str, Any]:
    return {**json.loads(completion), "metadata": json.loads(metadata)}


def _text(value: Mapping[str, Any] | Objects) -> str:
    return json.dumps(value, ensure_ascii=False)
