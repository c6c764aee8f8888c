"""Conversations: their storage, and holds that let one request at a time change one.

A conversation is a list of items with a session of its own, whose first turns have read the first
items. The items are authoritative. The next turn reads all items that the session has not read,
or has to read again because an item before them was deleted. So a failed turn or a lost session
takes nothing away from a conversation.

Rows stay until they are deleted. A tenant at its bound of bytes can add no more.
"""

import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from inference_svc.core.errors import InputTooLongError, SessionBusyError
from inference_svc.http_api.errors import ConversationsFullError, unknown_conversation
from inference_svc.http_api.sessions.lookup import Conversation, ConversationTurn, Point
from inference_svc.http_api.sessions.store_file import durable

T = TypeVar("T")
Items = Sequence[Mapping[str, Any]]  # each with its id

ROW_BYTES = 4096  # counted for a conversation without its items: about its session's file
UNREAD = 2**62  # the turn of an item that no turn has read
MAX_UNREAD = 4096  # items that one turn reads: as many as a body may have messages
PAGE_CHARACTERS = 2**20  # most characters of a page's items; a single longer item is a page

_INSERT = "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_FIND = (
    "SELECT id, created, metadata, instructions, session, turns, request FROM conversations"
    " WHERE id = ? AND tenant = ?"
)
_SIZE = "SELECT coalesce(sum(size), 0) FROM conversations WHERE tenant = ?"
_LAST_PLACE = "SELECT coalesce(max(place), 0) FROM items WHERE conversation = ?"
_PLACE_AND_TURN = "SELECT place, turn FROM items WHERE conversation = ? AND id = ?"
_OF_UNREAD = "FROM items WHERE conversation = ? AND turn > ?"
# "+place" keeps SQLite from walking all items in their order: the index of turns finds the few.
_UNREAD = f"SELECT item {_OF_UNREAD} ORDER BY +place"
_UNREAD_SIZE = f"SELECT count(*), coalesce(sum(size), 0) {_OF_UNREAD}"
_CALLS = "SELECT item FROM items WHERE conversation = ? AND turn = ? AND id GLOB 'fc_*'"
_PAGES = {  # by whether the oldest come first
    True: "SELECT item FROM items WHERE conversation = ? AND place > ? ORDER BY place",
    False: "SELECT item FROM items WHERE conversation = ? AND place < ? ORDER BY place DESC",
}
_BEHIND_ALL = 2**62
_ADVANCE = (
    "UPDATE conversations SET session = ?, turns = ?, request = ?, instructions = ?"
    " WHERE id = ? AND session = ? AND turns = ? AND request = ?"
)
_MARK_READ = "UPDATE items SET turn = ? WHERE conversation = ? AND turn > ?"
_MARK_LASTING = "DELETE FROM passing WHERE tenant = ? AND session = ?"
# The old session is removed. Its first turns were copied to the new one with their request ids,
# so rows that point at them stay valid there.
_KEEP_RESPONSES = (
    "UPDATE responses SET session = :new WHERE tenant = :tenant AND session = :old"
    " AND turns <= :kept"
)
_KEEP_REQUESTS = (
    "UPDATE requests SET session = :new WHERE tenant = :tenant AND session = :old AND turns < :kept"
)
_MOVE_SESSION = (
    "INSERT OR IGNORE INTO passing VALUES (:tenant, :old)",
    _KEEP_RESPONSES,
    _KEEP_REQUESTS,
    "DELETE FROM requests WHERE tenant = :tenant AND session = :old",
)


class Run(Protocol):
    """A function that runs a call on the database's thread."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]:
        """Return what the call returns.

        Raises:
            StoreUnavailableError: the database cannot be used.
        """


class Conversations:
    """Stores conversations; each method may raise StoreUnavailableError.

    Methods without a tenant trust their caller: it has found the conversation as its tenant's.

    Args:
        db: the database with the tables.
        run: runs calls on the database's thread.
        max_bytes: most bytes of one tenant's conversations; 0: there are none.

    Attributes:
        are_kept: whether conversations can be stored.
    """

    def __init__(self, db: sqlite3.Connection, run: Run, max_bytes: int) -> None:
        self._db = db
        self._run = run
        self._max_bytes = max_bytes
        self.are_kept = max_bytes > 0

    async def create(self, tenant: str, conversation: Conversation, items: Items) -> None:
        """Store a new conversation.

        Raises:
            ConversationsFullError: the tenant has no room for it.
        """
        metadata = json_text(conversation.metadata)
        size = ROW_BYTES + len(metadata.encode())
        name = conversation.conversation_id
        row = (
            name,
            tenant,
            conversation.created_s,
            metadata,
            "",
            conversation.session_id,
            0,
            "",
            size,
        )

        def create() -> None:
            self._check_room(tenant, size, items)
            with durable(self._db):
                self._db.execute(_INSERT, row)
                self._add(name, items, UNREAD)

        await self._run(create)

    async def find(self, tenant: str, conversation_id: str) -> Conversation | None:
        """Return a tenant's conversation; None if it has none of that id."""
        row = await self._run(lambda: self._row(_FIND, conversation_id, tenant))
        if row is None:
            return None
        name, created_s, metadata, *columns = row
        return Conversation(name, created_s, json.loads(metadata), *columns)

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> None:
        """Replace a conversation's metadata.

        Raises:
            ConversationsFullError: the tenant has no room for it.
        """
        text = json_text(metadata)

        def change() -> None:
            self._check_room(tenant, len(text.encode()), ())
            with durable(self._db):
                sql = "UPDATE conversations SET metadata = ? WHERE id = ?"
                self._db.execute(sql, (text, conversation_id))

        await self._run(change)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation and its items, if it exists."""
        sql = "DELETE FROM conversations WHERE id = ? AND tenant = ?"

        def delete() -> None:
            with durable(self._db):
                self._db.execute(sql, (conversation_id, tenant))

        await self._run(delete)

    # ----------------------------------------------------------------------------------- items

    async def check_room(self, tenant: str, items: Items, instructions: str = "") -> None:
        """Check that a tenant has room for items and instructions.

        Raises:
            ConversationsFullError: it has no room.
        """
        more = len(instructions.encode())
        await self._run(lambda: self._check_room(tenant, more, items))

    async def add(self, tenant: str, conversation_id: str, items: Items) -> None:
        """Add items, which the next turn reads.

        Raises:
            ConversationsFullError: the tenant has no room for them.
            UnknownConversationError: the conversation was deleted, perhaps with its session.
        """

        def add() -> None:
            self._check_room(tenant, 0, items)
            with durable(self._db):
                if self._row(_FIND, conversation_id, tenant) is None:
                    raise unknown_conversation(conversation_id)
                self._add(conversation_id, items, UNREAD)

        await self._run(add)

    async def page(
        self, conversation_id: str, limit: int, after: str, *, is_ascending: bool
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Return a page of a conversation's items.

        Args:
            conversation_id: id of the conversation.
            limit: most items; there are fewer if they exceed `PAGE_CHARACTERS`.
            after: id of the item before the page; "": from the beginning.
            is_ascending: whether the oldest come first.

        Returns:
            The items, and whether there are more; None if there is no item `after`.
        """

        def find() -> tuple[list[dict[str, Any]], bool] | None:
            begin = 0 if is_ascending else _BEHIND_ALL
            if after:
                row = self._row(_PLACE_AND_TURN, conversation_id, after)
                if row is None:
                    return None
                begin = row[0]
            texts: list[str] = []
            size = 0
            for (text,) in self._db.execute(_PAGES[is_ascending], (conversation_id, begin)):
                size += len(text)
                if texts and (len(texts) == limit or size > PAGE_CHARACTERS):
                    return list(map(json.loads, texts)), True
                texts.append(text)
            return list(map(json.loads, texts)), False

        return await self._run(find)

    async def item(self, conversation_id: str, item_id: str) -> dict[str, Any] | None:
        """Return an item; None if the conversation has none of that id."""
        sql = "SELECT item FROM items WHERE conversation = ? AND id = ?"
        found = await self._run(lambda: self._items(sql, conversation_id, item_id))
        return found[0] if found else None

    async def unread(
        self, conversation_id: str, turns: int, most_bytes: int
    ) -> list[dict[str, Any]]:
        """Return the items that the first `turns` turns of the session have not read.

        Raises:
            InputTooLongError: they are more, or have more bytes, than one turn may read.
        """

        def find() -> list[dict[str, Any]]:
            number, size = self._db.execute(_UNREAD_SIZE, (conversation_id, turns)).fetchone()
            if number > MAX_UNREAD or size > most_bytes:
                raise InputTooLongError(
                    f"the conversation has {number} unread items of {size} bytes, but a turn "
                    f"reads at most {MAX_UNREAD} items of {most_bytes} bytes",
                    "delete some items, or begin another conversation",
                )
            return self._items(_UNREAD, conversation_id, turns)

        return await self._run(find)

    async def calls(self, conversation_id: str, turn: int) -> list[dict[str, Any]]:
        """Return the tool calls among a turn's items; turns are numbered from 1."""
        return await self._run(lambda: self._items(_CALLS, conversation_id, turn))

    async def turn_of(self, conversation_id: str, item_id: str) -> int | None:
        """Return the turn that has read an item, from 1, or UNREAD; None if there is no item."""
        row = await self._run(lambda: self._row(_PLACE_AND_TURN, conversation_id, item_id))
        return None if row is None else int(row[1])

    async def delete_item(self, remaining: Conversation, item_id: str) -> None:
        """Delete an item, and set the conversation's turns back to those before it.

        Args:
            remaining: the conversation with the turns that stay valid.
            item_id: id of the item.
        """
        name = remaining.conversation_id

        def delete() -> None:
            with durable(self._db):
                sql = "UPDATE conversations SET turns = ?, request = ? WHERE id = ?"
                self._db.execute(sql, (remaining.turns, remaining.request_id, name))
                sql = "DELETE FROM items WHERE conversation = ? AND id = ?"
                self._db.execute(sql, (name, item_id))

        await self._run(delete)

    async def record(self, tenant: str, turn: ConversationTurn, end: Point, items: Items) -> bool:
        """Add a turn: its items, and the session and turn where the conversation is now.

        Args:
            tenant: the conversation's tenant.
            turn: the turn.
            end: where it ended.
            items: the items of its input and its answer.

        Returns:
            Whether the turn was added; False if a repeat has added it already.
        """
        before, kept = turn.before, turn.at.turns if turn.at else 0
        name = before.conversation_id
        known = (name, before.session_id, before.turns, before.request_id)
        now = (end.session_id, end.turns, end.request_id, turn.instructions)
        values = {"tenant": tenant, "old": before.session_id, "new": end.session_id, "kept": kept}

        def record() -> bool:
            with durable(self._db):
                if not self._db.execute(_ADVANCE, (*now, *known)).rowcount:
                    return False
                self._db.execute(_MARK_READ, (end.turns, name, kept))
                self._add(name, items, end.turns)
                if end.session_id != before.session_id:
                    for sql in _MOVE_SESSION:
                        self._db.execute(sql, values)
                self._db.execute(_MARK_LASTING, (tenant, end.session_id))
                return True

        return await self._run(record)

    # ------------------------------------------------------------------- on the thread, below

    def _row(self, sql: str, *values: object) -> Any | None:
        return self._db.execute(sql, values).fetchone()

    def _items(self, sql: str, *values: object) -> list[dict[str, Any]]:
        return [json.loads(text) for (text,) in self._db.execute(sql, values).fetchall()]

    def _add(self, conversation_id: str, items: Items, turn: int) -> None:
        (place,) = self._db.execute(_LAST_PLACE, (conversation_id,)).fetchone()
        rows = [
            (conversation_id, place + number, item["id"], turn, text, len(text.encode()))
            for number, (item, text) in enumerate(zip(items, map(json_text, items), strict=True), 1)
        ]
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _check_room(self, tenant: str, more: int, items: Items) -> None:
        (size,) = self._db.execute(_SIZE, (tenant,)).fetchone()
        if size + more + sum(len(json_text(item).encode()) for item in items) > self._max_bytes:
            raise ConversationsFullError(
                f"the tenant's conversations take {size} bytes, but at most {self._max_bytes} are "
                "stored",
                "delete some conversations, or raise openai.conversation_bytes",
            )


def json_text(value: Mapping[str, Any]) -> str:
    """Return an item or metadata as JSON text, as it is stored and its bytes are counted."""
    return json.dumps(value, ensure_ascii=False)


class Holds:
    """Holds of conversations: one request at a time, and its repeats, may change one."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], list[bytes | None]] = {}  # keys of repeats

    def num_holders(self, tenant: str, conversation_id: str) -> int:
        """Return how many requests hold a conversation; several are repeats of one request."""
        return len(self._holders.get((tenant, conversation_id), ()))

    @contextmanager
    def hold(
        self, tenant: str, conversation_id: str, repeat_key: bytes | None = None
    ) -> Iterator[Callable[[], None]]:
        """Hold a conversation; yield a function that releases it before the block ends.

        Raises:
            SessionBusyError: another request holds it.
        """
        name = tenant, conversation_id
        holders = self._holders.setdefault(name, [])
        if holders and (repeat_key is None or repeat_key not in holders):
            raise SessionBusyError(
                f"conversation {conversation_id} is in use", "try again when its turn has finished"
            )
        holders.append(repeat_key)
        is_over = False

        def release() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                holders.remove(repeat_key)
                if not holders:
                    del self._holders[name]

        try:
            yield release
        finally:
            release()
