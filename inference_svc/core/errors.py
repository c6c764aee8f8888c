"""The inference service's errors, each a class of `shared.types.errors` with its `reason` slug.

InvalidInputError   invalid_sampling, input_too_long, empty_turn, invalid_input, invalid_discard,
                    invalid_compression, request_id_reused
NotFoundError       unknown_session, unknown_turn
ConflictError       session_busy, session_moved, cancelled
StateError          turn_mismatch, no_chat_template, session_ended, session_exists
ExhaustedError      queue_full, rate_limited, too_many_turns, too_many_sessions,
                    transcript_disk_full
DeadlineError       deadline_exceeded
UnavailableError    draining, transcript_unavailable
ReportedError       engine_failed
ConfigError         unknown_model, unsupported_model, no_room_for_kv, transcripts_unusable,
                    socket_unusable
"""

from shared.types.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
    StateError,
    UnavailableError,
)


class InvalidSamplingError(InvalidInputError):
    """Sampling values out of range; the message lists all of them."""

    reason = "invalid_sampling"


class InvalidGrammarError(InvalidInputError):
    """A grammar for the answer is invalid, or the model supports none."""

    reason = "invalid_grammar"


class InputTooLongError(InvalidInputError):
    """History, new tokens and the answer do not fit the context window."""

    reason = "input_too_long"


class EmptyTurnError(InvalidInputError):
    """The turn has no token."""

    reason = "empty_turn"


class EmbeddingsUnsupportedError(InvalidInputError):
    """The model does not support embeddings."""

    reason = "embeddings_unsupported"


class InvalidTurnError(InvalidInputError):
    """A value of the turn is invalid: a token id or a priority out of range, an unknown role."""

    reason = "invalid_input"


class InvalidDiscardError(InvalidInputError):
    """A range of tokens to be dropped is empty or outside the session's context."""

    reason = "invalid_discard"


class InvalidCompressionError(InvalidInputError):
    """There is no such compression policy, or this model does not support it."""

    reason = "invalid_compression"


class RequestIdReusedError(InvalidInputError):
    """A request id was used again with another input."""

    reason = "request_id_reused"


class UnknownSessionError(NotFoundError):
    """No such session under this tenant and model."""

    reason = "unknown_session"


class UnknownTurnError(NotFoundError):
    """The session has no such turn, or no turn of that request id is under way."""

    reason = "unknown_turn"


class SessionBusyError(ConflictError):
    """A turn of this session already runs or waits."""

    reason = "session_busy"


class SessionMovedError(ConflictError):
    """Another server has continued the session while this one worked on a turn of it."""

    reason = "session_moved"


class TurnCancelledError(ConflictError):
    """The turn was stopped before it was accepted."""

    reason = "cancelled"


class TurnMismatchError(StateError):
    """The session has another number of turns than the client expects."""

    reason = "turn_mismatch"


class NoChatTemplateError(StateError):
    """Chat messages or text were sent to a model that has no template or tokenizer for them."""

    reason = "no_chat_template"


class SessionEndedError(StateError):
    """The session was ended by a final turn."""

    reason = "session_ended"


class SessionExistsError(StateError):
    """A fork would overwrite a session."""

    reason = "session_exists"


class QueueFullError(ExhaustedError):
    """A bounded queue is full.

    Args:
        queue_length: number of turns under way, or of those that wait.
        retry_after_s: seconds until a place will likely be free.
    """

    reason = "queue_full"

    def __init__(
        self,
        message: str,
        remedy: str,
        *,
        queue_length: int,
        retry_after_s: float,
    ) -> None:
        details = {"queue_length": str(queue_length)}
        super().__init__(message, remedy, details=details, retry_after_s=retry_after_s)


class RateLimitedError(ExhaustedError):
    """A tenant has used up its turns or tokens of the last minute."""

    reason = "rate_limited"


class TooManyTurnsError(ExhaustedError):
    """A tenant has as many turns under way as it may."""

    reason = "too_many_turns"


class TooManySessionsError(ExhaustedError):
    """A tenant keeps as many sessions as it may; waiting does not help."""

    reason = "too_many_sessions"
    retryable = False


class TranscriptDiskFullError(ExhaustedError):
    """The disk has no room for the turn's record; the session is unchanged."""

    reason = "transcript_disk_full"


class TranscriptUnavailableError(UnavailableError):
    """The transcript cannot be read or written at the moment; the turn was not recorded."""

    reason = "transcript_unavailable"


class DeadlineExceededError(DeadlineError):
    """The turn's deadline, or those of all RPCs that followed it, passed before it was complete."""

    reason = "deadline_exceeded"


class DrainingError(UnavailableError):
    """The service is about to stop; a turn that it hands back has not changed its session."""

    reason = "draining"


def draining() -> DrainingError:
    """Make the error of a turn that arrives while the service stops."""
    return DrainingError("the service is about to stop", "submit again in a moment")


class EngineFailedError(ReportedError):
    """The model raised an error while computing this turn; the session is unchanged."""

    reason = "engine_failed"
    retryable = True
    grpc_code = "INTERNAL"
    exit_code = 70


class UnknownModelError(ConfigError):
    """The model directory does not exist or contains no model."""

    reason = "unknown_model"


class UnsupportedModelError(ConfigError):
    """The model cannot be served; the message says why."""

    reason = "unsupported_model"


class KvRoomError(ConfigError):
    """The memory has no room for the KV that is configured, or for that of a single turn."""

    reason = "no_room_for_kv"


class TranscriptError(ConfigError):
    """The transcript directory cannot be used."""

    reason = "transcripts_unusable"


class ListenError(ConfigError):
    """The listening address cannot be used."""

    reason = "socket_unusable"
