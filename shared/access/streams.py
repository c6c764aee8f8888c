"""How many streams each client holds. Pure."""

from collections import Counter

from shared.access.identity import Identity
from shared.types.errors import ExhaustedError

RETRY_S = 1.0


class TooManyStreamsError(ExhaustedError):
    """A client holds as many streams as it may."""

    reason = "too_many_streams"


class StreamCounts:
    """Streams held now, by client.

    Args:
        most: of each client that has no bound of its own; a reload may change it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()

    def hold(self, identity: Identity) -> None:
        """Count one more; the caller owes a release.

        Raises:
            TooManyStreamsError: it would be one too many.
        """
        most = identity.max_streams or self.most
        if self._held[identity.name] >= most:
            raise TooManyStreamsError(
                f"{identity.name} holds {most} streams",
                "end one, or raise its max_streams",
                retry_after_s=RETRY_S,
            )
        self._held[identity.name] += 1

    def release(self, identity: Identity) -> None:
        """Count one less."""
        self._held[identity.name] -= 1
        if not self._held[identity.name]:
            del self._held[identity.name]
