"""Which turns run: one per session at a time, each once, however often it is submitted.

Owns the turns under way and what a repeat of a request id gets: the running turn's events, or the
recorded result. How a turn is answered is `turn_runner.py`'s business.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
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
    RequestIdReusedError,
    SessionBusyError,
    SessionExistsError,
    TurnCancelledError,
    UnknownTurnError,
)
from inference_svc.core.expected_session import ExpectedSession
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.stopping import AnswerToken
from inference_svc.core.submission import Submission
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_events import Accepted, Finished, Started, Tokens
from inference_svc.core.turn_record import TurnRecord
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_runner import TurnRunner
from shared.errors import ReportedError
from shared.log import get_logger
from shared.session_key import SessionKey

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
        counters: Counters,
    ) -> None:
        self._runner = runner
        self._transcripts = transcripts
        self._engine = engine
        self._session_turns = session_turns
        self._counters = counters
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

    def refuse_new(self) -> None:
        """Accept no more turns: the service is about to stop."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no turn is under way."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """Stop every turn that is not being recorded."""
        for turn in list(self._session_turns):
            turn.cancel()

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
            _check_same(submission, record.request_digest)
            self._counters.add("turns_replayed")
            return _replay(submission, record)
        return self._start(submission)

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
                _check_same(submission, turn.submission.digest)
                turn.allow_until(submission.deadline_ns)
                return turn
        return None

    def _start(self, submission: Submission) -> Turn:
        key = submission.key
        if self._is_draining:
            raise DrainingError("the service is about to stop", "submit again in a moment")
        if key in self._held:
            raise _busy(key)
        turn = Turn(submission)
        try:
            runs_now = self._session_turns.enter(
                key, turn, time.monotonic_ns(), wait=submission.waits
            )
        except QueueFullError:
            self._counters.add("turns_refused")
            raise
        if runs_now:
            turn.may_run.set()
        self._idle.clear()
        turn.task = self._tasks.create_task(self._run(turn))
        # Not a `finally` in the task: a task cancelled before its first step never gets there.
        turn.task.add_done_callback(partial(self._ended, turn))
        return turn

    async def _run(self, turn: Turn) -> ReportedError | None:
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

    def _ended(self, turn: Turn, task: "asyncio.Task[ReportedError | None]") -> None:
        """End the turn's events and let the next turn of its session go."""
        if task.cancelled():
            self._counters.add("turns_cancelled")
            turn.close(
                TurnCancelledError("the turn was cancelled before it began", "submit it again")
            )
        else:
            error = task.result()
            turn.close(error)
            if error is not None:
                self._counters.add("turns_failed")
                key, request_id = turn.submission.key, turn.submission.request_id
                log.info(
                    "turn",
                    session=str(key),
                    request_id=request_id,
                    finish_reason="failed",
                    error=error.reason,
                )
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


def _replay(submission: Submission, record: TurnRecord) -> Turn:
    """A turn that is over, with the events of its record."""
    logprobs = record.logprobs or (None,) * len(record.output_ids)
    top = record.top_logprobs or ((),) * len(record.output_ids)
    rows = zip(record.output_ids, record.pieces, logprobs, top, strict=True)
    usage = record.usage
    turn = Turn(submission)
    turn.publish(
        Accepted(submission.key.session_id, record.turn, record.request_id, 0, is_replayed=True),
        Started(usage.history_tokens, usage.reused_tokens, usage.queue_s),
        Tokens(tuple(AnswerToken(*row) for row in rows)),
        Finished(record.finish_reason, record.text, usage, record.turn + 1),
    )
    turn.close()
    return turn


def _check_same(submission: Submission, digest: str) -> None:
    if submission.digest != digest:
        raise RequestIdReusedError(
            f"request id {submission.request_id!r} was used with another input or sampling",
            "make a new request id for each new turn",
        )


def _busy(key: SessionKey) -> SessionBusyError:
    return SessionBusyError(
        f"session {key.session_id} is in use", "try again when its turn has finished"
    )
