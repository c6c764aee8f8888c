"""ToldQueue: whether what a stream tells of a queue follows from what it has told before. Pure.

    all of the queue ─► known
    a change of what was taken last ─► known, if its digest is that of the result
    any other change ─► all of the queue is asked for

*Source:* as snapshots and increments of DNS zones (IXFR, RFC 1995), with a digest besides.
"""

from collections.abc import Callable

from kvd.core.records.errors import InvalidRequestError
from shared.types.queue_change import QueueUpdate


class ToldQueue:
    """One stream's.

    Args:
        apply: applies an update; returns the digest of the queue after it.
    """

    def __init__(self, apply: Callable[[QueueUpdate], int]) -> None:
        self._apply = apply
        self._sequence = 0  # of the newest update
        self._taken = 0  # of the update up to which the queue is known; 0: it is not

    def take(self, update: QueueUpdate) -> bool:
        """Apply an update; False if all of the queue must be told.

        Raises:
            InvalidRequestError: it is out of order, or contradicts itself.
        """
        if update.sequence <= self._sequence:
            raise InvalidRequestError(
                f"queue snapshot {update.sequence} after {self._sequence}",
                "number the snapshots of a stream upwards from 1",
            )
        self._sequence = update.sequence
        if update.base_sequence and update.base_sequence != self._taken:
            self._taken = 0
            return False
        is_right = self._apply(update) == update.digest
        if not is_right and not update.base_sequence:
            raise InvalidRequestError(
                "a queue whose digest is another", "check that both run the same release"
            )
        self._taken = update.sequence if is_right else 0
        return is_right
