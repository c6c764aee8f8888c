"""Sessions outside of their turns: reading, forking, discarding, ending and deleting them.

Invariant: a session that is being changed has no turn under way, and gets none meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from inference_svc.core.counters import Counters
from inference_svc.core.errors import (
    InvalidDiscardError,
    SessionBusyError,
    SessionExistsError,
    UnknownTurnError,
)
from inference_svc.core.ranges import Range, clip, merge_ranges, num_in
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.tenant_limits import TenantLimits
from inference_svc.core.transcript_format import ExpectedSession, Transcript
from inference_svc.core.turn_record import CLIENT, Discard
from inference_svc.runtime.engine.engine_request import ContextCut, Engine
from inference_svc.runtime.turns.shared_conversations import SharedConversations
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_responses import SharedResponses
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.transcript_sharing import Companion
from inference_svc.runtime.turns.turn import Turn
from shared.process.log import get_logger
from shared.types.awaited_tools import awaited_tools as checked_tools
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

T = TypeVar("T")

log = get_logger(__name__)


class Sessions:
    """Reads and changes sessions that have no turn under way.

    Args:
        transcripts: the transcripts of all sessions.
        engine: drops and reports the sessions' KV.
        session_turns: the turns under way, by session.
        limits: the tenants' limits.
        counters: the service's counters.
        tasks: the task group in which changes run to their end, also if the caller is cancelled.
    """

    def __init__(
        self,
        transcripts: TranscriptStore,
        engine: Engine,
        session_turns: SessionTurns[Turn],
        limits: TenantLimits,
        counters: Counters,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._transcripts = transcripts
        self._engine = engine
        self._session_turns = session_turns
        self._limits = limits
        self._counters = counters
        self._tasks = tasks
        self._changing: set[SessionKey] = set()

    @property
    def histories(self) -> SharedHistories | None:
        """Histories of unnamed sessions in the shared object store; None: they are not shared."""
        sharing = self._transcripts.sharing
        return sharing.histories if sharing is not None else None

    @property
    def responses(self) -> SharedResponses | None:
        """Stored responses in the shared object store; None: there is no shared store."""
        sharing = self._transcripts.sharing
        return sharing.responses if sharing is not None else None

    @property
    def conversations(self) -> SharedConversations | None:
        """The HTTP API's conversations in the shared store; None: there is no shared store."""
        sharing = self._transcripts.sharing
        return sharing.conversations if sharing is not None else None

    @contextmanager
    def with_companion(self, companion: Companion) -> Iterator[None]:
        """Inside, call a companion whenever transcripts are synchronised with the shared store."""
        sharing = self._transcripts.sharing
        companions = [] if sharing is None else sharing.companions
        companions.append(companion)
        try:
            yield
        finally:
            companions.remove(companion)

    def is_shared(self, key: SessionKey) -> bool:
        """Whether a session is kept in the shared object store, too."""
        sharing = self._transcripts.sharing
        return sharing is not None and sharing.is_shared(key)

    def check_unchanged(self, key: SessionKey) -> None:
        """Check that a session is not being changed, so that a turn of it may begin.

        Raises:
            SessionBusyError: the session is being changed.
        """
        if key in self._changing:
            raise _busy(key)

    async def get(
        self, key: SessionKey, *, is_fresh: bool = False, must_know: bool = False
    ) -> tuple[Transcript, bool]:
        """Return a session's complete turns, and whether the next one would have to wait.

        Args:
            key: the session's key.
            is_fresh: whether to fetch first what other services have added to it.
            must_know: whether to fail if the shared store is silent: `TranscriptStore.refresh`.

        Raises:
            UnknownSessionError: there is no such session.
            TranscriptUnavailableError: it cannot be known whether there is.
        """
        if is_fresh:
            await self._transcripts.refresh(key, must_know=must_know)
        is_busy = key in self._changing or self._session_turns.is_busy(key)
        return await self._transcripts.get(key), is_busy

    async def fork(
        self, key: SessionKey, at_turn: int | None, new_session_id: str, *, is_local: bool = False
    ) -> Transcript:
        """Start a session from another's first turns.

        Args:
            key: the other session's key.
            at_turn: how many of its turns; None: all.
            new_session_id: the new session's id.
            is_local: whether the new session is made from the local transcript, under an id that
                is known to be unused, and stays local until its next turn.

        Raises:
            UnknownSessionError: there is no such session.
            UnknownTurnError: it has fewer turns.
            SessionExistsError: the new session exists already.
            ReportedError: the tenant has as many sessions as it may have.
        """
        if not is_local:
            await self._transcripts.refresh(key)
        transcript = await self._transcripts.get(key)
        num_turns = len(transcript.turns)
        if at_turn is not None and at_turn > num_turns:
            raise UnknownTurnError(
                f"session {key.session_id} has {num_turns} complete turns, not {at_turn}",
                f"fork at a turn from 0 to {num_turns}",
            )
        new_key = key._replace(session_id=new_session_id)
        exists = SessionExistsError(f"session {new_session_id} already exists", "choose another id")
        if self._is_busy(new_key):
            raise exists
        last_turn = num_turns if at_turn is None else at_turn

        async def fork() -> Transcript | None:
            # Counted in the change, which goes on when the caller leaves.
            with self._count_open(new_key):
                return await self._transcripts.fork(
                    key, new_session_id, last_turn, is_local=is_local
                )

        if not is_local:
            await self._transcripts.refresh(new_key)
        forked = await self._change(new_key, fork)
        if forked is None:
            raise exists
        return forked

    async def delete(self, key: SessionKey) -> None:
        """Remove a session that has no turn under way, and its KV."""

        async def delete() -> None:
            await self._transcripts.refresh(key)
            transcript = await self._transcripts.find(key)
            await self._transcripts.delete(key)
            if transcript is not None:
                await self._engine.forget(key, transcript.context.token_ids)

        await self._change(key, delete)

    async def release(self, key: SessionKey) -> None:
        """Remove a session that has no turn under way, and its KV.

        If another service that shares the object store has added turns to it, it is removed only
        here; its KV stays, and is evicted like any other.
        """

        async def release() -> None:
            transcript = await self._transcripts.get(key)
            if await self._transcripts.release(key):
                await self._engine.forget(key, transcript.context.token_ids)

        await self._change(key, release)

    async def discard(
        self, key: SessionKey, ranges: Sequence[Range], expected: ExpectedSession
    ) -> tuple[int, int]:
        """Drop tokens of a session's context; return how many are left, and how many were dropped.

        The discard is recorded before it takes effect: after a crash in between, the KV is
        recomputed. Once begun it runs to its end, even if the caller is cancelled.

        Args:
            key: the session's key.
            ranges: positions in the context as it is, in any order.
            expected: the session's state as the client believes it to be.

        Raises:
            SessionBusyError: a turn is under way.
            TurnMismatchError: the session is not as the client believes.
            InvalidDiscardError: there are no ranges, or they are outside the context.
        """

        async def discard() -> tuple[int, int]:
            await self._transcripts.refresh(key)
            transcript = await self._transcripts.get(key)
            expected.check(transcript)
            context = transcript.context
            merged = merge_ranges(ranges, len(context.token_ids))
            if not merged:
                raise InvalidDiscardError("the discard names no tokens", "send ranges or positions")
            after = await self._transcripts.discard(key, Discard(merged, reason=CLIENT))
            self._counters.add("discards")
            computed = clip(merged, context.computed_tokens)
            if computed:
                cut = ContextCut(context.computed_ids, computed, context.lineage)
                await self._engine.discard(key, cut)
            return len(after.context.token_ids), num_in(merged)

        return await self._change(key, discard)

    async def end(self, key: SessionKey) -> None:
        """End a session that has no turn under way: it takes no further one, its KV may go."""

        async def end() -> None:
            await self._transcripts.refresh(key)
            await self._transcripts.end(key)
            await self._engine.end_session(key)

        await self._change(key, end)

    async def expect(
        self, key: SessionKey, awaited_tools: Iterable[str] = (), *, superseded: bool = False
    ) -> None:
        """Report to the store how soon a session is likely to return; return when that is done.

        The session is not locked: a turn that comes meanwhile makes the report unnecessary.

        Args:
            key: the session's key.
            awaited_tools: names of tools that its last answer calls.
            superseded: whether another session continues the conversation in its place.

        Raises:
            InvalidToolNamesError: there are too many names, or invalid ones.
            UnknownSessionError: there is no such session.
            SessionBusyError: a turn or a change is under way, so that the session has returned.
        """
        names = checked_tools(awaited_tools)
        await self._transcripts.get(key)
        if self._is_busy(key):
            raise _busy(key)
        await self._engine.expect(key, names, superseded=superseded)

    @contextmanager
    def _count_open(self, key: SessionKey) -> Iterator[None]:
        """Count a session that a fork opens against its tenant's limits.

        Raises:
            ReportedError: the tenant has as many sessions as it may have.
        """
        tenant, num_sessions = key.tenant, self._transcripts.local.num_sessions(key.tenant)
        now_ns = time.monotonic_ns()
        refusal = self._limits.session_refusal(tenant, key.session_id, num_sessions, now_ns)
        if refusal is not None:
            self._counters.add(f"refused_{refusal.reason}")
            raise refusal
        self._limits.begin_opening(tenant, key.session_id, now_ns)
        try:
            yield
        finally:
            self._limits.end_opening(tenant, key.session_id)

    async def _change(self, key: SessionKey, change: Callable[[], Awaitable[T]]) -> T:
        """Change a session that has no turn under way; it gets none until the change ends.

        The change runs to its end, even if the caller is cancelled.

        Raises:
            SessionBusyError: a turn or another change is under way.
            Exception: as `change` raises.
        """
        if self._is_busy(key):
            raise _busy(key)
        task = self._tasks.create_task(_outcome(key, change))
        self._changing.add(key)
        # Not a `finally` in the task: a task cancelled before its first step never gets there.
        task.add_done_callback(lambda _: self._changing.discard(key))
        result, error = await asyncio.shield(task)
        if error is not None:
            raise error
        (changed,) = result
        return changed

    def _is_busy(self, key: SessionKey) -> bool:
        return bool(self._session_turns.of(key)) or key in self._changing


async def _outcome(
    key: SessionKey, change: Callable[[], Awaitable[T]]
) -> tuple[tuple[T, ...], Exception | None]:
    """Return a change's result, or its error: a task that raised would end its task group."""
    try:
        return (await change(),), None
    except Exception as error:
        if not isinstance(error, ReportedError):
            log.exception("session_change_failed", session=str(key))
        return (), error


def _busy(key: SessionKey) -> SessionBusyError:
    return SessionBusyError(
        f"session {key.session_id} is in use", "try again when its turn has finished"
    )
