"""What the demo finds out, turn by turn, and what it concludes. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class TurnFacts:
    """One turn, answered twice.

    Attributes:
        session_id: of the conversation.
        turn: index from 0.
        history_tokens: prompt tokens whose KV an earlier turn has computed.
        reused_tokens: of them, loaded from kvd.
        new_tokens: prompt tokens computed for the first time.
        output_tokens: length of the answer.
        tiers: where the reused tokens were found, most first.
        ttft_s: time to first token with reuse.
        recompute_ttft_s: the same turn in the service that recomputes.
        identical: whether both answers are the same tokens.
        after_kill: whether kvd was killed and restarted before it.
    """

    session_id: str
    turn: int
    history_tokens: int
    reused_tokens: int
    new_tokens: int
    output_tokens: int
    tiers: tuple[str, ...]
    ttft_s: float
    recompute_ttft_s: float
    identical: bool
    after_kill: bool

    @property
    def ttft_ratio(self) -> float:
        """How many times faster the first token comes with reuse."""
        return self.recompute_ttft_s / self.ttft_s


@dataclass(frozen=True)
class Summary:
    """The demo's verdict.

    Attributes:
        identical: every answer equals recomputation.
        reused_share: reused over history tokens after each session's first turn, before the kill.
        reused_share_after_kill: the same after kvd was killed and restarted.
        ttft_ratio: median over turns with history.
    """

    num_sessions: int
    num_turns: int
    identical: bool
    reused_share: float
    reused_share_after_kill: float
    ttft_ratio: float

    @property
    def passed(self) -> bool:
        """Whether the demo shows what it promises."""
        return self.identical and self.reused_share >= 0.9 and self.reused_share_after_kill > 0


def summarise(turns: Sequence[TurnFacts]) -> Summary:
    """Conclude from all turns."""
    with_history = [turn for turn in turns if turn.history_tokens]
    return Summary(
        num_sessions=len({turn.session_id for turn in turns}),
        num_turns=len(turns),
        identical=bool(turns) and all(turn.identical for turn in turns),
        reused_share=_reused_share([turn for turn in with_history if not turn.after_kill]),
        reused_share_after_kill=_reused_share([turn for turn in with_history if turn.after_kill]),
        ttft_ratio=median(turn.ttft_ratio for turn in with_history) if with_history else 0.0,
    )


def as_document(turns: Sequence[TurnFacts], model: str) -> dict[str, object]:
    """Everything as one JSON-ready document."""
    summary = summarise(turns)
    return {
        **asdict(summary),
        "passed": summary.passed,
        "model": model,
        "turns": [asdict(turn) | {"ttft_ratio": turn.ttft_ratio} for turn in turns],
    }


def _reused_share(turns: Sequence[TurnFacts]) -> float:
    history_tokens = sum(turn.history_tokens for turn in turns)
    return sum(turn.reused_tokens for turn in turns) / history_tokens if history_tokens else 0.0
