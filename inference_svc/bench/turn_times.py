"""What one measured turn took, and whether its history was where it should have been. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Where a turn's history is to come from: its KV, kvd, kvd if it pays, nowhere, wherever it is.
Source = Literal["resident", "kvd", "auto", "none", "any"]
SSD_SHARE = 0.95  # of the history that must come from SSD where a case says so


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn; times are of one monotonic clock.

    Attributes:
        token_s: when each token of the answer was there.
        reused_tokens: of the prompt, not computed.
        tier_tokens: of them, by the tier they came from.
        stall_s: how long computing waited for layers.
        output_ids: the answer.
    """

    submitted_s: float
    token_s: tuple[float, ...]
    reused_tokens: int
    tier_tokens: Mapping[str, int]
    load_s: float
    stall_s: float
    output_ids: tuple[int, ...]

    @property
    def ttft_s(self) -> float:
        """From submission to the first token."""
        return self.token_s[0] - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 without any."""
        num_more = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_more if num_more else 0.0

    @property
    def end_s(self) -> float:
        """When the answer was complete."""
        return self.token_s[-1]


def is_from(times: TurnTimes, tier: str, history_tokens: int) -> bool:
    """Whether all of the history came from the tier; tier "" means that nothing was reused."""
    if not tier:
        return not times.reused_tokens
    least = SSD_SHARE * history_tokens if tier == "ssd" else history_tokens
    return times.reused_tokens == history_tokens and times.tier_tokens.get(tier, 0) >= least


def whole_blocks(history_tokens: int, new_tokens: int, block_tokens: int) -> tuple[int, int]:
    """Make the history whole blocks, one at least, and count what that takes from it as new.

    A partial block would be replaced as soon as a longer one is stored: the history would not stay
    as it is.
    """
    whole = max(block_tokens, history_tokens - history_tokens % block_tokens)
    return whole, max(1, history_tokens + new_tokens - whole)
