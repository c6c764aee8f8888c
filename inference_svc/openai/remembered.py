"""What is remembered between requests, bounded and on disk: histories, responses, repeats.

Nothing here is needed for an answer. What cannot be read is not known, what cannot be written is
not remembered; both are logged. The oldest rows go first, those that were used last stay.

Calls run on one thread of its own, in the order in which they were made.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from inference_svc.openai.bounded_tables import (
    HISTORIES,
    REQUESTS,
    RESPONSES,
    SESSIONS,
    BoundedTables,
    Table,
)
from inference_svc.openai.known import KnownRequest, KnownResponse, Point
from inference_svc.openai.remembered_file import FILE_NAME, open_remembered
from inference_svc.openai.response_objects import ResponseFacts
from inference_svc.runtime.turns.disk_trouble import RETRY_S
from inference_svc.runtime.worker_thread import WorkerThread
from shared.process.log import LineAllowance, get_logger
from shared.types.errors import UnavailableError

T = TypeVar("T")

log = get_logger(__name__)


class MemoryUnavailableError(UnavailableError):
    """The file of the state directory cannot be read right now."""

    reason = "openai_memory_unavailable"


class Remembered:
    """See the module docstring.

    Args:
        directory: of the state.
        max_rows: of each kind.
    """

    def __init__(self, directory: Path, max_rows: int) -> None:
        self._db, self.key = open_remembered(directory)
        self._thread = WorkerThread("openai")
        self._lines = LineAllowance(per_s=1)
        self._tables = BoundedTables(self._db, max_rows)

    def close(self) -> None:
        """Close the file after the call that runs."""
        self._thread.close()
        self._db.close()

    # ------------------------------------------------------------------------------- histories

    async def find_histories(self, digests: Sequence[bytes]) -> dict[bytes, Point]:
        """Those of the histories that are known."""

        def find() -> dict[bytes, Point]:
            found = {}
            for digest in digests:
                row = self._db.execute(
                    "SELECT session, turns, request, named FROM histories WHERE digest = ?",
                    (digest,),
                ).fetchone()
                if row is not None:
                    found[digest] = _point(*row)
            self._touch(HISTORIES, [(digest,) for digest in found])
            return found

        return await self._try(find, {})

    async def keep_histories(self, tenant: str, points: Iterable[tuple[bytes, Point]]) -> None:
        """Remember where histories end; a later one with the same digest takes the place."""
        rows = [(digest, *_point_row(at), tenant) for digest, at in points]

        def keep() -> None:
            self._tables.insert(HISTORIES, rows)

        await self._try(keep, None)

    async def forget_histories(self, digests: Sequence[bytes]) -> None:
        """Forget histories whose sessions are gone."""

        def forget() -> None:
            self._db.executemany(
                "DELETE FROM histories WHERE digest = ?", [(each,) for each in digests]
            )

        await self._try(forget, None)

    # ------------------------------------------------------------------------------- responses

    async def keep_response(self, tenant: str, response_id: str, response: KnownResponse) -> None:
        """Remember a response."""
        facts = json.dumps(asdict(response.facts), ensure_ascii=False)
        row = (response_id, tenant, *_point_row(response.at), response.history, facts)
        await self._try(lambda: self._tables.insert(RESPONSES, [row]), None)

    async def find_response(self, tenant: str, response_id: str) -> KnownResponse | None:
        """A tenant's response; None if it has none of that id.

        Raises:
            MemoryUnavailableError: nobody can say.
        """

        def find() -> KnownResponse | None:
            row = self._db.execute(
                "SELECT session, turns, request, named, history, facts FROM responses"
                " WHERE id = ? AND tenant = ?",
                (response_id, tenant),
            ).fetchone()
            if row is None:
                return None
            self._touch(RESPONSES, [(response_id,)])
            *at, history, facts = row
            return KnownResponse(_point(*at), history, ResponseFacts(**json.loads(facts)))

        return await self._run(find)

    async def count_responses(self, tenant: str, session_id: str) -> int:
        """How many of a session's responses are known.

        Raises:
            MemoryUnavailableError: nobody can say.
        """

        def count() -> int:
            (found,) = self._db.execute(
                "SELECT count(*) FROM responses WHERE tenant = ? AND session = ?",
                (tenant, session_id),
            ).fetchone()
            return int(found)

        return await self._run(count)

    async def forget_response(self, tenant: str, response_id: str) -> None:
        """Forget a response.

        Raises:
            MemoryUnavailableError: it is still known.
        """

        def forget() -> None:
            self._db.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
            )

        await self._run(forget)

    # -------------------------------------------------------------------------------- requests

    async def find_request(self, request_key: bytes) -> KnownRequest | None:
        """Where the request of this key went; None if it is new."""

        def find() -> KnownRequest | None:
            row = self._db.execute(
                "SELECT body, session, turns, first, history, named FROM requests WHERE id = ?",
                (request_key,),
            ).fetchone()
            if row is None:
                return None
            body, session_id, turns, first, history, named = row
            return KnownRequest(body, session_id, turns, first, history, bool(named))

        return await self._try(find, None)

    async def keep_request(self, tenant: str, request_key: bytes, request: KnownRequest) -> None:
        """Remember where a request goes, before it does."""
        row = (request_key, request.body, request.session_id, request.turns, request.first)
        rest = (request.history, int(request.is_named), tenant)
        await self._try(lambda: self._tables.insert(REQUESTS, [(*row, *rest)]), None)

    # -------------------------------------------------------------------------------- sessions

    async def use_session(self, tenant: str, session_id: str) -> None:
        """Note that a session was used that nobody named."""
        await self._try(lambda: self._tables.insert(SESSIONS, [(tenant, session_id)]), None)

    async def touch_session(self, tenant: str, session_id: str) -> None:
        """Note that a session was used; nothing, if it is one that a client named."""
        await self._try(lambda: self._tables.touch(SESSIONS, [(tenant, session_id)]), None)

    async def take_oldest(self, max_sessions: int) -> list[tuple[str, str]]:
        """Forget the oldest sessions beyond a bound, of the tenants that have the most.

        The caller owes their removal.
        """
        return await self._try(lambda: self._tables.take(SESSIONS, max_sessions), [])

    async def take_oldest_of(self, tenant: str) -> str:
        """Forget a tenant's oldest session, and return it, as above; "" if it has none."""

        def take() -> str:
            row = self._db.execute(
                "DELETE FROM sessions WHERE (tenant, session) IN (SELECT tenant, session"
                " FROM sessions WHERE tenant = ? ORDER BY used LIMIT 1) RETURNING session",
                (tenant,),
            ).fetchall()
            return str(row[0][0]) if row else ""

        return await self._try(take, "")

    # --------------------------------------------------------------------------------- passing

    async def begin_passing(self, tenant: str, session_id: str) -> None:
        """Remember that a session is to go when its turn is over, whatever happens before."""

        def begin() -> None:
            self._db.execute("INSERT OR IGNORE INTO passing VALUES (?, ?)", (tenant, session_id))

        await self._try(begin, None)

    async def end_passing(self, tenant: str, session_id: str) -> None:
        """It is gone, or stays after all."""

        def end() -> None:
            self._db.execute(
                "DELETE FROM passing WHERE tenant = ? AND session = ?", (tenant, session_id)
            )

        await self._try(end, None)

    async def passing(self) -> list[tuple[str, str]]:
        """Sessions that the service did not get around to remove: (tenant, session)."""

        def read() -> list[tuple[str, str]]:
            return self._db.execute("SELECT tenant, session FROM passing").fetchall()

        return await self._try(read, [])

    # ------------------------------------------------------------------- on the thread, below

    def _touch(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        """Note that rows were used; what a full disk does not take is found all the same."""
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
            raise MemoryUnavailableError(
                f"{FILE_NAME} cannot be used ({error})", "come back later", retry_after_s=RETRY_S
            ) from error

    async def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return await self._run(call)
        except MemoryUnavailableError:
            return otherwise


def _point(session_id: str, turns: int, request_id: str, named: int) -> Point:
    return Point(session_id, turns, request_id, bool(named))


def _point_row(at: Point) -> tuple[str, int, str, int]:
    return at.session_id, at.turns, at.request_id, int(at.is_named)
