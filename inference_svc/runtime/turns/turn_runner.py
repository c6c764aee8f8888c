"""Answers one turn, from its session's transcript to its record there.

A turn is finished for its client when its record is on disk; its KV is saved after that. A turn
that is cancelled or fails leaves its session as it was.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from inference_svc.core.counters import Counters
from inference_svc.core.errors import (
    EmptyTurnError,
    InputTooLongError,
    InvalidTurnError,
    SessionEndedError,
    TurnMismatchError,
)
from inference_svc.core.sampling_params import SamplingParams
from inference_svc.core.scheduling.request import Request
from inference_svc.core.stopping import FinishReason, GrowingAnswer
from inference_svc.core.submission import ChatInput, Submission, TextInput
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.core.turn_events import Accepted, Finished
from inference_svc.core.turn_record import Usage
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.turns.answer_writer import AnswerWriter
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.worker_thread import WorkerThread
from shared.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class TurnLimits:
    """What a turn may be.

    Attributes:
        window_tokens: prompt and answer together: the model's window, or the engine's KV budget.
        vocab_size: token ids are below it.
        eos_ids: tokens that end an answer.
    """

    window_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]


class TurnRunner:
    """See the module docstring."""

    def __init__(
        self,
        engine: EngineLoop,
        transcripts: TranscriptStore,
        text: TurnText,
        tokenizer: Any | None,
        text_thread: WorkerThread,
        limits: TurnLimits,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._transcripts = transcripts
        self._text = text
        self._tokenizer = tokenizer
        self._text_thread = text_thread
        self._limits = limits
        self._counters = counters
        self._numbers = count(1)

    async def answer(self, turn: Turn) -> None:
        """Run a turn whose session is free, publishing its events.

        Raises:
            ReportedError: it was refused or failed.
        """
        submission = turn.submission
        transcript = await self._transcripts.find(submission.key)
        if transcript is None:
            transcript = Transcript(Header(*submission.key))
        _check_session(submission, transcript)
        input_ids = await self._encode(submission, transcript.token_ids)
        sampling = self._fit(submission, len(transcript.token_ids), len(input_ids))
        prompt_ids = [*transcript.token_ids, *input_ids]
        answer = GrowingAnswer(sampling, self._limits.eos_ids)
        history_tokens = transcript.computed_tokens
        writer = AnswerWriter(turn, answer, self._tokenizer, prompt_ids, history_tokens)
        turn.request = Request(
            next(self._numbers),
            submission.key,
            prompt_ids,
            sampling.max_tokens,
            submission.arrived_ns,
            history_tokens=history_tokens,
            priority=submission.priority,
            deadline_ns=turn.deadline_ns,
        )
        job = EngineJob(
            request=turn.request,
            is_final=submission.is_final,
            sampler=Sampler(sampling),
            sink=writer,
            done=asyncio.get_running_loop().create_future(),
        )
        turn.publish(
            Accepted(
                submission.key.session_id,
                len(transcript.turns),
                submission.request_id,
                self._engine.num_waiting,
                is_replayed=False,
            )
        )
        await self._compute(turn, job, writer, transcript)

    async def _compute(
        self, turn: Turn, job: EngineJob, writer: AnswerWriter, transcript: Transcript
    ) -> None:
        num_turns = len(transcript.turns)
        try:
            await self._engine.generate(job)
            turn.is_recorded = True
            record = writer.record(job, num_turns, transcript.token_ids)
            await self._transcripts.append(job.request.key, record, is_final=job.is_final)
            self._engine.keep(job, writer.computed_ids(job.request))
        except asyncio.CancelledError:
            writer.finish_reason = FinishReason.CANCELLED
            self._finish(turn, writer, writer.usage(job), num_turns)
            raise
        finally:
            self._engine.drop(job)
        self._count(record.usage)
        self._finish(turn, writer, record.usage, num_turns + 1)

    async def _encode(self, submission: Submission, history_ids: Sequence[int]) -> list[int]:
        """Token ids to append to the session."""
        given = submission.input
        if isinstance(given, TextInput):
            token_ids = await self._text_thread.run(
                self._text.encode_text, given.text, opens_session=not history_ids
            )
        elif isinstance(given, ChatInput):
            messages = [{"role": role, "content": content} for role, content in given.messages]
            token_ids = await self._text_thread.run(self._text.encode_chat, messages, history_ids)
        else:
            token_ids = list(given.token_ids)
        if not token_ids:
            raise EmptyTurnError("the turn brings no token", "send text, messages or token ids")
        if max(token_ids) >= self._limits.vocab_size:
            raise InvalidTurnError(
                f"token id {max(token_ids)} is outside the vocabulary",
                f"send ids below {self._limits.vocab_size}",
            )
        return token_ids

    def _fit(self, submission: Submission, history_tokens: int, new_tokens: int) -> SamplingParams:
        """Sampling whose longest answer fits the window."""
        sampling, window_tokens = submission.sampling, self._limits.window_tokens
        if sampling.stop and self._tokenizer is None:
            raise InvalidTurnError(
                "stop strings need a tokenizer, the model has none", "send none of them"
            )
        room = window_tokens - history_tokens - new_tokens
        if room < (sampling.max_tokens if submission.has_max_tokens else 1):
            wanted = f"max_tokens {sampling.max_tokens}" if submission.has_max_tokens else "1 more"
            raise InputTooLongError(
                f"history {history_tokens} + new {new_tokens} + {wanted} tokens "
                f"are more than the window of {window_tokens}",
                "send a shorter turn, lower max_tokens, or open a new session",
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def _finish(self, turn: Turn, writer: AnswerWriter, usage: Usage, num_turns: int) -> None:
        """Publish the last event and write the turn's canonical log line."""
        text = "".join(token.text for token in writer.tokens)
        reason = str(writer.finish_reason)
        turn.publish(Finished(reason, text, usage, num_turns))
        submission = turn.submission
        log.info(
            "turn",
            session=str(submission.key),
            turns=num_turns,
            request_id=submission.request_id,
            finish_reason=reason,
            history_tokens=usage.history_tokens,
            reused_tokens=usage.reused_tokens,
            recomputed_tokens=usage.recomputed_tokens,
            recompute_reason=usage.recompute_reason,
            new_tokens=usage.new_tokens,
            output_tokens=usage.output_tokens,
            tier_tokens=dict(usage.tier_tokens),
            queue_s=round(usage.queue_s, 6),
            load_s=round(usage.load_s, 6),
            prefill_s=round(usage.prefill_s, 6),
            ttft_s=round(usage.ttft_s, 6),
            total_s=round(usage.total_s, 6),
            stall_s=round(usage.stall_s, 6),
            priority=submission.priority,
            preemptions=usage.preemptions,
        )

    def _count(self, usage: Usage) -> None:
        self._counters.add("turns_finished")
        self._counters.add("history_tokens", usage.history_tokens)
        self._counters.add("reused_tokens", usage.reused_tokens)
        self._counters.add("recomputed_tokens", usage.recomputed_tokens)
        self._counters.add("new_tokens", usage.new_tokens)
        self._counters.add("output_tokens", usage.output_tokens)


def _check_session(submission: Submission, transcript: Transcript) -> None:
    """Refuse a turn that does not continue the session as it is."""
    num_turns = len(transcript.turns)
    if submission.expected_turn is not None and submission.expected_turn != num_turns:
        raise TurnMismatchError(
            f"the session has {num_turns} complete turns, expected_turn is "
            f"{submission.expected_turn}",
            f"read the session, then submit with expected_turn = {num_turns}",
        )
    if transcript.has_ended:
        raise SessionEndedError(
            f"session {submission.key.session_id} ended with a final turn",
            "open a new session, or fork this one",
        )
