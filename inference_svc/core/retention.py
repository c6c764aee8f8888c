"""Retention: for how long a client wants KV to be kept. Pure; kvd decides how to honour it."""

from dataclasses import dataclass

MAX_RETENTION_S = 365 * 86400.0


@dataclass(frozen=True)
class Retention:
    """For how long a client wants KV to be kept at least, in seconds after each use; 0: no wish.

    Attributes:
        session_s: for all KV of the turn's session.
        prefix_s: for the tools and the system message that it begins with, also for other sessions.
    """

    session_s: float = 0.0
    prefix_s: float = 0.0


NO_RETENTION = Retention()
