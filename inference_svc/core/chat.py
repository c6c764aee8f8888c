"""What is said in a chat: messages, the tools that are offered in it, and calls of them. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inference_svc.core.json_stream import closed

ASSISTANT = "assistant"
SYSTEM = "system"
USER = "user"
TOOL = "tool"


@dataclass(frozen=True)
class Tool:
    """A function that the client would run for the model.

    Attributes:
        parameters: JSON schema of its arguments.
        is_strict: whether a call that the answer has to make keeps to all of the schema, or is
            refused; else to what grammars know of it.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments, which are an object, whatever the client left out."""
        return {"type": "object", "properties": {}, **self.parameters}

    def as_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        said = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": said}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, which an answer asks for.

    Attributes:
        name: the tool's.
        arguments: JSON of an object; of a call that was cut, its beginning.
        call_id: the id that its result names; "" before it has one.
        is_cut: whether the answer ended before the arguments did.
    """

    name: str
    arguments: str
    call_id: str = ""
    is_cut: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name, as far as they are complete."""
        found: dict[str, Any] = json.loads(self._whole)
        return found

    @property
    def _whole(self) -> str:
        return closed(self.arguments) if self.is_cut else self.arguments

    def as_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        said = {"name": self.name, "arguments": self.values}
        return {"type": "function", "id": self.call_id, "function": said}


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        content: its text; it may be empty.
        tool_calls: what an answer asks for.
        tool_call_id: of a tool's result, the call that it is of.
        name: of a tool's result, the tool; of another message, who says it; "" if it is not known.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def as_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it; arguments of calls are objects."""
        said: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            said["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.tool_call_id:
            said |= {"tool_call_id": self.tool_call_id, "name": self.name}
        elif self.name:
            said["name"] = self.name
        return said

    @property
    def says_anything(self) -> bool:
        """Whether there is anything to answer to: what a tool returns may be empty."""
        return bool(self.content or self.tool_calls) or self.role == TOOL


def canonical(tools: Sequence[Tool]) -> str:
    """Write tools as one text, "" if there are none: equal texts, equal prompts."""
    said = [tool.as_template() for tool in tools]
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")) if said else ""


class ChoiceKind(StrEnum):
    """Whether an answer calls tools."""

    NONE = "none"  # it is text
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # it is a call


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with tools.

    Attributes:
        tools: those that were offered.
        choice: whether it calls any.
        name: the only one that it may call; "": any.
        most_calls: how many calls of it count; None: all.
    """

    tools: tuple[Tool, ...] = ()
    choice: ChoiceKind = ChoiceKind.AUTO
    name: str = ""
    most_calls: int | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice is ChoiceKind.REQUIRED

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice is ChoiceKind.NONE:
            return ()
        return tuple(tool for tool in self.tools if self.name in {"", tool.name})
