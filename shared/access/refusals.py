"""What is logged of callers that were turned away: so many lines a second, however many come."""

from shared.process.log import LineAllowance, get_logger

log = get_logger(__name__)


class RefusalLog:
    """The log of refusals at one address; each client has lines of its own.

    Args:
        event: the event name of its lines.
    """

    def __init__(self, event: str = "access_refused") -> None:
        self._event = event
        self._lines = LineAllowance(per_s=1)

    def note(self, reason: str, client: str = "", **facts: str) -> None:
        """Log a refusal, or count it for the next line; `facts` hold nothing secret.

        Args:
            reason: slug of the refusal.
            client: the client's name, of which there are few; "" for strangers.
            facts: more about the refusal.
        """
        num_left_out = self._lines.take(client)
        if num_left_out is not None:
            log.warning(self._event, reason=reason, client=client, more=num_left_out, **facts)
