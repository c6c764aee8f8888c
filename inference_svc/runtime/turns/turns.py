"""The turns under way: one per session runs at a time, each once, however often it is submitted.

Owns the turns under way, and answers repeats of a request id: with the running turn's events, or
with the recorded result. Repeats do not count against their tenant's limits. It does not know how a
turn is answered (`turn_runner.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from inference_svc.core.counters import Counters
from inference_svc.core.errors import (
    DeadlineExceededError,
    EngineFailedError,
    QueueFullError,
    TurnCancelledError,
    UnknownTurnError,
    draining,
)
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import Submission
from inference_svc.core.tenant_limits import Reservation, TenantLimits
from inference_svc.runtime.engine.engine_request import Engine
from inference_svc.runtime.turns.sessions import Sessions
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn, check_same, replay
from inference_svc.runtime.turns.turn_report import TurnReport, turn_span
from shared.process.log import get_logger
from shared.serving.tracing import fail_span
from shared.types.errors import ExhaustedError, ReportedError
from shared.types.session_key import SessionKey

log = get_logger(__name__)


class Turns:
    """Starts, joins, replays, cancels and hands back turns.

    Args:
        answer_turn: runs a turn whose session is free, and publishes its events.
        transcripts: the transcripts of all sessions.
        engine: the engine, for changes of sessions.
        session_turns: the turns under way, by session.
        limits: the tenants' limits.
        counters: the service's counters.
        report: logs turns that have ended.

    Attributes:
        sessions: changes of sessions outside of turns.
        idle: set while no turn is under way.
    """

    def __init__(
        self,
        answer_turn: Callable[[Turn], Awaitable[None]],
        transcripts: TranscriptStore,
        engine: Engine,
        session_turns: SessionTurns[Turn],
        limits: TenantLimits,
        counters: Counters,
        report: TurnReport,
    ) -> None:
        self._answer_turn = answer_turn
        self._transcripts = transcripts
        transcripts.local.on_opened = limits.opened
        self._session_turns = session_turns
        self._limits = limits
        self._counters = counters
        self._report = report
        self._is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._tasks = asyncio.TaskGroup()
        self.sessions = Sessions(
            transcripts=transcripts,
            engine=engine,
            session_turns=session_turns,
            limits=limits,
            counters=counters,
            tasks=self._tasks,
        )

    # ------------------------------------------------------------------------------- lifecycle

    async def run(self) -> None:
        """Run the turns' tasks until cancelled."""
        async with self._tasks:
            await asyncio.Event().wait()

    @property
    def is_draining(self) -> bool:
        """Whether the service is about to stop, and accepts no turns."""
        return self._is_draining

    def refuse_new(self) -> None:
        """Accept no more turns, and hand back those of which nothing is computed."""
        self._is_draining = True
        self._hand_back([turn for turn in self._session_turns if not turn.has_started])

    def hand_back_all(self) -> None:
        """Hand back every turn that is not being recorded; its client has to submit it again."""
        self._hand_back(list(self._session_turns))

    def _hand_back(self, turns: Sequence[Turn]) -> None:
        self._counters.add("turns_handed_back", sum(turn.hand_back(draining()) for turn in turns))

    # ----------------------------------------------------------------------------------- turns

    async def submit(self, submission: Submission) -> Turn:
        """Start a turn, join the one that runs under the same request id, or replay its record.

        Returns:
            The turn, to be followed. Errors that come later end its events.

        Raises:
            ReportedError: the turn cannot be queued.
        """
        joined = self._find_running(submission)
        if joined is not None:
            return joined
        # A turn with a fork id needs no refresh: turns that another server has added make it fork.
        if not submission.fork_id:
            must_know = submission.expected_turn != 0
            await self._transcripts.refresh(submission.key, must_know=must_know)
        transcript = await self._transcripts.find(submission.key)
        joined = self._find_running(submission)  # a repeat may have started it during the reads
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
        """Check that a tenant's turn may begin now, before any work is done for it.

        Raises:
            ReportedError: the service is draining, or a limit of the tenant is reached.
        """
        if self._is_draining:
            raise draining()
        refusal = self._limits.refusal(tenant, 1, "", 0, time.monotonic_ns())
        if refusal is not None:
            self._counters.add(f"refused_{refusal.reason}")
            raise refusal

    def cancel(self, key: SessionKey, request_id: str) -> int:
        """Ask a session's turns to stop; return how many will.

        Args:
            key: the session's key.
            request_id: the request id of the turn to stop; "": all of the session's turns.

        Raises:
            UnknownTurnError: the session has no such turn.
        """
        turns = [
            turn
            for turn in self._session_turns.of(key)
            if request_id in ("", turn.submission.request_id)
        ]
        if not turns:
            raise UnknownTurnError(
                f"session {key.session_id} has no running or waiting turn to cancel",
                "the turn may have finished: read the session",
            )
        return sum(turn.cancel() for turn in turns)

    def _find_running(self, submission: Submission) -> Turn | None:
        """Return the turn under way with the submission's request id; None: there is none."""
        for turn in self._session_turns.of(submission.key):
            if turn.submission.request_id == submission.request_id and not turn.is_cancelled:
                check_same(submission, turn.submission.digest)
                turn.extend_deadline(submission.deadline_ns)
                return turn
        return None

    def _start(self, submission: Submission, *, opens_session: bool) -> Turn:
        """Start the task of a new turn, within its tenant's limits."""
        key = submission.key
        if self._is_draining:
            raise draining()
        self.sessions.check_unchanged(key)
        turn, now_ns = Turn(submission), time.monotonic_ns()
        opens = key.session_id if opens_session else ""
        try:
            self._check_limits(submission, opens, now_ns)
            runs_now = self._session_turns.enter(key, turn, now_ns, wait=submission.waits)
        except ExhaustedError as error:
            queue_full = isinstance(error, QueueFullError)
            self._counters.add("turns_refused" if queue_full else f"refused_{error.reason}")
            raise
        reservation = self._limits.enter(key.tenant, submission.most_tokens, opens, now_ns)
        if runs_now:
            turn.may_run.set()
        self.idle.clear()
        turn.task = self._tasks.create_task(self._run(turn))
        # Not a `finally` in the task: a task cancelled before its first step never gets there.
        turn.task.add_done_callback(partial(self._on_end, turn, reservation))
        return turn

    def _check_limits(self, submission: Submission, opens: str, now_ns: int) -> None:
        """Raise the refusal of a limit that is reached; `opens`: the new session's id, or ""."""
        tenant = submission.key.tenant
        num_sessions = self._transcripts.local.num_sessions(tenant)
        refusal = self._limits.refusal(tenant, submission.most_tokens, opens, num_sessions, now_ns)
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
                    "submit it again with more time, or when the turn before has finished",
                )
            await self._answer_turn(turn)
        except ReportedError as error:
            return error
        except Exception as error:
            log.exception("turn_failed", session=str(turn.submission.key))
            return EngineFailedError(
                f"the turn failed ({type(error).__name__})",
                "the log of the service says more; the session is unchanged",
            )
        return None

    def _on_end(
        self, turn: Turn, reservation: Reservation, task: "asyncio.Task[ReportedError | None]"
    ) -> None:
        """End the turn's events and release the next turn of its session."""
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
        self._limits.leave(reservation, turn.computed_tokens, time.monotonic_ns())
        following = self._session_turns.leave(turn.submission.key, turn)
        if following is not None:
            following.may_run.set()
        if not len(self._session_turns):
            self.idle.set()
