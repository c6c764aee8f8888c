"""What is logged of callers that were turned away: so many lines a second, however many come."""

from shared.process.log import LineAllowance, get_logger

log = get_logger(__name__)


class RefusalLog:
    """Of one address. Each client has lines of its own: a stranger's noise hides no client's.

    Args:
        event: what its lines are called.
    """

    def __init__(self, event: str = "access_refused") -> None:
        self._event = event
        self._lines = LineAllowance(per_s=1)

    def note(self, reason: str, client: str = "", **facts: str) -> None:
        """Log a refusal, or count it for the next line; `facts` hold nothing secret.

        Args:
            reason: slug of it.
            client: who it was, of few; "" for strangers.
            facts: more about it.
        """
        num_left_out = self._lines.take(client)
        if num_left_out is not None:
            log.warning(self._event, reason=reason, client=client, more=num_left_out, **facts)
