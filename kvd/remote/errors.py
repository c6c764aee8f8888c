"""Errors of pushing, pulling and sweeping sessions in a remote store."""

from shared.types.errors import ConflictError, NotFoundError, StateError


class FencedError(ConflictError):
    """Another server owns the session in the store now; this server's version is not stored."""

    reason = "fenced"
    retryable = False


class NotPushedError(NotFoundError):
    """The remote store has no such session."""

    reason = "not_pushed"


class SeveralPushedError(StateError):
    """The remote store has sessions of this id for several models."""

    reason = "several_pushed"


class DamagedRemoteError(StateError):
    """Bytes in the remote store are not those that were put there."""

    reason = "damaged_remote"


class SlowPushError(StateError):
    """A push took so long that a sweep may have removed chunks that it found in the store."""

    reason = "slow_push"


class SweepRunningError(ConflictError):
    """Another sweep of the store runs."""

    reason = "sweep_running"
