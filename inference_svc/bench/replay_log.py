"""The turns of one replay, and what they come to. Pure."""

from collections import Counter

from inference_svc.bench.turn_times import TurnTimes
from shared.measuring.statistics import percentile

PERCENTILES = (50, 90, 99)
TIERS = ("hbm", "dram", "ssd")


class ReplayLog:
    """See the module docstring."""

    def __init__(self) -> None:
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._tier_tokens: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, times: TurnTimes, history_tokens: int, prompt_tokens: int) -> None:
        """Note a turn, with so much history that an earlier turn had computed."""
        self._ttft_s.append(times.ttft_s)
        if times.tpot_s:
            self._tpot_s.append(times.tpot_s)
        self._tier_tokens.update(times.tier_tokens)
        self._counts.update(
            turns=1,
            history=history_tokens,
            prompt=prompt_tokens,
            reused=times.reused_tokens,
            output=len(times.token_s),
        )

    def values(self, elapsed_s: float, busy_s: float) -> dict[str, float]:
        """Metrics; `busy` is the time that the model computed, the shares are of the history."""
        counts, history = self._counts, max(1, self._counts["history"])
        found = {f"ttft_p{p}_s": percentile(self._ttft_s, p / 100) for p in PERCENTILES}
        if self._tpot_s:
            found |= {f"tpot_p{p}_s": percentile(self._tpot_s, p / 100) for p in PERCENTILES}
        shares = {f"{tier}_share": self._tier_tokens[tier] / history for tier in TIERS}
        return {
            **found,
            "turns_per_s": counts["turns"] / elapsed_s,
            "prompt_tokens_per_s": counts["prompt"] / elapsed_s,
            "output_tokens_per_s": counts["output"] / elapsed_s,
            "elapsed_s": elapsed_s,
            "busy_s": busy_s,
            "busy_share": busy_s / elapsed_s,
            **shares,
            "recomputed_share": (counts["history"] - counts["reused"]) / history,
        }
