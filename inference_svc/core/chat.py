"""The contents of a chat: messages, the tools offered in it, and calls of these tools. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inference_svc.core.json_stream import close_object

ASSISTANT = "assistant"
SYSTEM = "system"
USER = "user"
TOOL = "tool"


@dataclass(frozen=True)
class Tool:
    """A function that the client would run for the model.

    Attributes:
        name: the function's name.
        description: what it does, for the model.
        parameters: JSON schema of its arguments.
        is_strict: whether a call that the answer has to make must follow the whole schema, or be
            refused; else only the part of the schema that grammars support.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments: always that of an object, with properties."""
        return {"type": "object", "properties": {}, **self.parameters}

    def as_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        rendered = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": rendered}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer.

    Attributes:
        name: the tool's name.
        arguments: JSON of an object; of a call that was cut, its beginning.
        call_id: the id that its result refers to; "" before it has one.
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
        return close_object(self.arguments) if self.is_cut else self.arguments

    def as_template(self) -> dict[str, Any]:
        """Return the call in the form that chat templates expect."""
        rendered = {"name": self.name, "arguments": self.values}
        return {"type": "function", "id": self.call_id, "function": rendered}


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: its author's role.
        content: its text; it may be empty.
        tool_calls: calls of tools in an answer.
        tool_call_id: for a tool's result, the id of the call.
        name: for a tool's result, the tool's name; else the author's. "" if it is not known.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def as_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; arguments of calls are objects."""
        rendered: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            rendered["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.tool_call_id:
            rendered |= {"tool_call_id": self.tool_call_id, "name": self.name}
        elif self.name:
            rendered["name"] = self.name
        return rendered

    @property
    def has_content(self) -> bool:
        """Whether the message says anything; a tool's result counts even if it is empty."""
        return bool(self.content or self.tool_calls) or self.role == TOOL


def canonical(tools: Sequence[Tool]) -> str:
    """Write tools as one text, "" if there are none: equal texts mean equal prompts."""
    rendered = [tool.as_template() for tool in tools]
    return json.dumps(rendered, ensure_ascii=False, separators=(",", ":")) if rendered else ""


class ChoiceKind(StrEnum):
    """Whether an answer calls tools."""

    NONE = "none"  # it is text
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # it is a call


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with tools.

    Attributes:
        tools: the tools that were offered.
        choice: whether the answer calls any.
        name: the only tool that it may call; "": any.
        most_calls: number of its calls that count; None: all.
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
