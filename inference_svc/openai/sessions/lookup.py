"""What is known again of earlier requests, and where a turn goes with it. Pure: values."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Point:
    """Where a history ends.

    Attributes:
        turns: complete turns of the session up to there.
        request_id: of the last of them: a name may be another session's by now.
        is_named: a client gave the session its name: others do not go on with it.
    """

    session_id: str
    turns: int
    request_id: str
    is_named: bool


@dataclass(frozen=True)
class ResponseInfo:
    """What a response says beside its answer, all of which its turn's record does not have.

    Attributes:
        created_s: seconds of the epoch.
        model: as the client named it.
        instructions: the beginning of the client's instructions.
        instructions_digest: digest of all of them.
        truncation: "auto" or "disabled".
    """

    created_s: float
    model: str
    instructions: str = ""
    instructions_digest: str = ""
    previous_id: str = ""
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    truncation: str = "auto"
    is_kept: bool = True
    top_logprobs: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownResponse:
    """A response that is known again.

    Attributes:
        at: where its turn ended.
        history: digest of all messages up to its answer; None if it is not known.
    """

    at: Point
    history: bytes | None
    info: ResponseInfo


@dataclass(frozen=True)
class Route:
    """Where a turn goes.

    Attributes:
        session_id: "" for a new session.
        turns: turns of the session that precede this one.
        first: index of the first message that is new.
        history: digest of what precedes that one; None if nobody knows.
        is_named: the client named the session.
        goes_on: the turn may be appended to the session; else it is for a fork of it.
        name: that the fork gets; "": one is made up.
    """

    session_id: str
    turns: int
    first: int
    history: bytes | None
    is_named: bool = False
    goes_on: bool = True
    name: str = ""


@dataclass(frozen=True)
class KnownRequest:
    """A request that may be repeated.

    Attributes:
        body: digest of its body: a repeat has the same.
        route: where it went.
    """

    body: bytes
    route: Route
