"""What is stored of earlier requests, and where a turn goes by that. Pure: values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_svc.core.chat import ChoiceKind, Tool, ToolUse
from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import Finished

CONVERSATION = "conv_"  # what ids of conversations begin with, and names of their sessions

# How a response stands that has no answer.
QUEUED, IN_PROGRESS, FAILED, CANCELLED = "queued", "in_progress", "failed", "cancelled"


@dataclass(frozen=True)
class Point:
    """Where a history ends.

    Attributes:
        session_id: the session that has it.
        turns: number of complete turns of the session up to there.
        request_id: request id of the last of them: a name may be another session's by now.
        is_named: whether a client gave the session its name: then others do not continue it.
    """

    session_id: str
    turns: int
    request_id: str
    is_named: bool

    def is_in(self, transcript: Transcript) -> bool:
        """Whether a session still has the turn: one of the same name may have been made since."""
        turns = transcript.turns
        return 0 < self.turns <= len(turns) and turns[self.turns - 1].request_id == self.request_id


@dataclass(frozen=True)
class ResponseInfo:
    """The members of a response beside its answer, which its turn's record does not have.

    Attributes:
        created_s: Unix time in seconds.
        model: the model's name as the client wrote it.
        instructions: the beginning of the client's instructions.
        instructions_digest: digest of all of them.
        truncation: "auto" or "disabled".
        text_format: what the answer had to be, as the client wrote it.
        tools: those that were offered, as a response shows them; of long ones nothing but names.
        tool_choice: whether they were to be called, as a response shows it.
        input_bytes: size of the input, kept or not; 0: an earlier release did not count it.
        effort: how much the model was to think; None: the client did not say.
        conversation_id: the conversation that it is a turn of; "": it is of none.
        is_background: whether it was computed while nobody waited.
        call_ids: ids of the calls in its answer, if another server has made these.
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
        """Whether the answer could be any text."""
        return self.text_format.get("type") == "text"

    @property
    def tool_use(self) -> ToolUse:
        """What the answer could do with tools: their names are enough to read it."""
        tools = tuple(
            Tool(prefix + tool["name"]) for prefix, found in self._listed() for tool in found
        )
        most_calls = None if self.parallel_tool_calls else 1
        if isinstance(self.tool_choice, str):
            return ToolUse(tools, ChoiceKind(self.tool_choice), "", most_calls)
        return ToolUse(tools, ChoiceKind.REQUIRED, self.tool_choice["name"], most_calls)

    def call_id_by(self, made_here: Callable[[int], str]) -> Callable[[int], str]:
        """Return what has the id of a call by its index, given what makes those of this server."""
        ids = dict(enumerate(self.call_ids))
        return lambda index: ids.get(index) or made_here(index)

    def split_name(self, name: str) -> tuple[str, str]:
        """Return the namespace that a tool is of, "" if it is of none, and its name there."""
        for prefix, _ in self._listed():
            if prefix and name.startswith(prefix):
                return prefix[:-1], name[len(prefix) :]
        return "", name

    def _listed(self) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
        """Yield tools with what stands before their names."""
        for tool in self.tools:
            yield (tool["name"] + ".", tool["tools"]) if "tools" in tool else ("", [tool])


@dataclass(frozen=True)
class StoredResponse:
    """A stored response.

    Attributes:
        at: where its turn ended.
        history: digest of all messages up to its answer; None if it is unknown.
        info: its members beside its answer.
    """

    at: Point
    history: bytes | None
    info: ResponseInfo


@dataclass(frozen=True)
class UnansweredResponse:
    """A response in the background that has no answer.

    Attributes:
        info: its members.
        state: "queued": it runs, or the service was killed meanwhile; "failed", "cancelled".
        code: of the error that it failed with.
        message: likewise.
    """

    info: ResponseInfo
    state: str = QUEUED
    code: str = ""
    message: str = ""


@dataclass(frozen=True)
class Route:
    """Where a turn goes.

    Attributes:
        session_id: the session that it goes to; "" for a new one.
        turns: number of the session's turns that precede this one.
        first: index of the first message that is new.
        history: digest of the messages before that one; None if it is unknown.
        is_named: whether the client named the session.
        may_append: whether the turn may be appended to the session; else it is for a fork of it.
        name: name of the fork, or of a new session; "": one is made up.
        resembles: what the new messages were likely meant to go on with; None: they have no answer.
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
    """A conversation, but for its items.

    Attributes:
        conversation_id: its id, which is the name of its first session, too.
        created_s: Unix time in seconds.
        metadata: the client's own notes.
        instructions: that lead it.
        session_id: the session of its turns.
        turns: number of the session's first turns that are the conversation's.
        request_id: request id of the last of these; "" if there are none.
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
        before: the conversation as the turn found it.
        at: where it goes on; None: everything is read anew.
        instructions: that lead the conversation from now on.
        brought: the items of the input.
        answered: makes the items of the answer.
        release: lets others change the conversation.
    """

    before: Conversation
    at: Point | None
    instructions: str
    brought: Sequence[Mapping[str, Any]]
    answered: Callable[[Finished], Sequence[Mapping[str, Any]]]
    release: Callable[[], None]


@dataclass(frozen=True)
class StoredRequest:
    """A request that may be repeated.

    Attributes:
        body: digest of its body: a repeat has the same.
        route: the route that it took.
    """

    body: bytes
    route: Route
