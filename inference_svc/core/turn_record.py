"""What is remembered of a turn: its tokens, its text, what it cost. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOP = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """What a turn cost; every prompt token is exactly one of reused, recomputed, new.

    Attributes:
        history_tokens: prompt tokens whose KV an earlier turn has computed.
        reused_tokens: of them, still in memory (tier "hbm") or loaded from kvd.
        tier_tokens: reused tokens by the tier they were found in.
        ttft_s: from acceptance to the first token.
        tpot_s: mean time per output token after the first.
        recompute_reason: slug, why history was recomputed; "" if nothing was.
        preemptions: how often the turn gave its place to others.
        stall_s: how long its compute waited for layers that were still being loaded.
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

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)
