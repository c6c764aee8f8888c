"""Errors of kvd that reach a caller; the tree's upper half is in shared/types/errors.py. Pure."""

from shared.types.errors import (
    ConflictError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    StateError,
)


class UnknownSessionError(NotFoundError):
    """No session of this key is stored."""

    reason = "unknown_session"


class LeaseLostError(ConflictError):
    """The lease is not the caller's (any more): nothing it covered may be trusted or touched."""

    reason = "lease_lost"
    retryable = False


class TooManyLeasesError(ExhaustedError):
    """The bound on leases is reached."""

    reason = "too_many_leases"


class InvalidRequestError(InvalidInputError):
    """Token ids, positions, ranges or a page token that cannot be."""

    reason = "invalid_request"


class SessionChangedError(ConflictError):
    """A session became another one while it was exported, or grew by an import."""

    reason = "session_changed"


class UnknownLineageError(StateError):
    """What a session's KV was computed after is not known, so nobody else could use it."""

    reason = "unknown_lineage"


class ErasingError(ConflictError):
    """The tenant is being erased just now."""

    reason = "erasing"


class ScrubError(ConflictError):
    """A scrub is under way already, or the one named is over."""

    reason = "scrub"
    retryable = False
