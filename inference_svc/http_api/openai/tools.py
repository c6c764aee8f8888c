"""Tools in OpenAI's words: those of a chat, and those of a response.

A chat has a function in a member of its own, a response has its members beside its type.

*Source:* OpenAI API reference, "Function calling".
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
)

from inference_svc.core.chat import ChoiceKind, Tool
from inference_svc.http_api.bodies.body import Body, WrongMemberError
from inference_svc.http_api.bodies.tools import FunctionBody, ToolName
from inference_svc.http_api.errors import UnsupportedValueError

FUNCTION = "function"
NAMESPACE = "namespace"
OF_NAMESPACE = "."  # between a namespace and a function of it


def _kind(kind: str) -> str:
    if kind != FUNCTION:
        raise WrongMemberError(
            f"a tool of type {kind[:40]!r} is not supported",
            "send functions, which you run yourself",
            kind=UnsupportedValueError,
        )
    return kind


FunctionKind = Annotated[str, AfterValidator(_kind)]


class ChatToolBody(Body):
    """A tool of a chat."""

    content_words: ClassVar[str] = "type and function"

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)
    function: FunctionBody = Field(default=None, validate_default=True)

    @property
    def tool(self) -> Tool:
        """The tool."""
        return self.function.tool


class FlatToolBody(FunctionBody):
    """A function of a response."""

    content_words: ClassVar[str] = "type, name, description and parameters"
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading"})

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)

    def offered(self) -> Iterator[Tool]:
        """Yield the tool."""
        yield self.tool

    def shown(self, *, is_long: bool) -> dict[str, Any]:
        """Return the tool as a response repeats it; of a long one nothing but its name."""
        return {
            "type": FUNCTION,
            "name": self.name,
            "description": "" if is_long else self.description,
            "parameters": {} if is_long else dict(self.tool.schema),
            "strict": self.strict,
        }


class NamespaceBody(Body):
    """Functions of a response under one name, with which they are called: `namespace.function`."""

    content_words: ClassVar[str] = "type, name, description and tools"

    kind: Literal["namespace"] = Field(alias="type")
    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    tools: Annotated[list[FlatToolBody], FailFast()] = Field(default_factory=list)

    def offered(self) -> Iterator[Tool]:
        """Yield its functions."""
        for each in self.tools:
            yield replace(each.tool, name=f"{self.name}{OF_NAMESPACE}{each.name}")

    def shown(self, *, is_long: bool) -> dict[str, Any]:
        """Return it as a response repeats it; of a long one nothing but names."""
        return {
            "type": NAMESPACE,
            "name": self.name,
            "description": "" if is_long else self.description,
            "tools": [each.shown(is_long=is_long) for each in self.tools],
        }


def _tag(tool: Any) -> str:
    is_namespace = isinstance(tool, dict) and tool.get("type") == NAMESPACE
    return f"<{NAMESPACE}>" if is_namespace else f"<{FUNCTION}>"


ResponseToolBody = Annotated[
    Annotated[FlatToolBody, Tag(f"<{FUNCTION}>")] | Annotated[NamespaceBody, Tag(f"<{NAMESPACE}>")],
    Discriminator(_tag),
]


class NamedFunctionBody(Body):
    """The function that an answer has to call."""

    content_words: ClassVar[str] = "name"

    name: ToolName = Field(default="", validate_default=True)


class ChoiceBody(Body):
    """`tool_choice`: the function that the answer has to call, or a word as its `kind`."""

    content_words: ClassVar[str] = "none, auto, required, or a function"

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)
    function: NamedFunctionBody | None = None
    name: str = ""

    @property
    def chosen(self) -> str:
        """The function's name."""
        return self.name if self.function is None else self.function.name


def _choice(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if given not in set(ChoiceKind):
        raise WrongMemberError(
            "{path} cannot be so", f"send {', '.join(ChoiceKind)}, or a function"
        )
    return ChoiceBody.model_construct(kind=given, function=None, name="")


ChatTools = Annotated[list[ChatToolBody], FailFast()]
ResponseTools = Annotated[list[ResponseToolBody], FailFast()]
ToolChoice = Annotated[ChoiceBody, BeforeValidator(_choice)]
