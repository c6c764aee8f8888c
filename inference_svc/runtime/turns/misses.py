"""Explains cache misses: compares a conversation with the session that it resembles.

The comparison runs on the thread that encodes, after the answer is complete: it delays no token.
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

COMMON_TOKENS = 24  # shown before a difference: a date that differs may begin in them
FOLLOWING_TOKENS = 48  # shown behind it
CHANNELS = ("analysis",)  # channels of thoughts, of models that write answers in channels


@dataclass(frozen=True)
class ExplainedMiss:
    """A miss, with the texts around what differs.

    Attributes:
        turn: index of the turn.
        miss: the miss as it is recorded.
        told: an explanation of its cause.
        common: the last text that both conversations have in common.
        was: the resembled session's text behind that; "": it is not known any more.
        now: the conversation's text there.
    """

    turn: int
    miss: CacheMiss
    told: str
    common: str = ""
    was: str = ""
    now: str = ""


class MissExplainer:
    """Finds and explains the causes of cache misses.

    Args:
        transcripts: the transcripts of all sessions.
        text: decodes tokens; used on `text_thread` only.
        text_thread: the thread that encodes and decodes.
    """

    def __init__(
        self, transcripts: TranscriptStore, text: TurnText, text_thread: WorkerThread
    ) -> None:
        self._transcripts = transcripts
        self._text = text
        self._thread = text_thread

    async def find(self, submission: Submission, prompt: Prompt) -> CacheMiss | None:
        """Find where a turn's conversation differs from the session that it resembles.

        Returns:
            The miss, whose `lost_tokens` are all that could have been reused; None: the
            conversation resembles no session, or does not differ.
        """
        resembled = submission.resembles
        if resembled is None or not isinstance(submission.input, ChatInput):
            return None
        chat = submission.input
        other = await find_resembled(self._transcripts, submission.key, resembled)
        return await self._thread.run(self._compare, submission, chat, resembled, prompt, other)

    async def explain(self, transcript: Transcript, turn: int | None = None) -> ExplainedMiss:
        """Explain why a turn missed the cache, with the texts that differ.

        Args:
            transcript: the transcript of the turn's session.
            turn: the turn's index; None: the last turn that missed.

        Raises:
            UnknownTurnError: there is no such turn, or it missed nothing.
        """
        record, miss = _find_miss(transcript, turn)
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
            *[await self._thread.run(self._decode, span) for span in spans],
        )

    def _compare(
        self,
        submission: Submission,
        chat: ChatInput,
        resembled: Resembled,
        prompt: Prompt,
        other: Transcript | None,
    ) -> CacheMiss | None:
        """Compare two conversations, on the text thread; `other` None: the other one is gone."""
        starts, num_messages = self._starts(prompt), len(chat.messages)
        num_after = _num_after_answer(chat)
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
        role = chat.messages[index].role if index is not None else ""
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
        """Return the texts of a context that are compared, around position `at`."""
        ids = context.token_ids
        return Wording(
            tools_digest,
            arguments,
            self._decode(ids[: context.system_tokens]),
            self._decode(ids[at : at + FOLLOWING_TOKENS]),
        )

    def _starts(self, prompt: Prompt) -> list[int]:
        """Return the positions in the input at which its messages and the answer begin."""
        framed = bytes([not prompt.is_text]) * len(prompt.input_ids)
        return self._text.frame_tokens.starts(prompt.input_ids, framed)

    def _thoughts(self) -> tuple[str, ...]:
        """Return the marks that begin a thought."""
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
        transcripts: the transcripts of all sessions.
        key: the key of the conversation's own session; the other one has its tenant and model.
        resembled: the id of the other session, and the number of its turns.
    """
    if not resembled.session_id:
        return None
    try:
        found = await transcripts.find(key._replace(session_id=resembled.session_id))
    except ReportedError:  # a damaged transcript counts as gone
        return None
    if found is None or len(found.turns) < resembled.turns:
        return None
    return found.forked("", resembled.turns)


def with_miss(record: TurnRecord, miss: CacheMiss | None) -> TurnRecord:
    """Add a miss to a record, if tokens were computed for it; `miss` None: there was none.

    Tokens that were reused in spite of the miss are not counted as lost.
    """
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
    """Return the miss of a turn that continued its session, but had to recompute history."""
    lost_tokens = usage.recomputed_tokens
    if not lost_tokens:
        return None
    lost_s = _seconds_of(lost_tokens, usage)
    return CacheMiss(usage.recompute_reason, lost_tokens=lost_tokens, lost_s=lost_s)


def _seconds_of(num_tokens: int, usage: Usage) -> float:
    """Return the seconds of the prefill that some of its tokens took."""
    return usage.prefill_s * num_tokens / (usage.recomputed_tokens + usage.new_tokens)


def _num_after_answer(chat: ChatInput) -> int:
    """Return how many of the messages follow the last answer among them."""
    roles = [message.role for message in chat.messages]
    return roles[::-1].index(ASSISTANT) if ASSISTANT in roles else len(roles)


def _find_miss(transcript: Transcript, turn: int | None) -> tuple[TurnRecord, CacheMiss]:
    """Return the record of a turn that missed the cache, the last one if None, and its miss."""
    for record in reversed(transcript.turns):
        miss = record.usage.miss or _recomputed(record.usage)
        if miss is not None and turn in (None, record.turn):
            return record, miss
    what = (
        "no turn of the session has missed the cache"
        if turn is None
        else f"turn {turn} of the session has not missed the cache"
    )
    raise UnknownTurnError(
        what,
        "run kvd show SESSION to list what is stored of the session",
    )
