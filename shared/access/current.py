"""The identity of the running call: set by the interceptor or the HTTP middleware."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shared.access.identity import Identity

_CURRENT: ContextVar[Identity] = ContextVar("identity")


def current_identity() -> Identity:
    """Who calls.

    Raises:
        LookupError: this is no call that was authenticated, which no server of ours has.
    """
    return _CURRENT.get()


def act_as(identity: Identity) -> None:
    """Set it for the rest of this task, which is the call's own."""
    _CURRENT.set(identity)


@contextmanager
def acting_as(identity: Identity) -> Iterator[None]:
    """Set it for a while."""
    token = _CURRENT.set(identity)
    try:
        yield
    finally:
        _CURRENT.reset(token)
