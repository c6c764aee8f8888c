"""A turn that has come to a server, and whose it is. Pure."""

from dataclasses import dataclass

from kvd.plan.outcome import TurnRecord
from kvd.plan.trace import Turn
from shared.types.session_key import SessionKey

Returns = dict[SessionKey, int]  # when what is kept of a session is wanted next, in ns


def plan_key(session: int) -> SessionKey:
    """Return the key of a session, which is a number in plans."""
    return SessionKey("plan", "plan", str(session))


@dataclass(slots=True)
class Request:
    """A turn that waits or runs.

    Attributes:
        number: turns are counted in the order in which they arrive.
    """

    session: int
    key: SessionKey
    number: int
    turn: Turn
    record: TurnRecord
    hbm_bytes: int
