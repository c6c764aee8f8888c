"""A turn as clients see it, and as it is recorded: events, tokens, text and cost. Pure.

Events come in this order: accepted, started, tokens…, finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from shared.types.lineage import Lineage

TOP = tuple[tuple[int, float], ...]
# Reasons of a discard.
OVERFLOW = "overflow"
CLIENT = "client"
COMPRESSION = "compression:"  # followed by the policy's name


class ConversationDigests(NamedTuple):
    """Digests of the whole conversation that a turn's record has: see `TurnRecord`."""

    said: str = ""
    history: str = ""


@dataclass(frozen=True)
class CacheMiss:
    """What was computed again although the cache had it, or once had it, and why.

    Attributes:
        cause: a `MissCause` (`misses.py`).
        session_id: the session that the conversation resembles; "" if it is gone.
        turns: number of that session's turns that the conversation was compared with.
        token_index: index of the first token that differs.
        message_index: index of its message among those the client sent; None: not known.
        lost_tokens: number of prompt tokens that were computed because of the difference.
        lost_s: the part of the prefill that these took, in seconds.
    """

    cause: str
    session_id: str = ""
    turns: int = 0
    token_index: int = 0
    message_index: int | None = None
    lost_tokens: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True)
class Usage:
    """The cost of a turn; every prompt token is exactly one of reused, recomputed, new.

    Attributes:
        history_tokens: prompt tokens whose KV an earlier turn has computed; tokens that overflow
            dropped before the turn are not in the prompt.
        reused_tokens: history tokens whose KV was in memory (tier "hbm") or loaded from kvd.
        recomputed_tokens: history tokens that were computed again.
        new_tokens: the other prompt tokens.
        output_tokens: tokens of the answer.
        tier_tokens: reused tokens by the tier they were found in.
        queue_s: seconds from arrival to admission.
        load_s: seconds from admission until the history is loaded.
        prefill_s: seconds from the first step to the first token.
        ttft_s: seconds from arrival to the first token.
        tpot_s: mean seconds per output token after the first.
        total_s: seconds from arrival to the end.
        recompute_reason: slug, why history was recomputed; "" if nothing was.
        preemptions: number of times the turn was preempted.
        stall_s: seconds that its steps waited for layers that were still being loaded.
        dropped_tokens: tokens dropped by context overflow, before the turn and during it.
        compressed_tokens: tokens dropped by the compression policy when the turn had ended.
        drafted_tokens: tokens that were guessed ahead of the answer, and computed.
        accepted_tokens: drafted tokens that were right.
        kept_tokens: reused tokens that were kept behind an edit: computed over other tokens.
        healed_tokens: tokens behind an edit that were computed again though they are the same.
        miss: the part that was computed although the cache had something very similar; None: none.
    """

    history_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    recompute_reason: str = ""
    preemptions: int = 0
    stall_s: float = 0.0
    dropped_tokens: int = 0
    compressed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kept_tokens: int = 0
    healed_tokens: int = 0
    miss: CacheMiss | None = None

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that were computed: recomputed, new, and the answer's."""
        return self.recomputed_tokens + self.new_tokens + self.output_tokens


@dataclass(frozen=True)
class Discard:
    """One discard, as it is recorded in a transcript.

    Attributes:
        ranges: merged ranges of positions in the context it was applied to.
        after_tokens: number of its turn's tokens (input, then output) that the context had when it
            happened; 0: before the turn's input.
        reason: "overflow", "client" or "compression:<policy>".
        lineage: lineage of the tokens left, if it cannot be derived from the turn's tokens: KV was
            computed over tokens of a stop string, which no answer contains. Else None.
    """

    ranges: tuple[tuple[int, int], ...]
    after_tokens: int = 0
    reason: str = OVERFLOW
    lineage: Lineage | None = None


@dataclass(frozen=True)
class Graft:
    """A place where a context continues with KV of another session, as it is recorded.

    A conversation that was edited has tokens behind the edit whose KV another session has computed
    (`edits.py`). The store gives this KV to the session. The tokens from there on have another
    lineage.

    Attributes:
        seam: number of tokens of the context before it.
        num_tokens: number of tokens whose KV was taken.
        session_id: the session that computed the KV.
        source_start: position of its first token in that session's context.
        healed_tokens: tokens before the seam that were computed again though they are the same.
        lineage: lineage of the context from the seam on.
    """

    seam: int
    num_tokens: int
    session_id: str
    source_start: int
    healed_tokens: int
    lineage: Lineage


def kept_among(grafts: Sequence[Graft], num_tokens: int) -> int:
    """Count the grafted tokens among the first `num_tokens` of a context."""
    return sum(max(0, min(graft.num_tokens, num_tokens - graft.seam)) for graft in grafts)


@dataclass(frozen=True)
class TurnRecord:
    """One complete turn.

    Attributes:
        turn: index of the turn, from 0.
        request_id: the client's request id, or one made for it.
        request_digest: digest of input and sampling; a repeat of request_id must have the same.
        input_ids: token ids of the input as appended, template and closing tokens included.
        output_ids: token ids of the answer.
        pieces: the text each output token added; joined, they are the answer's text.
        logprobs: log-probability of each output token, or empty.
        top_logprobs: for each output token the most likely tokens, or empty.
        uncomputed_tokens: number of last tokens that the model was never fed: the last one sampled.
        finish_reason: why the answer ended.
        usage: the cost of the turn.
        created_unix_s: Unix time when the turn ended, for display.
        discards: discards of the context in this turn, in order.
        grafts: grafts in its input, in order: what was kept behind an edit.
        system_tokens: number of first tokens that are the system message, with anything that the
            template writes before the first message; 0 if the turn began with a context.
        is_text: whether the input was raw text: a special token in it begins no message.
        stop_string: the stop string that ended the answer; "" if none did.
        tools_digest: a digest of the tools that were offered; "" if none were.
        template_arguments: for a session's first turn, the chat template's arguments as JSON, if
            they change what the template writes; else "".
        said: a digest of the whole conversation up to this answer, as its client sends it back. It
            is the same on every server, and specific to this session. "": not known, or the session
            is not shared.
        history: a digest likewise, but the same in every session. "" also if a client has named
            this session, or if the turn was copied from another session by a fork.
        response: id of the response that the turn is stored as; "" if there is none, or it is
            another session's.
    """

    turn: int
    request_id: str
    request_digest: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[TOP, ...]
    uncomputed_tokens: int
    finish_reason: str
    usage: Usage
    created_unix_s: float
    discards: tuple[Discard, ...] = ()
    grafts: tuple[Graft, ...] = ()
    system_tokens: int = 0
    is_text: bool = False
    stop_string: str = ""
    tools_digest: str = ""
    template_arguments: str = ""
    said: str = ""
    history: str = ""
    response: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of input and answer."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.pieces)


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-turn token, a stop token, or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class AnswerToken:
    """One token of an answer.

    Attributes:
        token_id: the token's id.
        text: the text that it adds to the answer; "" while a character is incomplete.
        logprob: natural log of its probability; None unless requested.
        top: the most likely tokens as (token id, log-probability), most likely first.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top: TOP = ()


@dataclass(frozen=True)
class Accepted:
    """The turn is valid and queued.

    Attributes:
        session_id: the turn's session.
        turn: index of the turn, from 0.
        request_id: the client's request id, or one made for it.
        queue_length: number of requests that waited when it was accepted.
        is_replayed: whether the recorded result of an earlier, equal request follows.
    """

    session_id: str
    turn: int
    request_id: str
    queue_length: int
    is_replayed: bool


@dataclass(frozen=True)
class Started:
    """The history is loaded as far as it was stored; the attributes are those of `Usage`."""

    history_tokens: int
    reused_tokens: int
    queue_s: float
    new_tokens: int


@dataclass(frozen=True)
class Tokens:
    """The answer's next tokens."""

    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True)
class Finished:
    """The last event.

    Attributes:
        finish_reason: why the answer ended.
        text: the answer's text.
        usage: the cost of the turn.
        turns: number of complete turns of the session now.
        stop_string: the stop string that ended the answer; "" if none did.
        moved_to: the session that has the turn, if another server has continued the session that it
            was submitted to; "": the turn is in that session.
    """

    finish_reason: str
    text: str
    usage: Usage
    turns: int
    stop_string: str = ""
    moved_to: str = ""


TurnEvent: TypeAlias = Accepted | Started | Tokens | Finished
