"""Measured rates: how long steps and loads take here, and whether loading a history pays. Pure.

The estimates are updated with each measurement. They are used by the scheduler's start gate, by the
choice between loading and recomputing, and for the times at which refused clients may retry.
`running_fit.py` explains how they cope with noise, stalls and change. Loading a short history from
a slow tier may cost more than computing it (architecture D14): `shared/types/load_choice.py` has
the rule, this module provides the numbers. History from a tier with unknown rates is loaded, so
that they become known.
"""

from collections import Counter
from enum import StrEnum

from inference_svc.core.rates.running_fit import RunningFit
from inference_svc.core.speculation.draft_lengths import StepCost
from shared.types.load_choice import Traffic, loading_pays, longest_wait_s

DRAM, SSD = "dram", "ssd"  # kvd's tiers
_REPLAY_SHARE = 0.1  # weight of the newest replay in the mean


def pairs(start: int, end: int) -> int:
    """Count the (query, key) pairs of tokens [start, end): token p attends to p + 1 keys."""
    return (end - start) * (start + end + 1) // 2


class StepTimes:
    """Seconds that a step takes: a constant, plus a share per token and per (query, key) pair."""

    def __init__(self) -> None:
        self._fit = RunningFit(3)

    def note(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Record how long a step of `num_tokens` tokens, over all its sequences, took.

        Time in which the step waited for a load must not be included.
        """
        self._fit.note((1, num_tokens, num_pairs), seconds)

    def seconds(self, num_tokens: int, num_pairs: int) -> float | None:
        """Estimate how many seconds a step takes.

        None until three steps were recorded. Also None for a step unlike all of them (by powers of
        two), until they differ enough to determine constant, tokens and pairs.
        """
        return self._fit.seconds((1, num_tokens, num_pairs))

    def added_seconds(self, num_tokens: int, num_pairs: int) -> float | None:
        """Estimate how many seconds these tokens add to steps that are computed anyway.

        None until constant, tokens and pairs are determined.
        """
        coefficients = self._fit.coefficients()
        if coefficients is None:
            return None
        return coefficients[1] * num_tokens + coefficients[2] * num_pairs

    def as_dict(self) -> dict[str, float]:
        """Return the coefficients and, for display, speeds, as far as they are known."""
        coefficients = self._fit.coefficients()
        if coefficients is None:
            return {}
        names = ("step_constant_s", "step_token_s", "step_pair_s")
        prefill_s = self._fit.seconds((1, 1024, pairs(0, 1024)))
        known = dict(zip(names, coefficients, strict=True))
        return known | ({"prefill_tokens_per_s": 1024 / prefill_s} if prefill_s else {})


class DecodeTimes:
    """Seconds that a step takes that only decodes, with logits after each token.

    A constant, plus a share per token; the length of their contexts is neglected, because it
    changes slowly. A step that is replayed from a graph takes less; its times are kept by number of
    tokens.
    """

    def __init__(self) -> None:
        self._fit = RunningFit(2)
        self._replays_s: dict[int, float] = {}  # by number of tokens: a running mean

    def note(self, num_tokens: int, seconds: float, *, is_replayed: bool) -> None:
        """Record how long a step of `num_tokens` tokens took."""
        if is_replayed:
            mean_s = self._replays_s.get(num_tokens, seconds)
            self._replays_s[num_tokens] = mean_s + _REPLAY_SHARE * (seconds - mean_s)
        else:
            self._fit.note((1, num_tokens), seconds)

    def cost(self, num_tokens: int) -> StepCost | None:
        """Return what a step of `num_tokens` tokens costs, in seconds; None: not known yet."""
        coefficients = self._fit.coefficients()
        if coefficients is None:
            return None
        constant_s, token_s = coefficients
        drafted_s = constant_s + num_tokens * token_s
        return StepCost(self._replays_s.get(num_tokens, drafted_s), drafted_s, token_s)


class LoadTimes:
    """Seconds that a load from a tier takes: a latency, plus a share per token."""

    def __init__(self) -> None:
        self._fits: dict[str, RunningFit] = {}

    def note(self, tier: str, num_tokens: int, seconds: float) -> None:
        """Record how long a load took; `tier` is the slowest one that tokens came from."""
        self._fits.setdefault(tier, RunningFit(2)).note((1, num_tokens), seconds)

    def seconds(self, tier: str, num_tokens: int) -> float | None:
        """Estimate how many seconds a load takes.

        None until three loads from the tier were noted, and for a load unlike all of them (by
        powers of two) until they differ enough to determine latency and rate each.
        """
        fit = self._fits.get(tier)
        return fit.seconds((1, num_tokens)) if fit else None

    def as_dict(self) -> dict[str, float]:
        """Return latency and rate of each tier, as far as they are known."""
        known: dict[str, float] = {}
        for tier, fit in sorted(self._fits.items()):
            latency_s, token_s = fit.coefficients() or (0.0, 0.0)
            if latency_s or token_s:
                known[f"load_latency_s_{tier}"] = latency_s
            if token_s:
                known[f"load_tokens_per_s_{tier}"] = 1 / token_s
        return known


class Rates:
    """The estimates of steps and loads together.

    Attributes:
        steps: estimates of steps.
        decodes: estimates of steps without prompts.
        loads: estimates of loads, by tier.
    """

    def __init__(self) -> None:
        self.steps = StepTimes()
        self.decodes = DecodeTimes()
        self.loads = LoadTimes()

    def as_dict(self) -> dict[str, float]:
        """Return what is known, for display and gauges: seconds, tokens/s of prefill and loads."""
        return self.steps.as_dict() | self.loads.as_dict()


# After so many refusals one load is made nevertheless: an estimate from a bad moment would
# otherwise never be corrected.
TRY_EVERY = 16


class LoadPolicy(StrEnum):
    """Whether history is loaded: set for a turn or by the configuration."""

    AUTO = "auto"  # where it pays
    ALWAYS = "always"
    NEVER = "never"


class LoadChooser:
    """Chooses between loading and recomputing, for each piece of stored history.

    Args:
        rates: the running estimates; read at each call.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._num_refusals: Counter[str] = Counter()  # by tier

    def should_load(
        self, policy: LoadPolicy, tier: str, start: int, end: int, traffic: Traffic
    ) -> bool:
        """Return whether to load the tokens [start, end) of a session from this tier.

        Recomputing them costs what they add to the prefill of the new tokens, which happens anyway.
        Their positions count, since later tokens attend to more keys. The part of a load that would
        also be needed from DRAM counts as work during which no other request is computed: on a CPU
        that is so, with a GPU it is little.
        """
        if policy is not LoadPolicy.AUTO:
            return policy is LoadPolicy.ALWAYS
        load_s = self._rates.loads.seconds(tier, end - start)
        compute_s = self._rates.steps.added_seconds(end - start, pairs(start, end))
        if load_s is None or compute_s is None:
            return True
        copy_s = min(load_s, self._rates.loads.seconds(DRAM, end - start) or 0.0)
        if loading_pays(load_s - copy_s, copy_s, compute_s, traffic):
            return True
        self._num_refusals[tier] += 1
        return self._num_refusals[tier] % TRY_EVERY == 0

    def fetch_wait_s(
        self, policy: LoadPolicy, num_tokens: int, traffic: Traffic, most_s: float
    ) -> float:
        """Return for how many seconds a turn may wait for KV that is being fetched to kvd's DRAM.

        Args:
            policy: the turn's load policy.
            num_tokens: number of tokens of the session that the turn could load.
            traffic: the engine's other work.
            most_s: the result for a turn that always loads, and while rates are unknown, so that
                they become known.
        """
        if policy is not LoadPolicy.AUTO:
            return most_s if policy is LoadPolicy.ALWAYS else 0.0
        compute_s = self._rates.steps.added_seconds(num_tokens, pairs(0, num_tokens))
        if compute_s is None:
            return most_s
        copy_s = self._rates.loads.seconds(DRAM, num_tokens) or 0.0
        return longest_wait_s(copy_s, compute_s, traffic)
