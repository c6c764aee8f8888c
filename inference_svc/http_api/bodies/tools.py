"""Tools and tool calls in bodies: what the APIs have in common."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, model_validator

from inference_svc.core.chat import Tool, ToolCall
from inference_svc.core.json_stream import is_beginning
from inference_svc.core.tools.json_value import NoCallError, RequestedCall, make_call
from inference_svc.http_api.bodies.body import Body, WrongMemberError

MAX_TOOLS = 512
MAX_DEPTH = 64  # nesting of objects and lists: chat templates write them recursively
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def _check_tool_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise WrongMemberError(
            "{path} is not a valid name of a tool",
            "send up to 128 letters, digits and characters of _.:/-",
        )
    return name


def _check_depth(raw: dict[str, Any], name: str = "") -> dict[str, Any]:
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise WrongMemberError(
            "{path} is nested too deeply", f"nest at most {MAX_DEPTH} levels", name
        )
    return raw


ToolName = Annotated[str, AfterValidator(_check_tool_name)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


def check_tools(names: Sequence[str], chosen: str, choice_path: str) -> None:
    """Check the tools of a request; for a body's validator.

    Args:
        names: names of the offered tools.
        chosen: the tool that the answer has to call; "" if none is named.
        choice_path: path of the member that names it.

    Raises:
        WrongMemberError: there are too many, two have the same name, or `chosen` is not offered.
    """
    if len(names) > MAX_TOOLS:
        raise WrongMemberError(
            f"{len(names)} tools are too many", f"send at most {MAX_TOOLS} tools", "tools"
        )
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise WrongMemberError(
            f"two tools have the name {twice!r}", "give each tool its own name", "tools"
        )
    if chosen and chosen not in names:
        raise WrongMemberError(
            f"the tool {chosen[:60]!r} to call is not among the tools",
            "choose one of the tools that you send",
            choice_path,
        )


def decode_call(name: str, arguments: str | dict[str, Any], call_id: str) -> ToolCall:
    """Decode a tool call of an earlier answer, which may have been cut off; for a validator.

    Raises:
        WrongMemberError: its arguments are no JSON object, or nested too deeply.
    """
    try:
        call = make_call(RequestedCall(name, arguments or {}))
    except NoCallError as error:
        if not (isinstance(arguments, str) and is_beginning(arguments)):
            raise WrongMemberError(
                "{path} is not a JSON object",
                "send the arguments as the answer had them",
                "arguments",
            ) from error
        call = ToolCall(name, arguments, is_cut=True)
    _check_depth(call.values, "arguments")
    return replace(call, call_id=call_id)


class FunctionBody(Body):
    """A function that the client offers as a tool."""

    content_words: ClassVar[str] = "name, description and parameters"

    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    parameters: JsonObject = Field(default_factory=dict)
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The function as a tool."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class CalledFunctionBody(Body):
    """The function of an earlier answer's call."""

    content_words: ClassVar[str] = "name and arguments"

    name: ToolName = Field(default="", validate_default=True)
    arguments: str = ""

    @model_validator(mode="after")
    def _check_arguments(self) -> "CalledFunctionBody":
        decode_call(self.name, self.arguments, "")
        return self
