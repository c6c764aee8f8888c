"""Tools in Anthropic's words.

*Source:* Anthropic API reference, "Messages"; "Tool use".
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ChoiceKind, Tool
from inference_svc.http_api.anthropic.blocks import CacheControl
from inference_svc.http_api.bodies.body import Body, Refused, WrongMemberError
from inference_svc.http_api.bodies.tools import JsonObject, ToolName
from inference_svc.http_api.errors import UnsupportedValueError

CUSTOM = "custom"
NAMED = "tool"
_CHOICES: Mapping[str, ChoiceKind] = {
    "auto": ChoiceKind.AUTO,
    "any": ChoiceKind.REQUIRED,
    NAMED: ChoiceKind.REQUIRED,
    "none": ChoiceKind.NONE,
}


def _kind(kind: str) -> str:
    if kind != CUSTOM:
        raise WrongMemberError(
            f"a tool of type {kind[:40]!r} is not supported",
            "send tools of your own, which you run yourself: with name and input_schema",
            kind=UnsupportedValueError,
        )
    return kind


class ToolBody(Body):
    """A tool that the client would run."""

    content_words: ClassVar[str] = "name, description and input_schema"
    refused: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused((["direct"],), "only the model calls tools: leave it out"),
        "input_examples": Refused(([],), "write them into the description"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading", "eager_input_streaming"})

    kind: Annotated[str, AfterValidator(_kind)] = Field(default=CUSTOM, alias="type")
    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    input_schema: JsonObject = Field(default=None, validate_default=True)
    cache_control: CacheControl | None = None
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


Tools = Annotated[list[ToolBody], FailFast()]


class ChoiceBody(Body):
    """`tool_choice`: whether the answer calls tools, and which."""

    content_words: ClassVar[str] = "type and name"

    kind: Literal["auto", "any", "tool", "none"] = Field(
        default=None, alias="type", validate_default=True
    )
    name: str = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_one(self) -> Self:
        if bool(self.name) != (self.kind == NAMED):
            raise WrongMemberError(
                f"{{path}} and type {NAMED!r} go together", "send both, or neither", "name"
            )
        return self

    @property
    def choice(self) -> ChoiceKind:
        """Whether the answer calls any."""
        return _CHOICES[self.kind]
