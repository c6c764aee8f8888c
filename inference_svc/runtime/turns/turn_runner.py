"""Answers one turn, from its session's transcript to its record there.

A turn is finished for its client when its record is on disk; its KV is saved, and compressed, after
that. A turn that is cancelled or fails leaves its transcript as it was. If it has dropped tokens of
the context, the KV that is left stays under the lineage of that discard: a turn that drops the same
tokens again finds it, a turn that continues the old context does not.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from inference_svc.core.answers import GrowingAnswer
from inference_svc.core.compression import CompressionPolicy, special_tokens
from inference_svc.core.context import Context
from inference_svc.core.counters import COUNTERS, Counters
from inference_svc.core.errors import InvalidTurnError, SessionMovedError
from inference_svc.core.ranges import Range, clip, num_in
from inference_svc.core.submission import Submission
from inference_svc.core.transcript_format import ExpectedSession, Header, Transcript
from inference_svc.core.turn_record import (
    COMPRESSION,
    OVERFLOW,
    Accepted,
    Discard,
    Finished,
    FinishReason,
    TurnRecord,
    Usage,
)
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar
from inference_svc.runtime.compute.attention_scores import keeper_for
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.engine_request import ContextCut, Engine, EngineRequest
from inference_svc.runtime.turns.answer_writer import AnswerWriter
from inference_svc.runtime.turns.kept_edits import EditKeeper
from inference_svc.runtime.turns.misses import MissExplainer, with_miss
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import MidTurnCut, Prompt, PromptMaker, TurnLimits
from inference_svc.runtime.turns.turn_report import TurnReport


class TurnRunner:
    """Answers turns whose sessions are free.

    Args:
        engine: computes the answers.
        transcripts: the transcripts of all sessions.
        prompts: makes the turns' prompts.
        grammars: compiles the grammars of answers.
        tokenizer: the model's tokenizer; None: it has none, and answers have no text.
        limits: the limits of every turn.
        counters: the service's counters.
        report: logs turns that have ended.
        numbers: numbers of engine requests, ascending.
        misses: explains why a turn missed the cache.
        edits: keeps KV behind edits.
    """

    def __init__(
        self,
        engine: Engine,
        transcripts: TranscriptStore,
        prompts: PromptMaker,
        grammars: Grammars,
        tokenizer: Any | None,
        limits: TurnLimits,
        counters: Counters,
        report: TurnReport,
        numbers: Iterator[int],
        misses: MissExplainer,
        edits: EditKeeper,
    ) -> None:
        self._engine = engine
        self._transcripts = transcripts
        self._prompts = prompts
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._limits = limits
        self._counters = counters
        self._report = report
        self._numbers = numbers
        self._misses = misses
        self._edits = edits

    async def answer(self, turn: Turn) -> None:
        """Run a turn whose session is free, and publish its events.

        Raises:
            ReportedError: the turn was refused or failed.
        """
        submission = turn.submission
        transcript = await self._transcripts.find(submission.key)
        if transcript is None:
            await self._transcripts.trouble.check_room()
            transcript = Transcript(Header(*submission.key))
        ExpectedSession(submission.expected_turn).check(transcript)
        _check_tools(submission, transcript)
        number, context = next(self._numbers), transcript.context
        # kvd knows of the turn from here on, and reads its history from SSD while text is encoded.
        arriving = number, submission.key, submission.priority, context.computed_tokens
        with self._engine.queue.arriving(*arriving):
            session_arguments = transcript.template_arguments
            prompt = await self._prompts.make(submission, context, session_arguments)
            grammar = await self._compile_grammar(submission, prompt)
            request, writer = self._make_request(turn, number, prompt, grammar)
            turn.publish(
                Accepted(
                    submission.key.session_id,
                    len(transcript.turns),
                    submission.request_id,
                    len(self._engine.queue),
                    is_replayed=False,
                )
            )
            await self._compute(turn, prompt, request, writer, transcript)

    async def _compile_grammar(
        self, submission: Submission, prompt: Prompt
    ) -> AnswerGrammar | CallGrammar | None:
        """Compile the grammar of a turn's answer, or those of its tool calls; None: it has none.

        Raises:
            InvalidGrammarError: it is not a grammar, or this model cannot use one.
        """
        if submission.sampling.grammar is not None:
            return await self._grammars.compile_on_thread(submission.sampling.grammar)
        return await self._grammars.compile_calls_on_thread(
            submission.calls, self._shown_marks(submission), prompt.thought
        )

    def _shown_marks(self, submission: Submission) -> dict[int, str]:
        """Return the texts of special tokens that the answer's text is to show, by their ids."""
        return {
            i: mark
            for i, mark in self._prompts.text.marks.items()
            if mark in submission.shown_marks
        }

    def _make_request(
        self,
        turn: Turn,
        number: int,
        prompt: Prompt,
        grammar: AnswerGrammar | CallGrammar | None,
    ) -> tuple[EngineRequest, AnswerWriter]:
        """Make the turn's engine request, and the writer that is its sink."""
        submission, context = turn.submission, prompt.context
        max_tokens = prompt.window.answer_tokens(len(context.token_ids))
        sampling = replace(submission.sampling, max_tokens=max_tokens)
        answer = GrowingAnswer(sampling, self._limits.eos_ids)
        writer = AnswerWriter(
            turn,
            answer,
            self._tokenizer,
            context.token_ids,
            context.computed_tokens,
            self._report.histograms.itl_s,
            self._shown_marks(submission),
            prompt.thought,
        )
        # No scores for models with states: after a discard all of the context is computed again.
        scored = submission.compression if not self._limits.has_states else None
        num_tokens = len(context.token_ids)
        marks = prompt.marks(self._limits.mark_tokens)
        request = turn.request = EngineRequest(
            number=number,
            key=submission.key,
            token_ids=list(context.token_ids),
            max_tokens=sampling.max_tokens,
            arrived_ns=submission.arrived_ns,
            window_tokens=self._limits.window_tokens,
            history_tokens=context.computed_tokens,
            priority=submission.priority,
            deadline_ns=turn.deadline_ns,
            lineage=context.lineage,
            is_final=submission.is_final,
            retention=submission.retention,
            prefix_tokens=context.system_tokens,
            load_ends=marks if prompt.answer_from else (*marks, num_tokens),
            marks=marks if self._limits.has_states else (),
            sampler=Sampler(sampling, self._limits.eos_ids, grammar),
            sink=writer,
            input_tokens=len(prompt.input_ids),
            predicted_ids=prompt.predicted_ids,
            truncate=None if prompt.window.is_rigid else MidTurnCut(prompt, answer),
            scores=keeper_for(scored.needs, scored.window_tokens, num_tokens) if scored else None,
        )
        return request, writer

    async def _compute(
        self,
        turn: Turn,
        prompt: Prompt,
        request: EngineRequest,
        writer: AnswerWriter,
        transcript: Transcript,
    ) -> None:
        """Compute the answer, record it, finish the turn for its client, then compress its KV."""
        num_turns = len(transcript.turns)
        try:
            await self._edits.keep(turn, prompt, request)
            await self._engine.generate(request, _cut(prompt.before, prompt.ranges))
            turn.is_settled = True
            record = writer.record(request, num_turns, prompt)
            record = with_miss(record, await self._misses.find(turn.submission, prompt))
            context = transcript.with_turn(record, is_final=request.is_final).context
            ranges = self._compress(turn.submission, prompt, request, context)
            record = _with_compression(record, turn.submission.compression, ranges)
            moved_to = await self._record(turn.submission, transcript, record, writer.text)
            self._engine.keep(request, writer.computed_ids(request))
        except asyncio.CancelledError:
            if turn.handed_back is None:
                writer.finish_reason = FinishReason.CANCELLED
                usage = writer.usage(request)
                self._count(usage)
                self._finish(turn, request, writer, usage, num_turns)
            raise
        finally:
            self._engine.drop(request)
        self._counters.add("turns_finished")
        self._counters.add("overflows", sum(d.reason == OVERFLOW for d in record.discards))
        self._count(record.usage)
        self._finish(turn, request, writer, record.usage, num_turns + 1, moved_to)
        cut = _cut(context, ranges)
        if cut is not None:
            await self._engine.discard(request.key, cut)

    async def _record(
        self, submission: Submission, before: Transcript, record: TurnRecord, text: str
    ) -> str:
        """Record a turn, in a fork of its session if another server has added a turn meanwhile.

        Only sessions that no client has named are forked.

        Args:
            submission: the turn's submission.
            before: its session as it was when the turn began.
            record: the turn's record.
            text: the answer's text.

        Returns:
            The id of the fork that has the record; "": the turn's own session has it.

        Raises:
            SessionMovedError: another server has added a turn, and the session may not be forked.
        """
        is_local, fork_id = submission.is_local, submission.fork_id
        try:
            await self._transcripts.append(
                submission.key, record, is_final=submission.is_final, is_local=is_local
            )
        except SessionMovedError:
            if not fork_id:
                raise
        else:
            return ""
        digests = submission.digests_in(fork_id, text)
        record = replace(record, said=digests.said, history=digests.history)
        await self._transcripts.fork_with(before, record, fork_id, is_local=is_local)
        self._counters.add("turns_forked")
        return fork_id

    def _compress(
        self, submission: Submission, prompt: Prompt, request: EngineRequest, context: Context
    ) -> tuple[Range, ...]:
        """Return the ranges that the compression policy drops of the context after the turn."""
        policy, num_tokens = submission.compression, len(context.token_ids)
        if policy is None or submission.is_final or num_tokens < self._limits.compress_tokens:
            return ()
        scores = None if request.scores is None else request.scores.scores()
        if scores is None and policy.needs != "nothing":
            return ()
        protected = (
            (0, max(context.system_tokens, prompt.window.sink_tokens)),
            *special_tokens(context.token_ids, prompt.window.frame_tokens.ids),
            (context.computed_tokens, num_tokens),
        )
        return policy.drop(num_tokens, scores, protected)

    def _finish(
        self,
        turn: Turn,
        request: EngineRequest,
        writer: AnswerWriter,
        usage: Usage,
        num_turns: int,
        moved_to: str = "",
    ) -> None:
        """Publish the last event, and report how the turn ended.

        Args:
            turn: the turn.
            request: its request.
            writer: has the answer.
            usage: the turn's usage.
            num_turns: number of complete turns that the session has now.
            moved_to: id of the fork that has the record; "": the session itself has it.
        """
        text, reason = writer.text, str(writer.finish_reason)
        turn.publish(Finished(reason, text, usage, num_turns, writer.stop_string, moved_to))
        cancelled = writer.finish_reason is FinishReason.CANCELLED
        self._report.answered(
            turn.submission, request, reason, usage, num_turns, cancelled=cancelled
        )

    def _count(self, usage: Usage) -> None:
        """Count what a turn has used, finished or cancelled: all of its usage with a counter."""
        for name in COUNTERS.keys() & vars(usage).keys():  # history_tokens and others
            self._counters.add(name, getattr(usage, name))


def _check_tools(submission: Submission, transcript: Transcript) -> None:
    """Check that a turn offers the tools that its session began with: its context lists these.

    Raises:
        InvalidTurnError: other tools are offered.
    """
    offered = submission.tools_digest
    if transcript.turns and offered and offered != transcript.tools_digest:
        raise InvalidTurnError(
            "these tools differ from those that the session began with",
            "send the same tools, or begin another session",
        )


def _cut(context: Context, ranges: Sequence[Range]) -> ContextCut | None:
    """Return the cut of a context's KV; None: none of the dropped tokens was computed."""
    computed = clip(ranges, context.computed_tokens)
    return ContextCut(context.computed_ids, computed, context.lineage) if computed else None


def _with_compression(
    record: TurnRecord, policy: CompressionPolicy | None, ranges: tuple[Range, ...]
) -> TurnRecord:
    """Add the compression at a turn's end to its record."""
    if policy is None or not ranges:
        return record
    discard = Discard(ranges, record.num_tokens, COMPRESSION + policy.name)
    usage = replace(record.usage, compressed_tokens=num_in(ranges))
    return replace(record, discards=(*record.discards, discard), usage=usage)
