"""How often requests that wait are likely admitted, from how things went of late.

As often as places became free while somebody waited: an idle engine's pauses say nothing of its
speed. Before two requests have ended, by what the prompts ahead add to steps.
"""

from collections.abc import Iterable
from itertools import islice

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from shared.types.units import NS_PER_S

UNKNOWN_RETRY_S = 1.0  # a guess at a turn's length, until one was seen
_FEW = 16  # prompts that stand for all that wait
_SHARE = 0.1  # of the newest interval in the mean: about the last ten matter


class StartEstimates:
    """See the module docstring.

    Args:
        rates: of steps.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._interval_s: float | None = None  # mean time between two ends
        self._since_ns: int | None = None  # the last end, or when somebody began to wait

    def waits(self, now_ns: int) -> None:
        """Somebody waits now."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def ended(self, now_ns: int, *, somebody_waits: bool) -> None:
        """A request that was admitted has ended."""
        if self._since_ns is not None:
            newest_s = (now_ns - self._since_ns) / NS_PER_S
            mean_s = newest_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _SHARE * (newest_s - mean_s)
        self._since_ns = now_ns if somebody_waits else None

    def retry_after_s(self) -> float:
        """When a place in the queue is likely free."""
        return UNKNOWN_RETRY_S if self._interval_s is None else self._interval_s

    def interval_s(self, waiting: Iterable[Request]) -> float:
        """Mean time between two starts, as likely as not; 0 if unknown. `waiting` in order."""
        if self._interval_s is not None:
            return self._interval_s
        prompts_s = [self._prompt_s(request) for request in islice(waiting, _FEW)]
        return sum(prompts_s) / len(prompts_s) if prompts_s else 0.0

    def _prompt_s(self, request: Request) -> float:
        """Seconds that what is left of a prompt adds to steps; 0 if unknown."""
        end = len(request.token_ids)
        start = min(max(request.computed_tokens, request.history_tokens), end - 1)
        return self._rates.steps.added_seconds(end - start, pairs(start, end)) or 0.0
