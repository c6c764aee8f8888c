"""Tools of chats and of responses, as OpenAI's clients write them.

A chat's tool has the function in the member `function`; a response's tool has the function's
members beside its type.

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
OF_NAMESPACE = "."  # separates a namespace and the name of its function


def _check_kind(kind: str) -> str:
    if kind != FUNCTION:
        raise WrongMemberError(
            f"a tool of type {kind[:40]!r} is not supported",
            "send functions, and run them yourself",
            kind=UnsupportedValueError,
        )
    return kind


FunctionKind = Annotated[str, AfterValidator(_check_kind)]


class ChatToolBody(Body):
    """A tool of a chat."""

    content_words: ClassVar[str] = "type and function"

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)
    function: FunctionBody = Field(default=None, validate_default=True)

    @property
    def tool(self) -> Tool:
        """The function as a tool."""
        return self.function.tool


class FlatToolBody(FunctionBody):
    """A function as a tool of a response."""

    content_words: ClassVar[str] = "type, name, description and parameters"
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading"})

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)

    def offered(self) -> Iterator[Tool]:
        """Yield the function as a tool."""
        yield self.tool

    def shown(self, *, is_long: bool) -> dict[str, Any]:
        """Return the tool as a response shows it; if the tools are long, only its name."""
        return {
            "type": FUNCTION,
            "name": self.name,
            "description": "" if is_long else self.description,
            "parameters": {} if is_long else dict(self.tool.schema),
            "strict": self.strict,
        }


class NamespaceBody(Body):
    """A namespace of functions of a response; they are called as `namespace.function`."""

    content_words: ClassVar[str] = "type, name, description and tools"

    kind: Literal["namespace"] = Field(alias="type")
    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    tools: Annotated[list[FlatToolBody], FailFast()] = Field(default_factory=list)

    def offered(self) -> Iterator[Tool]:
        """Yield its functions as tools."""
        for each in self.tools:
            yield replace(each.tool, name=f"{self.name}{OF_NAMESPACE}{each.name}")

    def shown(self, *, is_long: bool) -> dict[str, Any]:
        """Return the namespace as a response shows it; if the tools are long, only names."""
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
    """`tool_choice`: the function that the answer has to call, or a `ChoiceKind` as `kind`."""

    content_words: ClassVar[str] = "none, auto, required, or a function"

    kind: FunctionKind = Field(default="", alias="type", validate_default=True)
    function: NamedFunctionBody | None = None
    name: str = ""

    @property
    def chosen(self) -> str:
        """The function's name; "" if none is named."""
        return self.name if self.function is None else self.function.name


def _to_choice(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    if raw not in set(ChoiceKind):
        raise WrongMemberError(
            "{path} is not valid", f"send {', '.join(ChoiceKind)}, or a function"
        )
    return ChoiceBody.model_construct(kind=raw, function=None, name="")


ChatTools = Annotated[list[ChatToolBody], FailFast()]
ResponseTools = Annotated[list[ResponseToolBody], FailFast()]
ToolChoice = Annotated[ChoiceBody, BeforeValidator(_to_choice)]
