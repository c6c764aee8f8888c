"""What a client sees of a turn, in order: accepted, started, tokens…, finished. Pure."""

from dataclasses import dataclass
from typing import TypeAlias

from inference_svc.core.stopping import AnswerToken
from inference_svc.core.turn_record import Usage


@dataclass(frozen=True)
class Accepted:
    """The turn is valid and queued.

    Attributes:
        is_replayed: the recorded result of an earlier, equal request follows.
    """

    session_id: str
    turn: int
    request_id: str
    queue_length: int
    is_replayed: bool


@dataclass(frozen=True)
class Started:
    """The history is loaded as far as it was stored."""

    history_tokens: int
    reused_tokens: int
    queue_s: float


@dataclass(frozen=True)
class Tokens:
    """The answer's next tokens."""

    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True)
class Finished:
    """The last event.

    Attributes:
        turns: complete turns of the session now.
    """

    finish_reason: str
    text: str
    usage: Usage
    turns: int


TurnEvent: TypeAlias = Accepted | Started | Tokens | Finished
