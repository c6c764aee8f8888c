"""The objects of /v1/responses: a response in any status, and the events of a streamed one.

The events are numbered, and come in this order:

    created, (in the background: queued,) in_progress, the items, completed | incomplete | failed

Each item is a message, the thoughts before it, or a tool call:

    output_item.added, content_part.added, output_text.delta… | reasoning_text.delta…,
        output_text.done | reasoning_text.done, content_part.done, output_item.done
    output_item.added, function_call_arguments.delta…, function_call_arguments.done,
        output_item.done

*Source:* OpenAI API reference, "Responses" and "Streaming events". `session_id` is this service's
own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from inference_svc.core.tools.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
)
from inference_svc.core.turn_record import AnswerToken, Finished, Started, Usage
from inference_svc.http_api.answer_members import TokenText, reuse_members
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.openai.dialect import error_object
from inference_svc.http_api.sessions.lookup import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    ResponseInfo,
)
from shared.types.errors import ReportedError

COMPLETED = "completed"
INCOMPLETE = "incomplete"

Rows = list[dict[str, Any]]  # tokens with their log-probabilities


@dataclass
class _TextItem:
    """A text item that is being written: a message, or the thoughts before it.

    Attributes:
        index: index of the item in the output.
        item_id: its id.
        is_thought: whether it is a reasoning item.
        text: its text so far.
        rows: its tokens so far, with their log-probabilities.
    """

    index: int
    item_id: str
    is_thought: bool
    text: str = ""
    rows: Rows = field(default_factory=list)

    @property
    def part(self) -> dict[str, Any]:
        """The item's only content part, with the text so far."""
        if self.is_thought:
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.rows),
        }

    @property
    def channel(self) -> str:
        """The prefix of the types of its text events."""
        return "response.reasoning_text" if self.is_thought else "response.output_text"

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item in a status; while it is in progress it is shown without its part."""
        parts = [] if status == IN_PROGRESS else [self.part]
        if self.is_thought:
            return {"id": self.item_id, "type": "reasoning", "summary": [], "content": parts}
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": parts,
        }


class ResponseObjects:
    """Builds the objects and events of one response.

    Args:
        response_id: the response's id.
        session_id: the session of its turn; "" if it is not known yet.
        info: the response's members beside its answer.
        token_text: makes the objects of tokens.
        reading: how the answer is parsed.
        top_logprobs: number of alternatives of each token; None: no log-probabilities.

    Attributes:
        session_id: the session; the caller sets it when a queued turn has got one.
    """

    def __init__(
        self,
        response_id: str,
        session_id: str,
        info: ResponseInfo,
        token_text: TokenText,
        reading: Reading,
        top_logprobs: int | None = None,
    ) -> None:
        self._id = response_id
        self.session_id = session_id
        self._info = info
        self._token_text = token_text
        self._reader = reading.reader()
        self._top_logprobs = top_logprobs
        self._number = 0  # sequence number of the next event
        self._output: list[dict[str, Any]] = []  # complete items
        self._open: _TextItem | None = None
        self._call: dict[str, Any] = {}  # the last call, with its arguments so far
        self._rows: Rows = []  # tokens whose text the reader still holds back

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Build a response that has ended."""
        *_, last = chain(self.piece(tokens), self.closing(finished))
        response: dict[str, Any] = last["response"]
        return response

    def opening(self, _started: Started) -> Iterator[dict[str, Any]]:
        """Build the first events of a turn that has begun."""
        response = self._response(IN_PROGRESS, [])
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})

    def background_opening(self) -> Iterator[dict[str, Any]]:
        """Build the first events of a background response, which is queued first."""
        for kind, status in (("created", QUEUED), (QUEUED, QUEUED), (IN_PROGRESS, IN_PROGRESS)):
            # Without the session, which is not known yet: the events have to repeat exactly.
            response = {**self.without_answer(status), "session_id": ""}
            yield self._event(f"response.{kind}", {"response": response})

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Build the events of the next tokens; there are none if they show nothing."""
        self._add_rows(tokens)
        yield from self._read(self._reader.push(tokens))

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Build the events of the end."""
        status = _status(finished)
        yield from self._read(self._reader.end())
        if not self._output and self._open is None:  # an empty answer is an empty message
            yield from self._add_text("", is_thought=False)
        yield from self._close(status)
        response = self._response(status, self._output, finished.usage)
        yield self._event(f"response.{status}", {"response": response})

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Build the event of a turn that failed."""
        found = error_object(error)
        members = {"code": found["code"], "message": found["message"]}
        return self._event("response.failed", {"response": self.without_answer(FAILED, members)})

    def cancellation(self) -> dict[str, Any]:
        """Build the last event of a cancelled response: `failed`, as OpenAI has no other."""
        return self._event("response.failed", {"response": self.without_answer(CANCELLED)})

    def without_answer(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Build a response in a status, without an answer."""
        return self._response(status, [], error=error)

    def _read(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Build the events of parts."""
        for part in parts:
            if isinstance(part, CallBegun):
                yield from self._close(COMPLETED)
                yield from self._begin_call(part)
            elif isinstance(part, CallArguments):
                yield from self._add_arguments(part.text)
            elif isinstance(part, CallEnded):
                yield from self._end_call(INCOMPLETE if part.is_cut else COMPLETED)
            elif isinstance(part, Content | Reasoning):
                yield from self._add_text(part.text, is_thought=isinstance(part, Reasoning))
        if self._rows and self._open is not None and not self._open.is_thought:
            yield from self._add_text("", is_thought=False)

    def _add_text(self, text: str, *, is_thought: bool) -> Iterator[dict[str, Any]]:
        """Build the events of text; close the open item if it is of the other kind."""
        item = self._open
        if item is None or item.is_thought != is_thought:
            yield from self._close(COMPLETED)
            item_id = self._item_id("rs" if is_thought else "msg")
            item = self._open = _TextItem(len(self._output), item_id, is_thought)
            added = {"output_index": item.index, "item": item.shown(IN_PROGRESS)}
            yield self._event("response.output_item.added", added)
            yield self._part_event("response.content_part.added", {"part": item.part})
        rows: Rows = []
        if not is_thought:
            rows, self._rows = self._rows, []
        item.text += text
        item.rows += rows
        if text or rows:
            more = {} if is_thought else {"logprobs": rows}
            yield self._part_event(f"{item.channel}.delta", {"delta": text, **more})

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Build the events of the end of the open text item, if there is one."""
        item = self._open
        if item is None:
            return
        more = {} if item.is_thought else {"logprobs": item.rows}
        yield self._part_event(f"{item.channel}.done", {"text": item.text, **more})
        yield self._part_event("response.content_part.done", {"part": item.part})
        yield from self._end_item(item.shown(status))
        self._open = None

    def _begin_call(self, begun: CallBegun) -> Iterator[dict[str, Any]]:
        """Build the event of the beginning of a call."""
        namespace, name = self._info.split_name(begun.name)
        self._call = {
            "id": self._item_id("fc"),
            "type": "function_call",
            "status": IN_PROGRESS,
            "call_id": begun.call_id,
            "name": name,
            "arguments": "",
            **({"namespace": namespace} if namespace else {}),
        }
        added = {"output_index": len(self._output), "item": dict(self._call)}
        yield self._event("response.output_item.added", added)

    def _add_arguments(self, text: str) -> Iterator[dict[str, Any]]:
        """Build the event of the next part of a call's arguments."""
        self._call["arguments"] += text
        yield self._call_event("response.function_call_arguments.delta", {"delta": text})

    def _end_call(self, status: str) -> Iterator[dict[str, Any]]:
        """Build the events of the end of a call."""
        members = {name: self._call[name] for name in ("name", "arguments")}
        yield self._call_event("response.function_call_arguments.done", members)
        yield from self._end_item({**self._call, "status": status})

    def _call_event(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        place = {"item_id": self._call["id"], "output_index": len(self._output)}
        return self._event(kind, {**place, **members})

    def _end_item(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        index = len(self._output)
        self._output.append(item)
        yield self._event("response.output_item.done", {"output_index": index, "item": item})

    def _add_rows(self, tokens: Sequence[AnswerToken]) -> None:
        if self._top_logprobs is not None:
            self._rows += self._token_text.rows(tokens, self._top_logprobs)

    def _part_event(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Build an event of the open text item's part."""
        item = self._open
        assert item is not None, "it is open"  # noqa: S101
        place = {"item_id": item.item_id, "output_index": item.index, "content_index": 0}
        return self._event(kind, {**place, **members})

    def _event(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}

    def _item_id(self, prefix: str) -> str:
        """Return the id of the next item: the response's id, with a number from the second on."""
        number = len(self._output)
        return f"{prefix}_{self._id.removeprefix('resp_')}" + (f"_{number}" if number else "")

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Build a response in a status, with the given output."""
        info = self._info
        is_cut = status == INCOMPLETE
        return {
            "id": self._id,
            "object": "response",
            "created_at": info.created_s,
            "status": status,
            "background": info.is_background,
            "conversation": {"id": info.conversation_id} if info.conversation_id else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": info.instructions or None,
            "max_output_tokens": info.max_output_tokens,
            "metadata": dict(info.metadata),
            "model": info.model,
            "output": output,
            "parallel_tool_calls": info.parallel_tool_calls,
            "previous_response_id": info.previous_id or None,
            "reasoning": {"effort": info.effort, "summary": None},
            "service_tier": "default",
            "store": info.is_kept,
            "temperature": info.temperature,
            "text": {"format": dict(info.text_format)},
            "tool_choice": info.tool_choice,
            "tools": list(info.tools),
            "top_logprobs": info.top_logprobs,
            "top_p": info.top_p,
            "truncation": info.truncation,
            "usage": response_usage(usage, self._reader.num_thought) if usage else None,
            "session_id": self.session_id,
        }


def response_usage(usage: Usage, num_thought: int = 0) -> dict[str, Any]:
    """Return the usage object of a response; reused tokens are its `cached_tokens`.

    Args:
        usage: the usage of its turn.
        num_thought: number of thought tokens in the answer.
    """
    input_tokens = usage.history_tokens + usage.new_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": input_tokens + usage.output_tokens,
        **reuse_members(usage),
    }


def _status(finished: Finished) -> str:
    """Return a turn's finish reason as a response's status."""
    return INCOMPLETE if finished.finish_reason == "length" else COMPLETED
