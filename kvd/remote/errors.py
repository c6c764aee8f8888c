"""Errors of the sessions in an object store."""

from shared.types.errors import ConflictError, NotFoundError, StateError


class FencedError(ConflictError):
    """Another server owns the session now: what this one still has of it is not stored."""

    reason = "fenced"
    retryable = False


class NotPushedError(NotFoundError):
    """A remote store has no such session."""

    reason = "not_pushed"


class SeveralPushedError(StateError):
    """A remote store has sessions of this id of several models."""

    reason = "several_pushed"


class DamagedRemoteError(StateError):
    """What lies in a remote store is not what was put there."""

    reason = "damaged_remote"


class SlowPushError(StateError):
    """A push took so long that a sweep may have removed what it has found there."""

    reason = "slow_push"


class SweepRunningError(ConflictError):
    """Another sweep of the store runs."""

    reason = "sweep_running"
