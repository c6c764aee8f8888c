"""The newest queue snapshot of each engine: which sessions wait for their turn.

Pure. Here a queued session neither expires nor is a preferred victim; look-ahead policies read the
order.
"""

from collections.abc import Sequence

from kvd.core.records import QueuedJob
from shared.session_key import SessionKey


class QueueWindow:
    """Ordered jobs per engine, and how often each session is queued."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[QueuedJob, ...]] = {}
        self._counts: dict[SessionKey, int] = {}

    def replace(self, owner: int, jobs: Sequence[QueuedJob]) -> None:
        """Take a full snapshot of an engine's queue; an empty one forgets the engine."""
        for job in self._jobs.pop(owner, ()):
            self._counts[job.key] -= 1
            if not self._counts[job.key]:
                del self._counts[job.key]
        if jobs:
            self._jobs[owner] = tuple(jobs)
        for job in jobs:
            self._counts[job.key] = self._counts.get(job.key, 0) + 1

    def is_queued(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits at any engine."""
        return key in self._counts

    def jobs(self, owner: int) -> tuple[QueuedJob, ...]:
        """An engine's queue, next first."""
        return self._jobs.get(owner, ())
