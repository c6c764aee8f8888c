"""Versions of this server's conversations in the shared object store; read and replaced whole.

Triggers of the tables record each change of a conversation. From then on the conversation is
*behind*: the object store lacks some of it, until `replicated_conversations.py` puts it there.
"""

import json
import sqlite3
from dataclasses import dataclass

from inference_svc.http_api.sessions.conversations import ROW_BYTES, UNREAD, Run, json_text
from inference_svc.http_api.sessions.store_file import durable
from shared.blobs.conversation_entry import ConversationEntry, EntryItem

_SYNC_STATE = (
    "SELECT number, behind FROM versions JOIN conversations ON id = conversation"
    " WHERE id = ? AND tenant = ?"
)
_FIND = (
    "SELECT created, metadata, instructions, session, turns, request"
    " FROM conversations WHERE id = ? AND tenant = ?"
)
_ITEMS = "SELECT item, turn FROM items WHERE conversation = ? ORDER BY place"
_GONE = "SELECT item FROM gone WHERE conversation = ? ORDER BY number"
_BEHIND = (
    "SELECT tenant, id FROM versions JOIN conversations ON id = conversation WHERE behind"
    " ORDER BY id LIMIT ?"
)
_SESSION = "SELECT session FROM conversations WHERE id = ? AND tenant = ?"
_REMOVE = "DELETE FROM conversations WHERE id = ? AND tenant = ?"
_INSERT = "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_ITEM = "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)"
_SET_VERSION = "UPDATE versions SET number = ?, behind = ? WHERE conversation = ?"
_INSERT_GONE = "INSERT INTO gone VALUES (?, ?, ?)"
_MARK_TEMPORARY = "INSERT OR IGNORE INTO passing VALUES (?, ?)"
_MARK_LASTING = "DELETE FROM passing WHERE tenant = ? AND session = ?"


@dataclass(frozen=True)
class SyncState:
    """The state of a conversation here, compared with the object store's.

    Attributes:
        number: number of the store's version that it comes from; 0 if it comes from none, or is
            not here.
        is_behind: whether the store lacks some of it.
    """

    number: int
    is_behind: bool


ABSENT = SyncState(0, is_behind=False)


class ConversationVersions:
    """Reads and replaces whole conversations with their versions.

    Each method may raise StoreUnavailableError.

    Args:
        db: the database with the tables.
        run: runs calls on the database's thread.
    """

    def __init__(self, db: sqlite3.Connection, run: Run) -> None:
        self._db = db
        self._run = run

    async def sync_state(self, tenant: str, name: str) -> SyncState:
        """Return the state of a tenant's conversation; `ABSENT` if it is not here."""

        def find() -> SyncState:
            row = self._db.execute(_SYNC_STATE, (name, tenant)).fetchone()
            return ABSENT if row is None else SyncState(row[0], bool(row[1]))

        return await self._run(find)

    async def read(self, tenant: str, name: str) -> ConversationEntry | None:
        """Return a tenant's conversation with all items; None if it is not here."""

        def find() -> ConversationEntry | None:
            row = self._db.execute(_FIND, (name, tenant)).fetchone()
            if row is None:
                return None
            created_s, metadata, instructions, session, turns, request = row
            items = tuple(
                EntryItem(json.loads(text), 0 if turn == UNREAD else turn)
                for text, turn in self._db.execute(_ITEMS, (name,))
            )
            gone = tuple(item for (item,) in self._db.execute(_GONE, (name,)))
            begin = tenant, name, created_s, json.loads(metadata), instructions
            return ConversationEntry(*begin, session, turns, request, items, gone)

        return await self._run(find)

    async def replace(
        self, entry: ConversationEntry, store_entry: ConversationEntry, number: int
    ) -> None:
        """Replace a conversation here.

        Args:
            entry: the new content; it is behind if it differs from the object store's.
            store_entry: the object store's content.
            number: number of the object store's version.
        """
        name, tenant = entry.conversation, entry.tenant

        def take() -> None:
            with durable(self._db):
                old_session = self._db.execute(_SESSION, (name, tenant)).fetchone()
                self._db.execute(_REMOVE, (name, tenant))
                self._insert(entry)
                self._db.execute(_SET_VERSION, (number, entry != store_entry, name))
                # The server that continued the conversation also removes the session it left.
                if old_session is not None and old_session[0] != entry.session:
                    self._db.execute(_MARK_TEMPORARY, (tenant, old_session[0]))
                self._db.execute(_MARK_LASTING, (tenant, entry.session))

        await self._run(take)

    async def mark_in_step(self, name: str, number: int) -> None:
        """Record that the object store has all of a conversation, as version `number`."""
        await self._set_version(name, number, is_behind=False)

    async def mark_lost(self, name: str) -> None:
        """Record that the object store has lost a conversation."""
        await self._set_version(name, 0, is_behind=True)

    async def list_behind(self, most: int) -> list[tuple[str, str]]:
        """Return at most `most` conversations that are behind, as (tenant, id)."""
        return await self._run(lambda: self._db.execute(_BEHIND, (most,)).fetchall())

    async def list_shared(self) -> list[tuple[str, str]]:
        """Return the conversations that the object store has, or had, as (tenant, id)."""
        sql = (
            "SELECT tenant, id FROM versions JOIN conversations ON id = conversation"
            " WHERE number > 0"
        )
        return await self._run(lambda: self._db.execute(sql).fetchall())

    async def _set_version(self, name: str, number: int, *, is_behind: bool) -> None:
        def agree() -> None:
            with durable(self._db):
                self._db.execute(_SET_VERSION, (number, is_behind, name))

        await self._run(agree)

    def _insert(self, entry: ConversationEntry) -> None:
        name, metadata = entry.conversation, json_text(entry.metadata)
        size = ROW_BYTES + len((metadata + entry.instructions).encode())
        self._db.execute(
            _INSERT,
            (
                *(name, entry.tenant, entry.created_s, metadata, entry.instructions),
                *(entry.session, entry.turns, entry.request, size),
            ),
        )
        texts = [(item, json_text(item.item)) for item in entry.items]
        rows = [
            (name, place, item.item_id, item.turn or UNREAD, text, len(text.encode()))
            for place, (item, text) in enumerate(texts, 1)
        ]
        self._db.executemany(_INSERT_ITEM, rows)
        numbered = [(name, number, item) for number, item in enumerate(entry.gone, 1)]
        self._db.executemany(_INSERT_GONE, numbered)
