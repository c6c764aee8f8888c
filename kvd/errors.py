"""Errors of the daemon around the core; those of the core are in kvd/core/records/errors.py."""

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
    """The engine id of a call is not attached (any more)."""

    reason = "not_attached"
    retryable = True


class StreamReplacedError(ConflictError):
    """The engine has opened another stream of this kind, which counts instead."""

    reason = "stream_replaced"
    retryable = False


class SocketDeniedError(DeniedError):
    """This user may not open a socket, or not the one that the command needs."""

    reason = "socket_denied"


class AttachDeniedError(DeniedError):
    """The attach token is unknown, used, or its connection is closed."""

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
    """A socket cannot be listened on."""

    reason = "unusable_socket"


class InstallError(ConfigError):
    """Units cannot be put in place."""

    reason = "not_installed"


class NotHeldError(StateError):
    """A session's tail was sent, and kvd does not have what comes before it."""

    reason = "not_held"


class NoHolderError(NotFoundError):
    """The process holds no lease, so it is none of kvd's business."""

    reason = "no_holder"


class NotOursToKillError(DeniedError):
    """The process belongs to a user that kvd may not send signals to."""

    reason = "not_ours_to_kill"


class UnknownModelError(NotFoundError):
    """Nothing is stored of the model that was named."""

    reason = "unknown_model"


class VerifyRunningError(ExhaustedError):
    """Only one verification runs at a time."""

    reason = "verify_running"


class CorruptionFoundError(ReportedError):
    """`kvd verify` found bytes that are not the ones stored, and they are not replaced."""

    reason = "corruption_found"


class UnverifiedError(ReportedError):
    """`kvd verify` could not check everything."""

    reason = "unverified"


class NotRunningError(UnavailableError):
    """A command found no daemon to talk to."""

    reason = "not_running"


class NotFollowedError(UnavailableError):
    """No follower of a kvd runs."""

    reason = "not_followed"


class UnclearSelectionError(InvalidInputError):
    """A command line that does not say what to do."""

    reason = "unclear"


class NotConfirmedError(InvalidInputError):
    """A command that destroys much was not confirmed."""

    reason = "not_confirmed"


class NoTerminalError(InvalidInputError):
    """A command that lives on a terminal was given none."""

    reason = "no_terminal"


class InUseError(ConflictError):
    """The session is leased by an engine right now."""

    reason = "in_use"


class SessionExistsError(StateError):
    """A session of this key is stored, and was not to be replaced."""

    reason = "session_exists"


class UnknownLayoutError(StateError):
    """A session file, or a call, names a layout that kvd does not have."""

    reason = "unknown_layout"


class LayoutUnavailableError(UnavailableError):
    """What is stored of a layout cannot be opened now; nothing is made in its place."""

    reason = "layout_unavailable"


class NotSetAsideError(StateError):
    """The files of a layout could not be renamed."""

    reason = "not_set_aside"


class NoRoomError(ExhaustedError):
    """A session does not fit, be it tried again."""

    reason = "no_room"
    retryable = False


class BusyTransferError(ExhaustedError):
    """Blocks to export do not come, or no slot to import into."""

    reason = "busy"


class StalledTransferError(DeadlineError):
    """Whoever sends a session file has fallen silent."""

    reason = "stalled"
    retryable = False


class BrokenTransferError(UnavailableError):
    """The stream of a session file has ended before the file."""

    reason = "broken_off"


class UnusableFileError(InvalidInputError):
    """A file that a command is to read or write cannot be used."""

    reason = "unusable_file"


class NotAllMovedError(ReportedError):
    """Some of the sessions that were to be pushed or pulled were not."""

    reason = "not_all_moved"


class NotDurableError(UnavailableError):
    """A change is in effect, but the index has not taken it yet: a restart would undo it."""

    reason = "not_durable"


class BrokenError(Exception):
    """An invariant of the core broke. The daemon stops at once; its supervisor starts it anew."""
