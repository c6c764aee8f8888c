"""Which versions conversations here are of, in the store that services share; read and set whole.

The tables' triggers note each change of a conversation, whoever makes it: from then on it is
*behind*, until the store has it as well (`moving_conversations.py`).
"""

import json
import sqlite3
from dataclasses import dataclass

from inference_svc.http_api.sessions.conversations import ROW_BYTES, UNREAD, Run, json_text
from inference_svc.http_api.sessions.store_file import durable
from shared.blobs.conversation_entry import ConversationEntry, EntryItem

_STANDING = (
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
_AGREE = "UPDATE versions SET number = ?, behind = ? WHERE conversation = ?"
_INSERT_GONE = "INSERT INTO gone VALUES (?, ?, ?)"
_LEAVE = "INSERT OR IGNORE INTO passing VALUES (?, ?)"
_STAYS = "DELETE FROM passing WHERE tenant = ? AND session = ?"


@dataclass(frozen=True)
class Standing:
    """How a conversation here stands to the store.

    Attributes:
        number: of the version that it comes from; 0: there was none, or it is not here.
        is_behind: whether the store does not have all of it.
    """

    number: int
    is_behind: bool


ABSENT = Standing(0, is_behind=False)


class ConversationVersions:
    """See the module docstring; each method may raise StoreUnavailableError.

    Args:
        db: the database with the tables.
        run: runs calls on its thread.
    """

    def __init__(self, db: sqlite3.Connection, run: Run) -> None:
        self._db = db
        self._run = run

    async def standing(self, tenant: str, name: str) -> Standing:
        """Return how a tenant's conversation stands."""

        def find() -> Standing:
            row = self._db.execute(_STANDING, (name, tenant)).fetchone()
            return ABSENT if row is None else Standing(row[0], bool(row[1]))

        return await self._run(find)

    async def whole(self, tenant: str, name: str) -> ConversationEntry | None:
        """Return a tenant's conversation; None: it is not here."""

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

    async def take(self, entry: ConversationEntry, there: ConversationEntry, number: int) -> None:
        """Put a conversation in the place of what is here.

        Args:
            entry: the conversation; what is behind of it, if it is another one than the store's.
            there: what the store has of it.
            number: of the store's version.
        """
        name, tenant = entry.conversation, entry.tenant

        def take() -> None:
            with durable(self._db):
                left = self._db.execute(_SESSION, (name, tenant)).fetchone()
                self._db.execute(_REMOVE, (name, tenant))
                self._insert(entry)
                self._db.execute(_AGREE, (number, entry != there, name))
                if left is not None and left[0] != entry.session:  # whoever went on removes it, too
                    self._db.execute(_LEAVE, (tenant, left[0]))
                self._db.execute(_STAYS, (tenant, entry.session))

        await self._run(take)

    async def agreed(self, name: str, number: int) -> None:
        """Take that the store has all of a conversation, as a version of this number."""
        await self._agree(name, number, is_behind=False)

    async def lost(self, name: str) -> None:
        """Take that the store has nothing of a conversation any more."""
        await self._agree(name, 0, is_behind=True)

    async def behind(self, most: int) -> list[tuple[str, str]]:
        """Return so many conversations of which the store does not have all: tenant and id."""
        return await self._run(lambda: self._db.execute(_BEHIND, (most,)).fetchall())

    async def shared(self) -> list[tuple[str, str]]:
        """Return the conversations that the store has, or had: tenant and id."""
        sql = (
            "SELECT tenant, id FROM versions JOIN conversations ON id = conversation"
            " WHERE number > 0"
        )
        return await self._run(lambda: self._db.execute(sql).fetchall())

    async def _agree(self, name: str, number: int, *, is_behind: bool) -> None:
        def agree() -> None:
            with durable(self._db):
                self._db.execute(_AGREE, (number, is_behind, name))

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
        texts = [(one, json_text(one.item)) for one in entry.items]
        rows = [
            (name, place, one.item_id, one.turn or UNREAD, text, len(text.encode()))
            for place, (one, text) in enumerate(texts, 1)
        ]
        self._db.executemany(_INSERT_ITEM, rows)
        numbered = [(name, number, item) for number, item in enumerate(entry.gone, 1)]
        self._db.executemany(_INSERT_GONE, numbered)
