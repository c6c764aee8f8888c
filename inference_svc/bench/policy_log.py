"""The turns that were replayed by one policy, and what they come to. Pure.

    all       turns that found all of their history, of all turns: a first turn finds none
    fu        the same, of turns that have history
    tok       tokens of history that were found, of all of them: the prefill that is saved
    dram      of the tokens found, those that were in DRAM when the turn started to be loaded

Judge by tok, then fu, then dram; and look at the queue beside it.
"""

from collections import Counter
from dataclasses import dataclass

from inference_svc.bench.turn_times import TurnTimes
from shared.measuring.statistics import percentile

MANY_AHEAD = 4  # jobs: enough to read ahead while they are computed


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn.

    Attributes:
        history_tokens: that an earlier turn had computed.
        prompt_tokens: history and new.
        num_ahead: turns that waited when it came.
    """

    times: TurnTimes
    history_tokens: int
    prompt_tokens: int
    num_ahead: int

    @property
    def is_hit(self) -> bool:
        """Whether it found all of its history."""
        return 0 < self.history_tokens <= self.times.reused_tokens


class PolicyLog:
    """See the module docstring."""

    def __init__(self) -> None:
        self._turns: list[ReplayedTurn] = []

    def add(self, turn: ReplayedTurn) -> None:
        """Note a turn that counts."""
        self._turns.append(turn)

    @property
    def mean_prompt_tokens(self) -> float:
        """Of the turns that count."""
        return sum(turn.prompt_tokens for turn in self._turns) / max(1, len(self._turns))

    def values(self, elapsed_s: float, busy_s: float) -> dict[str, float]:
        """Metrics; the times are those of all of the replay.

        Raises:
            ValueError: no turn counts.
        """
        turns = self._turns
        ttft_s = [turn.times.ttft_s for turn in turns]
        num_ahead = [turn.num_ahead for turn in turns]
        prompt_tokens = sum(turn.prompt_tokens for turn in turns)
        computed = prompt_tokens - sum(turn.times.reused_tokens for turn in turns)
        return {
            **self._shares(),
            "ttft_mean_s": sum(ttft_s) / len(ttft_s),
            "ttft_p99_s": percentile(ttft_s, 0.99),
            "queue_mean": sum(num_ahead) / len(turns),
            "queue_p99": percentile(num_ahead, 0.99),
            "turns_per_s": len(turns) / elapsed_s,
            "computed_prompt_tokens": computed,
            "elapsed_s": elapsed_s,
            "busy_s": busy_s,
        }

    def _shares(self) -> dict[str, float]:
        """What was found of the histories, and where."""
        turns = self._turns
        num_hits = sum(turn.is_hit for turn in turns)
        num_with_history = sum(turn.history_tokens > 0 for turn in turns)
        history = sum(turn.history_tokens for turn in turns)
        found = sum(turn.times.reused_tokens for turn in turns)
        shares = {
            "all_share": num_hits / len(turns),
            "fu_share": num_hits / max(1, num_with_history),
            "tok_share": found / max(1, history),
            "dram_share": _in_dram(turns),
        }
        behind_many = [turn for turn in turns if turn.num_ahead >= MANY_AHEAD]
        if any(turn.times.reused_tokens for turn in behind_many):
            shares["dram_4_ahead_share"] = _in_dram(behind_many)
        return shares


def _in_dram(turns: list[ReplayedTurn]) -> float:
    """Of the tokens that were found, those that were in DRAM."""
    found = Counter[str]()
    for turn in turns:
        found.update(turn.times.tier_tokens)
    return found["dram"] / max(1, found.total())
