"""Which turns run: one per session at a time, each once, however often it is submitted.

Owns the turns under way and what a repeat of a request id gets: the running turn's events, or the
recorded result; neither counts against its tenant's limits. How a turn is answered is
`turn_runner.py`'s business.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from inference_svc.core.context import clip
from inference_svc.core.counters import Counters
from inference_svc.core.discards import CLIENT, Discard, Range, merge_ranges, num_in
from inference_svc.core.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineFailedError,
    InvalidDiscardError,
    QueueFullError,
    SessionBusyError,
    SessionExistsError,
    TurnCancelledError,
    UnknownTurnError,
)
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import Submission
from inference_svc.core.tenant_limits import Place, TenantLimits
from inference_svc.core.transcript_format import ExpectedSession, Transcript
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn, check_same, replay
from inference_svc.runtime.turns.turn_report import TurnReport, turn_span
from inference_svc.runtime.turns.turn_runner import TurnRunner
from shared.process.log import get_logger
from shared.serving.tracing import fail_span
from shared.types.errors import ExhaustedError, ReportedError
from shared.types.session_key import SessionKey

T = TypeVar("T")

log = get_logger(__name__)


class Turns:
    """See the module docstring."""

    def __init__(
        self,
        runner: TurnRunner,
        transcripts: TranscriptStore,
        engine: EngineLoop,
        session_turns: SessionTurns[Turn],
        limits: TenantLimits,
        counters: Counters,
        report: TurnReport,
    ) -> None:
        self._runner = runner
        self._transcripts = transcripts
        self._engine = engine
        self._session_turns = session_turns
        self._limits = limits
        self._counters = counters
        self._report = report
        self._held: set[SessionKey] = set()  # sessions that are being changed, but by a turn
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = asyncio.TaskGroup()

    # ------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Hold the turns' tasks until cancelled."""
        async with self._tasks:
            await asyncio.Event().wait()

    @property
    def is_draining(self) -> bool:
        """Whether it is about to stop, and takes no turns."""
        return self._is_draining

    def refuse_new(self) -> None:
        """Accept no more turns, and give those back that have not started."""
        self._is_draining = True
        self._hand_back([turn for turn in self._session_turns if not turn.has_started])

    async def wait_idle(self) -> None:
        """Wait until no turn is under way."""
        await self._idle.wait()

    def hand_back_all(self) -> None:
        """Stop every turn that is not being recorded; its client is to submit it again."""
        self._hand_back(list(self._session_turns))

    def _hand_back(self, turns: Sequence[Turn]) -> None:
        self._counters.add("turns_handed_back", sum(turn.hand_back(_draining()) for turn in turns))

    # ----------------------------------------------------------------------------------- turns

    async def submit(self, submission: Submission) -> Turn:
        """Start a turn, join the one that runs under the same request id, or replay its record.

        Raises:
            ReportedError: it cannot be queued; what is wrong with it otherwise comes as the end
                of its events.
        """
        joined = self._find_running(submission)
        if joined is not None:
            return joined
        transcript = await self._transcripts.find(submission.key)
        joined = self._find_running(submission)  # it may have come while we read
        if joined is not None:
            return joined
        record = transcript.find(submission.request_id) if transcript else None
        if record is not None:
            check_same(submission, record.request_digest)
            self._counters.add("turns_replayed")
            self._report.replayed(submission, record)
            return replay(submission, record)
        return self._start(submission, opens_session=transcript is None)

    def check_limits(self, tenant: str) -> None:
        """See that a tenant's turn may begin now, before anything is made for it.

        Raises:
            ReportedError: it may not.
        """
        if self._is_draining:
            raise _draining()
        refusal = self._limits.refuse(tenant, 1, "", 0, time.monotonic_ns())
        if refusal is not None:
            self._counters.add(f"refused_{refusal.reason}")
            raise refusal

    def cancel(self, key: SessionKey, request_id: str) -> int:
        """Stop the session's turns, or the one of a request id; return how many.

        Raises:
            UnknownTurnError: there is none.
        """
        turns = [
            turn
            for turn in self._session_turns.of(key)
            if request_id in ("", turn.submission.request_id)
        ]
        if not turns:
            raise UnknownTurnError(
                f"session {key.session_id} has no such turn under way",
                "it may have finished: read the session",
            )
        return sum(turn.cancel() for turn in turns)

    def _find_running(self, submission: Submission) -> Turn | None:
        for turn in self._session_turns.of(submission.key):
            if turn.submission.request_id == submission.request_id and not turn.is_cancelled:
                check_same(submission, turn.submission.digest)
                turn.allow_until(submission.deadline_ns)
                return turn
        return None

    def _start(self, submission: Submission, *, opens_session: bool) -> Turn:
        key = submission.key
        if self._is_draining:
            raise _draining()
        if key in self._held:
            raise _busy(key)
        turn, now_ns = Turn(submission), time.monotonic_ns()
        opens = key.session_id if opens_session else ""
        try:
            self._check_limits(submission, opens, now_ns)
            runs_now = self._session_turns.enter(key, turn, now_ns, wait=submission.waits)
        except ExhaustedError as error:
            queue_full = isinstance(error, QueueFullError)
            self._counters.add("turns_refused" if queue_full else f"refused_{error.reason}")
            raise
        place = self._limits.enter(key.tenant, submission.most_tokens, opens, now_ns)
        if runs_now:
            turn.may_run.set()
        self._idle.clear()
        turn.task = self._tasks.create_task(self._run(turn))
        # Not a `finally` in the task: a task cancelled before its first step never gets there.
        turn.task.add_done_callback(partial(self._ended, turn, place))
        return turn

    def _check_limits(self, submission: Submission, opens: str, now_ns: int) -> None:
        tenant = submission.key.tenant
        num_sessions = self._transcripts.num_sessions(tenant)
        refusal = self._limits.refuse(tenant, submission.most_tokens, opens, num_sessions, now_ns)
        if refusal is not None:
            raise refusal

    async def _run(self, turn: Turn) -> ReportedError | None:
        """Answer the turn within its span; return why it failed."""
        with turn_span(turn.submission) as span:
            error = await self._answer(turn)
            if error is not None:
                fail_span(span, error.reason)
        return error

    async def _answer(self, turn: Turn) -> ReportedError | None:
        """Wait for the session, then answer the turn; return why it failed."""
        try:
            if not await turn.wait_for_session():
                self._counters.add("expired")
                return DeadlineExceededError(
                    "the turn's deadline passed while it waited for its session",
                    "submit it again with more time, or when the session's turn has finished",
                )
            await self._runner.answer(turn)
        except ReportedError as error:
            return error
        except Exception as error:
            log.exception("turn_failed", session=str(turn.submission.key))
            return EngineFailedError(
                f"the turn failed ({type(error).__name__})",
                "see the log of the service; the session is as it was",
            )
        return None

    def _ended(self, turn: Turn, place: Place, task: "asyncio.Task[ReportedError | None]") -> None:
        """End the turn's events and let the next turn of its session go."""
        error: ReportedError | None
        if task.cancelled():
            error = turn.handed_back or TurnCancelledError(
                "the turn was cancelled before it began", "submit it again"
            )
            self._counters.add("turns_cancelled", turn.handed_back is None)
        else:
            error = task.result()
            self._counters.add("turns_failed", error is not None)
        turn.close(error)
        if error is not None and not turn.is_answered:
            self._report.failed(turn.submission, error)
        self._limits.leave(place, turn.computed_tokens, time.monotonic_ns())
        following = self._session_turns.leave(turn.submission.key, turn)
        if following is not None:
            following.may_run.set()
        if not len(self._session_turns):
            self._idle.set()

    # -------------------------------------------------------------------------------- sessions

    async def get_session(self, key: SessionKey) -> tuple[Transcript, bool]:
        """A session's complete turns, and whether another is under way."""
        return await self._transcripts.get(key), self._is_busy(key)

    async def fork(self, key: SessionKey, at_turn: int | None, new_session_id: str) -> Transcript:
        """Start a session from another's first turns (all of them if at_turn is None)."""
        transcript = await self._transcripts.get(key)
        num_turns = len(transcript.turns)
        if at_turn is not None and at_turn > num_turns:
            raise UnknownTurnError(
                f"session {key.session_id} has {num_turns} complete turns, not {at_turn}",
                f"fork at 0 to {num_turns}",
            )
        new_key = key._replace(session_id=new_session_id)
        exists = SessionExistsError(f"session {new_session_id} exists", "choose another id")
        if self._is_busy(new_key):
            raise exists
        last_turn = num_turns if at_turn is None else at_turn
        fork = partial(self._transcripts.fork, key, new_session_id, last_turn)
        with self._opening(new_key):
            forked = await self._change(new_key, fork)
        if forked is None:
            raise exists
        return forked

    async def delete(self, key: SessionKey) -> None:
        """Remove a session that has no turn under way, and its KV."""
        if self._is_busy(key):
            raise _busy(key)

        async def delete() -> None:
            transcript = await self._transcripts.find(key)
            await self._transcripts.delete(key)
            if transcript is not None:
                await self._engine.forget(key, transcript.context_ids)

        await self._change(key, delete)

    async def discard(
        self, key: SessionKey, ranges: Sequence[Range], expected: ExpectedSession
    ) -> tuple[int, int]:
        """Drop tokens of a session's context; return how many are left, and how many went.

        It is recorded before it takes effect: a crash in between leaves KV that is recomputed. Once
        begun it is done, whether or not the caller waits for it.

        Args:
            key: of the session.
            ranges: positions in the context as it is, in any order.
            expected: what the client believes.

        Raises:
            SessionBusyError: a turn is under way.
            TurnMismatchError: the session is not as the client believes.
            InvalidDiscardError: there are no ranges, or they are not of the context.
        """
        if self._is_busy(key):
            raise _busy(key)

        async def discard() -> tuple[int, int]:
            transcript = await self._transcripts.get(key)
            expected.check(transcript)
            context = transcript.context
            merged = merge_ranges(ranges, len(context.token_ids))
            if not merged:
                raise InvalidDiscardError("no tokens are named", "send ranges or positions")
            after = await self._transcripts.discard(key, Discard(merged, 0, CLIENT))
            self._counters.add("discards")
            computed = clip(merged, context.computed_tokens)
            if computed:
                await self._engine.discard(key, context.computed_ids, computed, context.lineage)
            return len(after.context_ids), num_in(merged)

        return await self._change(key, discard)

    async def end(self, key: SessionKey) -> None:
        """Take no further turn of a session that has none under way; its KV is not needed."""
        if self._is_busy(key):
            raise _busy(key)

        async def end() -> None:
            await self._transcripts.end(key)
            await self._engine.end_session(key)

        await self._change(key, end)

    @contextmanager
    def _opening(self, key: SessionKey) -> Iterator[None]:
        """Count a session that is opened, but by a turn."""
        tenant, num_sessions = key.tenant, self._transcripts.num_sessions(key.tenant)
        now_ns = time.monotonic_ns()
        refusal = self._limits.refuse_session(tenant, key.session_id, num_sessions, now_ns)
        if refusal is not None:
            self._counters.add(f"refused_{refusal.reason}")
            raise refusal
        self._limits.open_session(tenant, key.session_id, now_ns)
        try:
            yield
        finally:
            self._limits.session_opened(tenant, key.session_id)

    async def _change(self, key: SessionKey, change: Callable[[], Awaitable[T]]) -> T:
        """Change a session that has no turn under way, to the end: also if the caller leaves.

        Nobody else uses the session meanwhile.
        """
        task = self._tasks.create_task(_outcome(key, change))
        self._held.add(key)
        # Not a `finally` in the task: a task cancelled before its first step never gets there.
        task.add_done_callback(lambda _: self._held.discard(key))
        result, error = await asyncio.shield(task)
        if error is not None:
            raise error
        (changed,) = result
        return changed

    def _is_busy(self, key: SessionKey) -> bool:
        return bool(self._session_turns.of(key)) or key in self._held


async def _outcome(
    key: SessionKey, change: Callable[[], Awaitable[T]]
) -> tuple[tuple[T, ...], Exception | None]:
    """What a change returns, or why it failed: a task of a group that raises ends the group."""
    try:
        return (await change(),), None
    except ReportedError as error:
        return (), error
    except Exception as error:
        log.exception("session_change_failed", session=str(key))
        return (), error


def _draining() -> DrainingError:
    return DrainingError("the service is about to stop", "submit again in a moment")


def _busy(key: SessionKey) -> SessionBusyError:
    return SessionBusyError(
        f"session {key.session_id} is in use", "try again when its turn has finished"
    )
