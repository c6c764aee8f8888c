"""What is known again of earlier requests. Pure: values."""

from dataclasses import dataclass

from inference_svc.openai.response_objects import ResponseFacts


@dataclass(frozen=True)
class Point:
    """Where a history ends.

    Attributes:
        turns: of the session, that are complete there.
        request_id: of the last of them: a name may be another session's by now.
        is_named: a client gave the session its name: others do not go on with it.
    """

    session_id: str
    turns: int
    request_id: str
    is_named: bool


@dataclass(frozen=True)
class KnownResponse:
    """A response.

    Attributes:
        at: where its turn ended.
        history: digest of all messages up to its answer; None if it is not known.
    """

    at: Point
    history: bytes | None
    facts: ResponseFacts


@dataclass(frozen=True)
class KnownRequest:
    """Where a request went that may be repeated.

    Attributes:
        body: digest of its body: a repeat has the same.
        turns: of the session, that were complete.
        first: of its messages, that was new.
        history: digest of what precedes that one; None if it is not known.
    """

    body: bytes
    session_id: str
    turns: int
    first: int
    history: bytes | None
    is_named: bool
