"""Messages as OpenAI's clients write them, as roles and texts. Pure.

There is one list of messages behind both APIs: a chat's, or a response's instructions and input.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inference_svc.openai.errors import RequestError, UnsupportedValueError
from inference_svc.openai.fields import Fields, Refused

ASSISTANT = "assistant"
SYSTEM = "system"
USER = "user"
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of all messages together: reading each takes its time, of everybody's
_ROLES = {"developer": SYSTEM, SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_NO_TOOLS = "there are no tools: send what a tool found in a user message"
_REFUSED = {
    "name": Refused(("",), "chat templates have no names: write it into the content"),
    "tool_calls": Refused(([],), _NO_TOOLS),
    "tool_call_id": Refused((), _NO_TOOLS),
    "function_call": Refused((), _NO_TOOLS),
    "audio": Refused((), "the service reads text only"),
    "refusal": Refused(("",), "send it as content"),
}
# Of items that the service itself returned, and clients send back as they are.
_IGNORED = frozenset({"annotations", "id", "status", "phase", "type"})


@dataclass(frozen=True)
class Message:
    """One message; `content` may be empty in an answer."""

    role: str
    content: str


def chat_messages(given: list[Any], where: str = "messages") -> tuple[Message, ...]:
    """Decode a chat's messages.

    Raises:
        RequestError: naming the first that is off.
    """
    if not 0 < len(given) <= MAX_MESSAGES:
        raise RequestError(
            f"{len(given)} messages cannot be", f"send 1 to {MAX_MESSAGES} messages", where
        )
    num_parts = sum(_num_parts(one) for one in given)
    if num_parts > MAX_PARTS:
        raise RequestError(
            f"{num_parts} parts of content cannot be", f"send at most {MAX_PARTS}", where
        )
    return tuple(_message(one, f"{where}[{index}]") for index, one in enumerate(given))


def input_messages(given: Any) -> tuple[Message, ...]:
    """Decode a response's input: a text, or a list of messages.

    Raises:
        RequestError: as of `chat_messages`.
    """
    if isinstance(given, str):
        return (Message(USER, given),)
    if not isinstance(given, list):
        raise RequestError("input is neither text nor a list", "send a string or messages", "input")
    for index, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            raise UnsupportedValueError(
                f"input items of type {str(kind)[:40]!r} are not supported",
                "send messages with text only",
                f"input[{index}].type",
            )
    return chat_messages(given, "input")


def _num_parts(given: Any) -> int:
    content = given.get("content") if isinstance(given, dict) else None
    return len(content) if isinstance(content, list) else 0


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise RequestError(f"{where} is not an object", "send role and content", where)
    fields = Fields(given, where)
    role = fields.text("role")
    if role in {"tool", "function"}:
        raise UnsupportedValueError(f"role {role!r} is not supported", _NO_TOOLS, f"{where}.role")
    if role not in _ROLES:
        raise RequestError(
            f"role {role[:40]!r} cannot be", f"send one of {', '.join(_ROLES)}", f"{where}.role"
        )
    fields.refuse(_REFUSED)
    content = fields.any("content")
    fields.finish(_IGNORED)
    if content is None and role != ASSISTANT:
        raise RequestError(f"{where} has no content", "send a text", f"{where}.content")
    return Message(_ROLES[role], _text(content, f"{where}.content"))


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} is no text", "send a string, or a list of text parts", where)
    return "".join(_parts(content, where))


def _parts(content: Iterable[Any], where: str) -> Iterable[str]:
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise RequestError(f"{path} is not an object", "send type and text", path)
        fields = Fields(part, path)
        kind = fields.text("type")
        if kind not in _TEXT_PARTS:
            raise UnsupportedValueError(
                f"content of type {kind[:40]!r} is not supported",
                "the service reads text only",
                f"{path}.type",
            )
        text = fields.text("text")
        fields.finish({"annotations", "logprobs", "prompt_cache_breakpoint"})
        yield text
