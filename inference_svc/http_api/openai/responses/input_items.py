"""The input of a response: messages, calls of tools, and what these returned.

What an answer said and what it called are items of their own, and together one message.

*Source:* OpenAI API reference, "Responses".
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message
from inference_svc.http_api.bodies.body import Body, WrongMemberError
from inference_svc.http_api.bodies.conversation import bounded, with_names
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
PREFIXES = {MESSAGE: "msg", CALL: "fc", RESULT: "fco", COMPACTION: "cmp"}  # of ids
PACKED = "summary.v1."  # what the content of a compaction begins with
_OF_ITEMS = frozenset({"created_by", "id", "status", "type"})


class CallItem(CalledFunctionBody):
    """A call of a tool, as it was answered."""

    content_words: ClassVar[str] = "call_id, name and arguments"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    namespace: str = ""

    @property
    def message(self) -> Message:
        """The answer that asked for it."""
        name = f"{self.namespace}{OF_NAMESPACE}{self.name}" if self.namespace else self.name
        return Message(ASSISTANT, "", (decode_call(name, self.arguments, self.call_id),))


class ResultItem(Body):
    """What a tool returned."""

    content_words: ClassVar[str] = "call_id and output"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    output: Content = Field(default=None, validate_default=True)

    @property
    def message(self) -> Message:
        """The message of the tool."""
        text = "".join(part.text for part in self.output)
        return Message(TOOL, text, tool_call_id=self.call_id)


class ReasoningItem(Body):
    """What a model thought: it stays in its session, and is not read again."""

    ignored: ClassVar[frozenset[str]] = _OF_ITEMS | {"content", "encrypted_content", "summary"}

    message: ClassVar[None] = None


def packed(asked: str, summary: str) -> str:
    """Write a summary, and what was asked for it, as an item has it: see `compaction.py`."""
    said = json.dumps({"asked": asked, "summary": summary}, ensure_ascii=False)
    return PACKED + base64.b64encode(said.encode()).decode()


def _unpacked(given: str) -> tuple[str, str]:
    """Return what was asked for a summary, and the summary.

    Raises:
        WrongMemberError: it is no content of a compaction.
    """
    try:
        found = json.loads(base64.b64decode(given.removeprefix(PACKED), validate=True))
        asked, summary = found["asked"], found["summary"]
        (asked + summary).encode()  # they are texts, of whole characters
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise WrongMemberError(
            "{path} was not made by POST /v1/responses/compact here",
            "send the item as it was answered, or the conversation that it sums up",
            "encrypted_content",
        ) from error
    return asked, summary


class CompactionItem(Body):
    """A conversation that was summed up, by `POST /v1/responses/compact`."""

    content_words: ClassVar[str] = "type and encrypted_content"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    encrypted_content: str = ""

    @model_validator(mode="after")
    def _know_it(self) -> Self:
        _unpacked(self.encrypted_content)
        return self

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was asked, and what the model said."""
        asked, summary = _unpacked(self.encrypted_content)
        return Message(USER, asked), Message(ASSISTANT, summary)


def _kind(item: Any) -> Any:
    """Return the item's type as the client wrote it; nothing is a message."""
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


def _input(given: Any) -> Any:
    """Take a text for a user's only message."""
    if isinstance(given, str):
        return [{"role": USER, "content": given}]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is neither text nor a list", "send a string or messages")
    return of_known_kinds(given)


def of_known_kinds(given: list[Any]) -> list[Any]:
    """Refuse items of kinds that there are not, before they are read."""
    for index, item in enumerate(given):
        kind = _kind(item)
        if kind not in KINDS:
            raise WrongMemberError(
                f"input items of type {str(kind)[:40]!r} are not supported",
                "send messages with text, and function calls with their outputs",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return given


def _bounded(given: Any) -> Any:
    """Bound the input; whether there has to be any depends on what else is named."""
    return bounded(given) if given else given


InputItems = Annotated[list[Item], FailFast(), BeforeValidator(_bounded), BeforeValidator(_input)]


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """Return items as messages: answers that follow one another are one, if they call anything."""
    found: list[Message] = []
    for message in (said for item in items for said in _said(item)):
        last = found[-1] if found else None
        if last is not None and last.role == message.role == ASSISTANT:
            calls = (*last.tool_calls, *message.tool_calls)
            if calls:
                found[-1] = Message(ASSISTANT, last.content + message.content, calls)
                continue
        found.append(message)
    return with_names(found)


def _said(item: Item) -> tuple[Message, ...]:
    if isinstance(item, CompactionItem):
        return item.messages
    return () if item.message is None else (item.message,)


def with_ids(response_id: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items of a response's input with ids, which say whose they are and where."""
    name = response_id.removeprefix("resp_")
    return [
        {"id": f"{PREFIXES[item['type']]}_{name}_in_{index}", **item}
        for index, item in enumerate(items)
    ]


def objects_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as clients read them, but for their ids; what was thought is not among them."""
    return [shown for item in items for shown in _objects(item)]


def _objects(item: Item) -> Iterator[dict[str, Any]]:
    if isinstance(item, CompactionItem):
        yield {"type": COMPACTION, "encrypted_content": item.encrypted_content}
    elif isinstance(item, CallItem):
        name = {"name": item.name, **({"namespace": item.namespace} if item.namespace else {})}
        yield _object(CALL, call_id=item.call_id, arguments=item.arguments, **name)
    elif isinstance(item, ResultItem):
        yield _object(RESULT, call_id=item.call_id, output=_output(item.output))
    elif isinstance(item, MessageBody) and item.role == TOOL:  # as chats have it
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
    """Return what a tool returned: a text, or parts if there are several."""
    return parts[0].text if len(parts) == 1 else _content(TOOL, parts)


def _content(role: str, parts: list[PartBody]) -> list[dict[str, Any]]:
    if role == ASSISTANT:
        return [{"type": "output_text", "text": part.text, "annotations": []} for part in parts]
    return [{"type": "input_text", "text": part.text} for part in parts]
