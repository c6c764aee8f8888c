"""Errors of the daemon and the CLI; those of the core are in kvd/core/records/errors.py."""

from shared.types.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
    StateError,
    UnavailableError,
)


class NotAttachedError(StateError):
    """No engine with the id of a call is attached, or not any more."""

    reason = "not_attached"
    retryable = True


class StreamReplacedError(ConflictError):
    """The engine has opened another stream of this kind, which replaces this one."""

    reason = "stream_replaced"
    retryable = False


class SocketDeniedError(DeniedError):
    """The user of a command may not open the socket that it needs."""

    reason = "socket_denied"


class AttachDeniedError(DeniedError):
    """The attach token is unknown or used, its connection is closed, or its user is refused."""

    reason = "attach_denied"


class StoppingError(UnavailableError):
    """kvd is about to stop and grants nothing new."""

    reason = "stopping"


class LimitReachedError(ExhaustedError):
    """A bound of section [limits] is reached."""

    reason = "limit_reached"


class AmbiguousSessionError(StateError):
    """Several sessions have this id under different models."""

    reason = "ambiguous_session"


class RunningError(ConfigError):
    """Another kvd uses the directory."""

    reason = "already_running"


class UnusableDirectoryError(ConfigError):
    """The runtime or state directory cannot be used."""

    reason = "unusable_directory"


class UnusableSocketError(ConfigError):
    """kvd cannot listen on a socket."""

    reason = "unusable_socket"


class InstallError(ConfigError):
    """systemd units cannot be installed."""

    reason = "not_installed"


class NotHeldError(StateError):
    """The tail of a session was sent, but kvd does not have the blocks before it."""

    reason = "not_held"


class NoHolderError(NotFoundError):
    """The process that is to be killed holds no lease."""

    reason = "no_holder"


class NotOursToKillError(DeniedError):
    """The process belongs to a user to whose processes kvd may not send signals."""

    reason = "not_ours_to_kill"


class UnknownModelError(NotFoundError):
    """No session of the named model is stored."""

    reason = "unknown_model"


class VerifyRunningError(ExhaustedError):
    """Only one verification runs at a time."""

    reason = "verify_running"


class CorruptionFoundError(ReportedError):
    """`kvd verify` found corrupt copies that were not repaired."""

    reason = "corruption_found"


class UnverifiedError(ReportedError):
    """`kvd verify` could not check all copies."""

    reason = "unverified"


class NotRunningError(UnavailableError):
    """A command found no running kvd."""

    reason = "not_running"


class NotFollowedError(UnavailableError):
    """No follower runs beside a kvd."""

    reason = "not_followed"


class UnclearSelectionError(InvalidInputError):
    """A command line does not say clearly what to do."""

    reason = "unclear"


class NotConfirmedError(InvalidInputError):
    """A command that destroys data was not confirmed."""

    reason = "not_confirmed"


class NoTerminalError(InvalidInputError):
    """A command that needs a terminal has none."""

    reason = "no_terminal"


class InUseError(ConflictError):
    """An engine holds a lease of the session."""

    reason = "in_use"


class SessionExistsError(StateError):
    """A session with this key is stored, and may not be replaced."""

    reason = "session_exists"


class UnknownLayoutError(StateError):
    """A session file, or a call, names a layout that kvd does not have."""

    reason = "unknown_layout"


class LayoutUnavailableError(UnavailableError):
    """A stored layout cannot be opened now; no new one is created in its place."""

    reason = "layout_unavailable"


class NotSetAsideError(StateError):
    """The files of a layout could not be renamed."""

    reason = "not_set_aside"


class NoRoomError(ExhaustedError):
    """A session does not fit; a second attempt would not help."""

    reason = "no_room"
    retryable = False


class BusyTransferError(ExhaustedError):
    """An export waits for blocks, or an import for slots, for too long."""

    reason = "busy"


class StalledTransferError(DeadlineError):
    """The sender of a session file is silent for too long."""

    reason = "stalled"
    retryable = False


class BrokenTransferError(UnavailableError):
    """The stream of a session file ended before the end of the file."""

    reason = "broken_off"


class UnusableFileError(InvalidInputError):
    """A file that a command must read or write cannot be used."""

    reason = "unusable_file"


class NotAllMovedError(ReportedError):
    """Some of the sessions to be pushed or pulled were not."""

    reason = "not_all_moved"


class NotDurableError(UnavailableError):
    """A change is in effect, but not committed to the index yet: a restart would undo it."""

    reason = "not_durable"


class BrokenError(Exception):
    """An invariant of the core is broken. The daemon stops at once; its supervisor restarts it."""
