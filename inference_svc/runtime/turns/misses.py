"""Compares a conversation with the session that it resembles: why it missed the cache.

Done when the answer has come, on the thread that encodes: nobody waits for it to begin.
"""

from dataclasses import dataclass, replace

from inference_svc.core.chat import ASSISTANT
from inference_svc.core.context import Context
from inference_svc.core.errors import UnknownTurnError
from inference_svc.core.misses import (
    MissCause,
    Resembled,
    Wording,
    cause_of,
    describe_cause,
    message_index,
)
from inference_svc.core.scheduling.prefix_index import common_prefix
from inference_svc.core.submission import ChatInput, Submission
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import CacheMiss, TurnRecord, Usage
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn_prompt import Prompt
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

COMMON_TOKENS = 24  # before a difference: a date may begin in them
FOLLOWING_TOKENS = 48
CHANNELS = ("analysis",)  # what a model thinks, where the answer is written in channels


@dataclass(frozen=True)
class ExplainedMiss:
    """A miss, with the texts around what differs.

    Attributes:
        turn: index of the turn.
        miss: what is recorded of it.
        told: what its cause means.
        common: the last text that both conversations have.
        was: what the resembled session has behind it; "": that is not known any more.
        now: what the conversation has there.
    """

    turn: int
    miss: CacheMiss
    told: str
    common: str = ""
    was: str = ""
    now: str = ""


class MissExplainer:
    """See the module docstring.

    Args:
        transcripts: of all sessions.
        text: decodes; used on its thread alone.
        text_thread: that thread.
    """

    def __init__(
        self, transcripts: TranscriptStore, text: TurnText, text_thread: WorkerThread
    ) -> None:
        self._transcripts = transcripts
        self._text = text
        self._thread = text_thread

    async def find(self, submission: Submission, prompt: Prompt) -> CacheMiss | None:
        """Return why a turn's conversation is not the one that it resembles.

        Returns:
            the miss, whose `lost_tokens` are all that could have been reused; None: it resembles
            none, or does not differ.
        """
        resembled = submission.resembles
        if resembled is None or not isinstance(submission.input, ChatInput):
            return None
        given = submission.input
        other = await find_resembled(self._transcripts, submission.key, resembled)
        return await self._thread.run(self._compare, submission, given, resembled, prompt, other)

    async def explain(self, transcript: Transcript, turn: int | None = None) -> ExplainedMiss:
        """Show why a turn missed the cache.

        Args:
            transcript: of its session.
            turn: its index; None: the last one that missed.

        Raises:
            UnknownTurnError: there is no such turn, or it missed nothing.
        """
        record, miss = _missed(transcript, turn)
        header = transcript.header
        key = header.key
        resembled = Resembled(miss.session_id, miss.turns)
        other = await find_resembled(self._transcripts, key, resembled)
        if other is None:
            return ExplainedMiss(record.turn, miss, describe_cause(miss.cause))
        before = transcript.forked("", record.turn).context
        for discard in record.discards:
            before = before if discard.after_tokens else before.without(discard.ranges)
        ids, at = (*before.token_ids, *record.input_ids), miss.token_index
        spans = (
            ids[max(0, at - COMMON_TOKENS) : at],
            other.context.token_ids[at : at + FOLLOWING_TOKENS],
            ids[at : at + FOLLOWING_TOKENS],
        )
        return ExplainedMiss(
            record.turn,
            miss,
            describe_cause(miss.cause),
            *[await self._thread.run(self._decode, one) for one in spans],
        )

    def _compare(
        self,
        submission: Submission,
        given: ChatInput,
        resembled: Resembled,
        prompt: Prompt,
        other: Transcript | None,
    ) -> CacheMiss | None:
        starts, num_messages = self._starts(prompt), len(given.messages)
        num_after = _num_after_answer(given)
        has_starts = message_index(starts, 0, num_messages) is not None
        ids = prompt.context.token_ids
        end = len(prompt.before.without(prompt.ranges).token_ids) + (
            starts[-1 - num_after] if has_starts else len(prompt.input_ids)
        )
        if other is None:
            cause = MissCause.GONE if resembled.was_known else MissCause.UNKNOWN
            return CacheMiss(cause, lost_tokens=end)
        context = other.context
        at = common_prefix(ids, context.token_ids)
        if at >= len(context.token_ids) or at >= end:
            return None
        first = len(ids) - len(prompt.input_ids)
        index = message_index(starts, at - first, num_messages)
        role = given.messages[index].role if index is not None else ""
        in_opening = at < max(context.system_tokens, prompt.context.system_tokens)
        arguments = other.template_arguments or ""
        cause = cause_of(
            self._wording(other.tools_digest, arguments, context, at),
            self._wording(
                submission.tools_digest,
                arguments if first else prompt.template_arguments,
                prompt.context,
                at,
            ),
            self._decode(ids[max(0, at - COMMON_TOKENS) : at]),
            role,
            in_opening=in_opening,
            thoughts=self._thoughts(),
        )
        return CacheMiss(
            cause,
            resembled.session_id,
            resembled.turns,
            at,
            None if index is None else resembled.first_message + index,
            end,
        )

    def _wording(self, tools_digest: str, arguments: str, context: Context, at: int) -> Wording:
        ids = context.token_ids
        return Wording(
            tools_digest,
            arguments,
            self._decode(ids[: context.system_tokens]),
            self._decode(ids[at : at + FOLLOWING_TOKENS]),
        )

    def _starts(self, prompt: Prompt) -> list[int]:
        """Return where the messages of the input begin, and the answer."""
        framed = bytes([not prompt.is_text]) * len(prompt.input_ids)
        return self._text.frame_tokens.starts(prompt.input_ids, framed)

    def _thoughts(self) -> tuple[str, ...]:
        marks = self._text.thoughts
        if marks is not None:
            return (marks.opening,)
        return CHANNELS if self._text.tool_format.is_always else ()

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self._text.decode(token_ids) if token_ids else ""


async def find_resembled(
    transcripts: TranscriptStore, key: SessionKey, resembled: Resembled
) -> Transcript | None:
    """Return a session as it was after the turns that a conversation resembles; None: it is gone.

    Args:
        transcripts: of all sessions.
        key: of the conversation's own session: the other one is the same tenant's and model's.
        resembled: which one it is.
    """
    if not resembled.session_id:
        return None
    try:
        found = await transcripts.find(key._replace(session_id=resembled.session_id))
    except ReportedError:  # it is damaged: as good as gone
        return None
    if found is None or len(found.turns) < resembled.turns:
        return None
    return found.forked("", resembled.turns)


def with_miss(record: TurnRecord, miss: CacheMiss | None) -> TurnRecord:
    """Add a miss to a record: what of it was computed after all; nothing, and it was none."""
    usage = record.usage
    if miss is None:
        return record
    computed_tokens = usage.recomputed_tokens + usage.new_tokens
    lost_tokens = min(miss.lost_tokens - usage.reused_tokens, computed_tokens)
    if lost_tokens <= 0:
        return record
    miss = replace(miss, lost_tokens=lost_tokens, lost_s=_seconds_of(lost_tokens, usage))
    return replace(record, usage=replace(usage, miss=miss))


def _recomputed(usage: Usage) -> CacheMiss | None:
    """Return the miss of a turn that continued its session, whose KV was not to be had."""
    lost_tokens = usage.recomputed_tokens
    if not lost_tokens:
        return None
    lost_s = _seconds_of(lost_tokens, usage)
    return CacheMiss(usage.recompute_reason, lost_tokens=lost_tokens, lost_s=lost_s)


def _seconds_of(num_tokens: int, usage: Usage) -> float:
    """Return the part of the prefill that so many of its tokens took."""
    return usage.prefill_s * num_tokens / (usage.recomputed_tokens + usage.new_tokens)


def _num_after_answer(given: ChatInput) -> int:
    """Return how many of the messages follow the last answer among them."""
    roles = [message.role for message in given.messages]
    return roles[::-1].index(ASSISTANT) if ASSISTANT in roles else len(roles)


def _missed(transcript: Transcript, turn: int | None) -> tuple[TurnRecord, CacheMiss]:
    for record in reversed(transcript.turns):
        miss = record.usage.miss or _recomputed(record.usage)
        if miss is not None and turn in (None, record.turn):
            return record, miss
    which = "none of its turns" if turn is None else f"its turn {turn}"
    raise UnknownTurnError(
        f"{which} has missed what the cache had",
        "`kvd show` says what is stored of the session",
    )
