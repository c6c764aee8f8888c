"""The input items of a response: messages, tool calls, and results of tools.

The text of an answer and its calls are separate items, but one message for the chat template.

*Source:* OpenAI API reference, "Responses".
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message
from inference_svc.http_api.bodies.body import Body, WrongMemberError
from inference_svc.http_api.bodies.conversation import check_bounded, with_names
from inference_svc.http_api.bodies.tools import CalledFunctionBody, CallId, decode_call
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.messages import Content, MessageBody, PartBody
from inference_svc.http_api.openai.tools import OF_NAMESPACE

MESSAGE, CALL, RESULT, REASONING, COMPACTION = KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "compaction",
)
PREFIXES = {MESSAGE: "msg", CALL: "fc", RESULT: "fco", COMPACTION: "cmp"}  # of items' ids
PACKED = "summary.v1."  # prefix of the content of a compaction item
_OF_ITEMS = frozenset({"created_by", "id", "status", "type"})  # members of all items, ignored


class CallItem(CalledFunctionBody):
    """A tool call of an earlier answer."""

    content_words: ClassVar[str] = "call_id, name and arguments"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    namespace: str = ""

    @property
    def message(self) -> Message:
        """The call as an answer without text."""
        name = f"{self.namespace}{OF_NAMESPACE}{self.name}" if self.namespace else self.name
        return Message(ASSISTANT, "", (decode_call(name, self.arguments, self.call_id),))


class ResultItem(Body):
    """The result of a tool call."""

    content_words: ClassVar[str] = "call_id and output"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    output: Content = Field(default=None, validate_default=True)

    @property
    def message(self) -> Message:
        """The result as the tool's message."""
        text = "".join(part.text for part in self.output)
        return Message(TOOL, text, tool_call_id=self.call_id)


class ReasoningItem(Body):
    """The model's thoughts: they stay in their session, and are not read again."""

    ignored: ClassVar[frozenset[str]] = _OF_ITEMS | {"content", "encrypted_content", "summary"}

    message: ClassVar[None] = None


def pack_summary(request: str, summary: str) -> str:
    """Encode a summary, and the request for it, as an item's content: see `compaction.py`."""
    message = json.dumps({"asked": request, "summary": summary}, ensure_ascii=False)
    return PACKED + base64.b64encode(message.encode()).decode()


def _unpack_summary(raw: str) -> tuple[str, str]:
    """Decode the content of a compaction item: the request for a summary, and the summary.

    Raises:
        WrongMemberError: it is no such content.
    """
    try:
        found = json.loads(base64.b64decode(raw.removeprefix(PACKED), validate=True))
        request, summary = found["asked"], found["summary"]
        (request + summary).encode()  # raises if they are no texts, or have lone surrogates
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise WrongMemberError(
            "{path} was not made by POST /v1/responses/compact here",
            "send the item unchanged, or the conversation that it summarizes",
            "encrypted_content",
        ) from error
    return request, summary


class CompactionItem(Body):
    """The summary of a conversation, made by `POST /v1/responses/compact`."""

    content_words: ClassVar[str] = "type and encrypted_content"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    encrypted_content: str = ""

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        _unpack_summary(self.encrypted_content)
        return self

    @property
    def messages(self) -> tuple[Message, ...]:
        """The user's request for the summary, and the model's answer."""
        request, summary = _unpack_summary(self.encrypted_content)
        return Message(USER, request), Message(ASSISTANT, summary)


def _kind(item: Any) -> Any:
    """Return the item's type as the client wrote it; an item without a type is a message."""
    found = item.get("type") if isinstance(item, dict) else None
    return MESSAGE if found is None else found


Item = Annotated[
    Annotated[MessageBody, Tag(f"<{MESSAGE}>")]
    | Annotated[CallItem, Tag(f"<{CALL}>")]
    | Annotated[ResultItem, Tag(f"<{RESULT}>")]
    | Annotated[ReasoningItem, Tag(f"<{REASONING}>")]
    | Annotated[CompactionItem, Tag(f"<{COMPACTION}>")],
    Discriminator(lambda item: f"<{_kind(item)}>"),
]


def _to_items(raw: Any) -> Any:
    """Convert a text to a user's message, and check the types of items; a validator."""
    if isinstance(raw, str):
        return [{"role": USER, "content": raw}]
    if not isinstance(raw, list):
        raise WrongMemberError(
            "{path} is neither a text nor a list", "send a string or a list of messages"
        )
    return check_kinds(raw)


def check_kinds(raw: list[Any]) -> list[Any]:
    """Check the types of items before they are validated."""
    for index, item in enumerate(raw):
        kind = _kind(item)
        if kind not in KINDS:
            raise WrongMemberError(
                f"input items of type {str(kind)[:40]!r} are not supported",
                "send messages with text, and function calls with their outputs",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return raw


def _check_input_bounds(raw: Any) -> Any:
    """Check the bounds of the input, which may be empty: see `ResponseBody`."""
    return check_bounded(raw) if raw else raw


InputItems = Annotated[
    list[Item], FailFast(), BeforeValidator(_check_input_bounds), BeforeValidator(_to_items)
]


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """Convert items to messages; consecutive answers are one message if they have tool calls."""
    found: list[Message] = []
    for message in (message for item in items for message in _messages_of_item(item)):
        last = found[-1] if found else None
        if last is not None and last.role == message.role == ASSISTANT:
            calls = (*last.tool_calls, *message.tool_calls)
            if calls:
                found[-1] = Message(ASSISTANT, last.content + message.content, calls)
                continue
        found.append(message)
    return with_names(found)


def _messages_of_item(item: Item) -> tuple[Message, ...]:
    if isinstance(item, CompactionItem):
        return item.messages
    return () if item.message is None else (item.message,)


def with_ids(response_id: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items of a response's input with ids, made of the response's id and their index."""
    name = response_id.removeprefix("resp_")
    return [
        {"id": f"{PREFIXES[item['type']]}_{name}_in_{index}", **item}
        for index, item in enumerate(items)
    ]


def objects_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as the objects that clients read, without ids; thoughts are left out."""
    return [shown for item in items for shown in _objects_of_item(item)]


def _objects_of_item(item: Item) -> Iterator[dict[str, Any]]:
    if isinstance(item, CompactionItem):
        yield {"type": COMPACTION, "encrypted_content": item.encrypted_content}
    elif isinstance(item, CallItem):
        name = {"name": item.name, **({"namespace": item.namespace} if item.namespace else {})}
        yield _object(CALL, call_id=item.call_id, arguments=item.arguments, **name)
    elif isinstance(item, ResultItem):
        yield _object(RESULT, call_id=item.call_id, output=_output(item.output))
    elif isinstance(item, MessageBody) and item.role == TOOL:  # a result as chats write it
        yield _object(RESULT, call_id=item.tool_call_id, output=_output(item.content))
    elif isinstance(item, MessageBody):
        if item.content or not item.tool_calls:
            yield _object(MESSAGE, role=item.role, content=_content(item.role, item.content))
        for called in item.tool_calls:
            of_call = {"name": called.function.name, "arguments": called.function.arguments}
            yield _object(CALL, call_id=called.call_id, **of_call)


def _object(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": kind, "status": "completed", **members}


def _output(parts: list[PartBody]) -> Any:
    """Return the output of a tool: a text, or parts if there are several."""
    return parts[0].text if len(parts) == 1 else _content(TOOL, parts)


def _content(role: str, parts: list[PartBody]) -> list[dict[str, Any]]:
    if role == ASSISTANT:
        return [{"type": "output_text", "text": part.text, "annotations": []} for part in parts]
    return [{"type": "input_text", "text": part.text} for part in parts]
