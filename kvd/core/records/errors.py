"""Errors of kvd that reach a caller; the upper half of the tree is in shared/types/errors.py."""

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
    """The caller does not hold the lease (any more), and must not use anything it covered."""

    reason = "lease_lost"
    retryable = False


class TooManyLeasesError(ExhaustedError):
    """The limit on leases is reached."""

    reason = "too_many_leases"


class InvalidRequestError(InvalidInputError):
    """Token ids, positions, ranges or a page token are invalid."""

    reason = "invalid_request"


class SessionChangedError(ConflictError):
    """A session changed while it was exported, or grew by an import."""

    reason = "session_changed"


class UnknownLineageError(StateError):
    """It is unknown after which tokens a session's KV was computed, so no other kvd can use it."""

    reason = "unknown_lineage"


class ErasingError(ConflictError):
    """The tenant is being erased at the moment."""

    reason = "erasing"


class ScrubError(ConflictError):
    """A scrub is under way already, or the named one is over."""

    reason = "scrub"
    retryable = False
