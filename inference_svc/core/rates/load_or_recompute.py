"""Whether stored history is loaded or computed again (architecture D14).

Loading a short history from a slow tier may take longer than computing it. What each takes is
measured (`rates.py`); what is not known yet is loaded, so that it will be.
"""

from collections import Counter
from enum import StrEnum

from inference_svc.core.rates.rates import Rates, pairs

# Every so many refusals one load is made all the same: an estimate that stems from a bad moment
# would otherwise never be corrected.
TRY_EVERY = 16


class LoadPolicy(StrEnum):
    """What a turn, or the configuration, asks for."""

    AUTO = "auto"  # what takes less time
    ALWAYS = "always"
    NEVER = "never"


class LoadChooser:
    """Chooses for each piece of stored history.

    Args:
        rates: the running estimates; read at each call.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._num_refusals: Counter[str] = Counter()  # by tier

    def wants(self, policy: LoadPolicy, tier: str, start: int, end: int) -> bool:
        """Whether to load the tokens [start, end) of a session, which lie in this tier.

        Recomputing them is measured by what they add to the prefill of the new tokens, which is
        made anyway; their positions count, since later tokens attend to more keys.
        """
        if policy is not LoadPolicy.AUTO:
            return policy is LoadPolicy.ALWAYS
        load_s = self._rates.loads.seconds(tier, end - start)
        compute_s = self._rates.steps.added_seconds(end - start, pairs(start, end))
        if load_s is None or compute_s is None or load_s <= compute_s:
            return True
        self._num_refusals[tier] += 1
        return self._num_refusals[tier] % TRY_EVERY == 0
