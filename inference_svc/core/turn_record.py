"""What a client sees of a turn, and what is remembered of it: its tokens, text and cost. Pure.

Events come in this order: accepted, started, tokens…, finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from inference_svc.core.answers import AnswerToken
from inference_svc.core.discards import Discard

TOP = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """What a turn cost; every prompt token is exactly one of reused, recomputed, new.

    Attributes:
        history_tokens: prompt tokens whose KV an earlier turn has computed; what overflow dropped
            before the turn is not in the prompt.
        reused_tokens: of them, still in memory (tier "hbm") or loaded from kvd.
        tier_tokens: reused tokens by the tier they were found in.
        ttft_s: from acceptance to the first token.
        tpot_s: mean time per output token after the first.
        recompute_reason: slug, why history was recomputed; "" if nothing was.
        preemptions: how often the turn gave its place to others.
        stall_s: how long its compute waited for layers that were still being loaded.
        dropped_tokens: by context overflow, before the turn and during it.
        compressed_tokens: given up by the compression policy when the turn had ended.
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

    @property
    def computed_tokens(self) -> int:
        """What the model was fed and what it answered."""
        return self.recomputed_tokens + self.new_tokens + self.output_tokens


@dataclass(frozen=True)
class TurnRecord:
    """One complete turn.

    Attributes:
        turn: index from 0.
        request_id: the client's, or one made for it.
        request_digest: of input and sampling; a repeat of request_id must have the same.
        input_ids: as appended: template and closing tokens included.
        output_ids: the answer.
        pieces: the text each output token added; joined, they are the answer's text.
        logprobs: of each output token, or empty.
        top_logprobs: per output token the most likely tokens, or empty.
        uncomputed_tokens: trailing tokens that the model was never fed: the last one sampled.
        created_unix_s: wall clock, for people.
        discards: what the context lost in this turn, in order.
        system_tokens: of a turn that begins with an empty context: how many of its first tokens are
            the system message, with whatever the template writes before the first message.
        is_text: the input was raw text: a special token in it begins no message.
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
    system_tokens: int = 0
    is_text: bool = False

    @property
    def num_tokens(self) -> int:
        """Input and answer."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Accepted:
    """The turn is valid and queued.

    Attributes:
        is_replayed: the recorded result of an earlier, equal request follows.
    """

    session_id: str
    turn: int
    request_id: str
    queue_length: int
    is_replayed: bool


@dataclass(frozen=True)
class Started:
    """The history is loaded as far as it was stored."""

    history_tokens: int
    reused_tokens: int
    queue_s: float


@dataclass(frozen=True)
class Tokens:
    """The answer's next tokens."""

    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True)
class Finished:
    """The last event.

    Attributes:
        turns: complete turns of the session now.
    """

    finish_reason: str
    text: str
    usage: Usage
    turns: int


TurnEvent: TypeAlias = Accepted | Started | Tokens | Finished
