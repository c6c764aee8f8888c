"""Values of routing: what is stored of earlier requests, and the route of a turn. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_svc.core.chat import ChoiceKind, Tool, ToolUse
from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import Finished

CONVERSATION = "conv_"  # prefix of the ids of conversations, and of their sessions' names

# The states of a response that has no answer.
QUEUED, IN_PROGRESS, FAILED, CANCELLED = "queued", "in_progress", "failed", "cancelled"


@dataclass(frozen=True)
class Point:
    """The end of a history: a position in a session.

    Attributes:
        session_id: the session with the history.
        turns: number of complete turns of the session up to the point.
        request_id: request id of the last of these turns, which proves that the session is still
            the same one: its name may have been used again.
        is_named: whether a client named the session; other clients then do not continue it.
    """

    session_id: str
    turns: int
    request_id: str
    is_named: bool

    def is_in(self, transcript: Transcript) -> bool:
        """Return whether a session still has the point's last turn; see `request_id`."""
        turns = transcript.turns
        return 0 < self.turns <= len(turns) and turns[self.turns - 1].request_id == self.request_id


@dataclass(frozen=True)
class ResponseInfo:
    """The members of a response beside its answer, which its turn's record does not have.

    Attributes:
        created_s: Unix time in seconds.
        model: the model's name as the client wrote it.
        instructions: the beginning of the client's instructions.
        instructions_digest: digest of the whole instructions.
        truncation: "auto" or "disabled".
        is_kept: whether the client asked for the response to be stored.
        text_format: the format that the answer had to have, as the client wrote it.
        tools: the offered tools, as a response shows them; long ones by their names only.
        tool_choice: whether tools had to be called, as a response shows it.
        input_bytes: size of the input, stored or not; 0: an earlier release did not count it.
        effort: reasoning effort; None if the client gave none.
        conversation_id: the conversation of the turn; "" if it has none.
        is_background: whether it was a background response.
        call_ids: ids of the calls in the answer, if another server made them.
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
    text_format: Mapping[str, Any] = field(default_factory=lambda: {"type": "text"})
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    tool_choice: str | Mapping[str, str] = "auto"
    parallel_tool_calls: bool = True
    input_bytes: int = 0
    effort: str | None = None
    conversation_id: str = ""
    is_background: bool = False
    call_ids: Sequence[str] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Whether the answer's format was free: any text."""
        return self.text_format.get("type") == "text"

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the answer could call; to read an answer their names are enough."""
        tools = tuple(
            Tool(prefix + tool["name"])
            for prefix, found in self._prefixed_tools()
            for tool in found
        )
        most_calls = None if self.parallel_tool_calls else 1
        if isinstance(self.tool_choice, str):
            return ToolUse(tools, ChoiceKind(self.tool_choice), "", most_calls)
        return ToolUse(tools, ChoiceKind.REQUIRED, self.tool_choice["name"], most_calls)

    def call_id_by(self, made_here: Callable[[int], str]) -> Callable[[int], str]:
        """Return a function from a call's index to its id.

        Args:
            made_here: makes the id of a call of this server's own answers, by its index.
        """
        ids = dict(enumerate(self.call_ids))
        return lambda index: ids.get(index) or made_here(index)

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tool's full name into its namespace ("" if it has none) and its name there."""
        for prefix, _ in self._prefixed_tools():
            if prefix and name.startswith(prefix):
                return prefix[:-1], name[len(prefix) :]
        return "", name

    def _prefixed_tools(self) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
        """Yield tools with the prefix of their names: a namespace and a dot, or ""."""
        for tool in self.tools:
            yield (tool["name"] + ".", tool["tools"]) if "tools" in tool else ("", [tool])


@dataclass(frozen=True)
class StoredResponse:
    """A stored response.

    Attributes:
        at: the end of its turn.
        history: digest of all messages, the answer included; None if it is unknown.
        info: its members beside its answer.
    """

    at: Point
    history: bytes | None
    info: ResponseInfo


@dataclass(frozen=True)
class UnansweredResponse:
    """A background response that has no answer.

    Attributes:
        info: its members.
        state: "queued" (it runs, or the service was killed before its end), "failed" or
            "cancelled".
        code: reason slug of the error that it failed with; "" if there is none.
        message: message of that error.
    """

    info: ResponseInfo
    state: str = QUEUED
    code: str = ""
    message: str = ""


@dataclass(frozen=True)
class Route:
    """The session that a turn goes to, and which of its messages are new.

    Attributes:
        session_id: the session; "" for a new one.
        turns: number of the session's turns that precede this one.
        first: index of the first new message.
        history: digest of the messages before `first`; None if it is unknown.
        is_named: whether the client named the session.
        may_append: whether the turn may be appended to the session; else it goes to a fork.
        name: name of the fork, or of a new session; "": a new id.
        resembles: the session that the client probably meant to continue; None if no new message
            is an answer.
    """

    session_id: str
    turns: int
    first: int
    history: bytes | None
    is_named: bool = False
    may_append: bool = True
    name: str = ""
    resembles: Resembled | None = None


@dataclass(frozen=True)
class Conversation:
    """A conversation without its items.

    Attributes:
        conversation_id: its id, which is also the name of its first session.
        created_s: Unix time in seconds.
        metadata: the client's own notes.
        instructions: the instructions at its head.
        session_id: the session of its turns.
        turns: number of the session's first turns that belong to the conversation.
        request_id: request id of the last of these turns; "" if there are none.
    """

    conversation_id: str
    created_s: float
    metadata: Mapping[str, str]
    instructions: str = ""
    session_id: str = ""
    turns: int = 0
    request_id: str = ""


@dataclass(frozen=True)
class ConversationTurn:
    """What a turn does to its conversation.

    Attributes:
        before: the conversation as it was when the turn arrived.
        at: the point that the turn follows; None: the turn reads all items again.
        instructions: the conversation's instructions from now on.
        input_items: the items of the input.
        make_answer_items: makes the items of the answer.
        release: releases the conversation, so that other requests may change it.
    """

    before: Conversation
    at: Point | None
    instructions: str
    input_items: Sequence[Mapping[str, Any]]
    make_answer_items: Callable[[Finished], Sequence[Mapping[str, Any]]]
    release: Callable[[], None]


@dataclass(frozen=True)
class StoredRequest:
    """A request that may be repeated.

    Attributes:
        body: digest of its body; a repeat has the same.
        route: its route.
    """

    body: bytes
    route: Route
