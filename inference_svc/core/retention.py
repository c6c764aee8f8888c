"""For how long clients want KV to be kept. Pure; kvd decides what comes of it."""

from dataclasses import dataclass

MAX_RETENTION_S = 365 * 86400.0


@dataclass(frozen=True)
class Retention:
    """For how long a client wants KV to be kept at least, in seconds after each use; 0: no wish.

    Attributes:
        session_s: all of the turn's session.
        prefix_s: the tools and the system message that it begins with, for other sessions, too.
    """

    session_s: float = 0.0
    prefix_s: float = 0.0


NO_RETENTION = Retention()
