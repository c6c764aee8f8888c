"""The HTTP API's store on disk: histories, responses, chats, requests and sessions, bounded.

No answer depends on the store. Rows that cannot be read count as absent, rows that cannot be
written are lost; both are logged. The least recently used rows are deleted first. Conversations
are different (`conversations.py`): they are stored durably, or refused.

Calls run on the store's own thread, in the order in which they were made.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from inference_svc.http_api.sessions.conversation_versions import ConversationVersions
from inference_svc.http_api.sessions.conversations import Conversations
from inference_svc.http_api.sessions.kept_inputs import KeptInputs
from inference_svc.http_api.sessions.lookup import (
    Point,
    ResponseInfo,
    Route,
    StoredRequest,
    StoredResponse,
    UnansweredResponse,
)
from inference_svc.http_api.sessions.store_file import (
    FILE_NAME,
    HISTORIES,
    KEY_USES,
    REQUESTS,
    RESPONSES,
    SESSIONS,
    UNANSWERED,
    BoundedTables,
    Table,
    open_store,
)
from inference_svc.http_api.sessions.stored_chats import StoredChats
from inference_svc.runtime.turns.disk_trouble import RETRY_S
from inference_svc.runtime.worker_thread import WorkerThread
from shared.process.log import LineAllowance, get_logger
from shared.types.errors import UnavailableError

T = TypeVar("T")

log = get_logger(__name__)


class StoreUnavailableError(UnavailableError):
    """The store's file in the state directory cannot be used for now."""

    reason = "openai_memory_unavailable"


class ApiStore:
    """Stores histories, responses, repeats and sessions for the HTTP API.

    Args:
        directory: the service's state directory.
        max_rows: most rows of each table.
        max_input_bytes: most bytes of the inputs of all responses.
        conversation_bytes: most bytes of one tenant's conversations.
        chat_bytes: most bytes of all stored chats.

    Attributes:
        key: the secret key of digests.
        conversations: stores conversations.
        versions: tracks their versions in the object store that servers share.
        chats: stores chats whose clients asked for it.
    """

    def __init__(
        self,
        directory: Path,
        max_rows: int,
        max_input_bytes: int = 0,
        conversation_bytes: int = 0,
        chat_bytes: int = 0,
    ) -> None:
        self._db, self.key = open_store(directory)
        self._thread = WorkerThread("openai")
        self._lines = LineAllowance(per_s=1)
        self._tables = BoundedTables(self._db, max_rows)
        self._inputs = KeptInputs(self._db, self._tables, max_input_bytes)
        self.conversations = Conversations(self._db, self._run, conversation_bytes)
        self.versions = ConversationVersions(self._db, self._run)
        self.chats = StoredChats(self._db, self._run, self._tables, chat_bytes)

    def close(self) -> None:
        """Close the file, after the running call."""
        self._thread.close()
        self._db.close()

    # ------------------------------------------------------------------------------- histories

    async def find_histories(self, digests: Sequence[bytes]) -> dict[bytes, Point]:
        """Return where each history ends, for those that are stored; this counts as a use."""

        def find() -> dict[bytes, Point]:
            found = {}
            for digest in digests:
                row = self._row(
                    "SELECT session, turns, request, named FROM histories WHERE digest = ?", digest
                )
                if row is not None:
                    found[digest] = _point(*row)
            self._touch(HISTORIES, [(digest,) for digest in found])
            return found

        return await self._try(find, {})

    async def keep_histories(self, tenant: str, points: Iterable[tuple[bytes, Point]]) -> None:
        """Store where histories end; a later point of the same digest replaces an earlier one."""
        rows = [(digest, *_point_row(at), tenant) for digest, at in points]
        await self._try(lambda: self._tables.insert(HISTORIES, rows), None)

    async def forget_histories(self, digests: Sequence[bytes]) -> None:
        """Forget histories whose sessions are gone."""
        rows = [(digest,) for digest in digests]
        await self._try(
            lambda: self._db.executemany("DELETE FROM histories WHERE digest = ?", rows), None
        )

    # ------------------------------------------------------------------------------- responses

    async def keep_response(
        self, tenant: str, response_id: str, response: StoredResponse, items: str = ""
    ) -> None:
        """Store a response, and its input unless that is ""."""
        info = json.dumps(asdict(response.info), ensure_ascii=False)
        row = (response_id, tenant, *_point_row(response.at), response.history, info)

        def keep() -> None:
            self._tables.insert(RESPONSES, [row])
            if items:
                self._inputs.keep(tenant, response_id, items)

        await self._try(keep, None)

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response; None if it has none of that id.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """

        def find() -> StoredResponse | None:
            row = self._row(
                "SELECT session, turns, request, named, history, facts FROM responses"
                " WHERE id = ? AND tenant = ?",
                response_id,
                tenant,
            )
            if row is None:
                return None
            self._touch(RESPONSES, [(response_id,)])
            *at, history, info = row
            return StoredResponse(_point(*at), history, _info(info))

        return await self._run(find)

    async def responses_of(self, tenant: str, session_id: str) -> set[str]:
        """Return the ids of a session's stored responses.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        sql = "SELECT id FROM responses WHERE tenant = ? AND session = ?"
        rows = await self._run(lambda: self._db.execute(sql, (tenant, session_id)).fetchall())
        return {str(row[0]) for row in rows}

    async def find_input(self, tenant: str, response_id: str) -> str | None:
        """Return the input of a tenant's response as JSON; None if it is not stored.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        return await self._run(lambda: self._inputs.find(tenant, response_id))

    async def forget_texts(self, tenant: str, session_id: str) -> None:
        """Delete the inputs of a deleted session's responses, and its chats."""

        def forget() -> None:
            self._inputs.forget(tenant, session_id)
            self.chats.forget_session(tenant, session_id)

        await self._try(forget, None)

    async def forget_response(self, tenant: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            StoreUnavailableError: it could not be deleted.
        """
        sql = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        await self._run(lambda: self._db.execute(sql, (response_id, tenant)))

    async def keep_unanswered(
        self, tenant: str, response_id: str, response: UnansweredResponse
    ) -> None:
        """Store the state of a background response that has no answer."""
        info = json.dumps(asdict(response.info), ensure_ascii=False)
        row = (response_id, tenant, info, response.state, response.code, response.message)
        await self._try(lambda: self._tables.insert(UNANSWERED, [row]), None)

    async def find_unanswered(self, tenant: str, response_id: str) -> UnansweredResponse | None:
        """Return a tenant's unanswered response; None if it has none of that id.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        sql = "SELECT facts, state, code, message FROM unanswered WHERE id = ? AND tenant = ?"
        row = await self._run(lambda: self._row(sql, response_id, tenant))
        return None if row is None else UnansweredResponse(_info(row[0]), *row[1:])

    async def forget_unanswered(self, tenant: str, response_id: str) -> None:
        """Delete the row of an unanswered response: it is answered, or deleted."""
        sql = "DELETE FROM unanswered WHERE id = ? AND tenant = ?"
        await self._try(lambda: self._db.execute(sql, (response_id, tenant)), None)

    # -------------------------------------------------------------------------------- requests

    async def find_request(self, request_key: bytes) -> StoredRequest | None:
        """Return the stored request of this key; None if it is new."""
        sql = "SELECT body, session, turns, first, history, named FROM requests WHERE id = ?"
        row = await self._try(lambda: self._row(sql, request_key), None)
        if row is None:
            return None
        body, session_id, turns, first, history, named = row
        return StoredRequest(body, Route(session_id, turns, first, history, bool(named)))

    async def first_use(self, tenant: str, request_key: bytes, now_s: int) -> int:
        """Return the Unix time at which a key was first used; if it is new, store that as now."""

        def find() -> int:
            row = self._row("SELECT unix_s FROM key_uses WHERE id = ?", request_key)
            if row is not None:
                return int(row[0])
            self._tables.insert(KEY_USES, [(request_key, now_s, tenant)])
            return now_s

        return await self._try(find, now_s)

    async def keep_request(self, tenant: str, request_key: bytes, request: StoredRequest) -> None:
        """Store the route of a request; call it before the turn is submitted."""
        to = request.route
        row = (request_key, request.body, to.session_id, to.turns, to.first, to.history)
        await self._try(lambda: self._tables.insert(REQUESTS, [(*row, to.is_named, tenant)]), None)

    # -------------------------------------------------------------------------------- sessions

    async def use_session(self, tenant: str, session_id: str) -> None:
        """Record the use of an unnamed session."""
        await self._try(lambda: self._tables.insert(SESSIONS, [(tenant, session_id)]), None)

    async def touch_session(self, tenant: str, session_id: str) -> None:
        """Record the use of a session if it is an unnamed one, else do nothing."""
        await self._try(lambda: self._tables.touch(SESSIONS, [(tenant, session_id)]), None)

    async def take_oldest(self, max_sessions: int) -> list[tuple[str, str]]:
        """Take the least recently used unnamed sessions beyond a bound out of the store.

        Tenants with the most sessions lose theirs first. The caller owes the sessions' removal.

        Returns:
            The sessions, as (tenant, session id).
        """
        return await self._try(lambda: self._tables.take(SESSIONS, max_sessions), [])

    async def take_oldest_of(self, tenant: str) -> str:
        """Take a tenant's least recently used unnamed session out of the store; "" if none.

        The caller owes the session's removal.
        """
        sql = (
            "DELETE FROM sessions WHERE (tenant, session) IN (SELECT tenant, session"
            " FROM sessions WHERE tenant = ? ORDER BY used LIMIT 1) RETURNING session"
        )
        row = await self._try(lambda: self._row(sql, tenant), None)
        return str(row[0]) if row else ""

    # ----------------------------------------------------------------------- temporary sessions

    async def record_temporary(self, tenant: str, session_id: str) -> None:
        """Record that a session is temporary: deleted after its turn, or at the next start."""
        sql = "INSERT OR IGNORE INTO passing VALUES (?, ?)"
        await self._try(lambda: self._db.execute(sql, (tenant, session_id)), None)

    async def forget_temporary(self, tenant: str, session_id: str) -> None:
        """Record that a temporary session was deleted, or is a lasting one now."""
        sql = "DELETE FROM passing WHERE tenant = ? AND session = ?"
        await self._try(lambda: self._db.execute(sql, (tenant, session_id)), None)

    async def temporary_sessions(self) -> list[tuple[str, str]]:
        """Return the temporary sessions that are still to be removed: (tenant, session id)."""
        sql = "SELECT tenant, session FROM passing"
        return await self._try(lambda: self._db.execute(sql).fetchall(), [])

    # ------------------------------------------------------------------- on the thread, below

    def _row(self, sql: str, *values: object) -> Any | None:
        """Return the first row of a statement; None if there is none."""
        return next(iter(self._db.execute(sql, values).fetchall()), None)

    def _touch(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        """Record the use of rows; a full disk must not keep them from being found."""
        try:
            self._tables.touch(table, keys)
        except sqlite3.OperationalError as error:
            self._log(error)

    def _log(self, error: sqlite3.Error) -> None:
        left_out = self._lines.take("")
        if left_out is not None:
            log.warning("openai_memory_failed", error=str(error), more=left_out)

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await self._thread.run(call)
        except sqlite3.Error as error:
            self._log(error)
            raise StoreUnavailableError(
                f"{FILE_NAME} cannot be used ({error})",
                "try again later; the log of the service may say why",
                retry_after_s=RETRY_S,
            ) from error

    async def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return await self._run(call)
        except StoreUnavailableError:
            return otherwise


def info_of(found: Mapping[str, Any]) -> ResponseInfo:
    """Make a ResponseInfo of its encoded members, without those of newer releases."""
    return ResponseInfo(**{f.name: found[f.name] for f in fields(ResponseInfo) if f.name in found})


def _info(text: str) -> ResponseInfo:
    return info_of(json.loads(text))


def _point(session_id: str, turns: int, request_id: str, named: int) -> Point:
    return Point(session_id, turns, request_id, bool(named))


def _point_row(at: Point) -> tuple[str, int, str, int]:
    return at.session_id, at.turns, at.request_id, int(at.is_named)
