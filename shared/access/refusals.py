"""What is logged of callers that were turned away: so many lines a second, however many come."""

import time

from shared.log import get_logger

EVERY_S = 1.0

log = get_logger(__name__)


class RefusalLog:
    """Of one address.

    Args:
        event: what its lines are called.
    """

    def __init__(self, event: str = "access_refused") -> None:
        self._event = event
        self._told_at_s = -EVERY_S
        self._not_told = 0

    def note(self, reason: str, **facts: str) -> None:
        """Log a refusal, or count it for the next line; `facts` hold nothing secret."""
        now_s = time.monotonic()
        if now_s < self._told_at_s + EVERY_S:
            self._not_told += 1
            return
        log.warning(self._event, reason=reason, more=self._not_told, **facts)
        self._told_at_s, self._not_told = now_s, 0
