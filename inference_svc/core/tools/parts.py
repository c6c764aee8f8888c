"""The parts of an answer as it is parsed: content, reasoning, and tool calls. Pure.

A model's output is certain to be a call once the arguments begin behind the name of a tool that was
offered: from there on a grammar binds the answer to it, until the call is closed. Such a call is
parsed as it arrives (`OpenCall`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

from inference_svc.core.chat import ToolCall
from inference_svc.core.json_stream import JsonStream

MAX_BLANKS = 40  # in one place: small models would write blanks without end
BLANKS = rf"[ \t\r\n]{{0,{MAX_BLANKS}}}"
# Closes an object that contains a call. Mistral's models may write an id behind the arguments.
END_OF_OBJECT = re.compile(rf'(?:,{BLANKS}"id"{BLANKS}:{BLANKS}"[^"\\]{{0,64}}"{BLANKS})?\}}')
MAX_CLOSING = 512  # characters, of each piece

# The pieces that close a call, each behind blanks: a literal mark, or an expression.
Closing: TypeAlias = tuple[str | re.Pattern[str], ...]


@dataclass(frozen=True)
class Content:
    """Text for the client."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's thoughts before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins, and its arguments follow; its id is "" before it has one."""

    name: str
    call_id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """The next part of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The call that has begun has ended; `is_cut`: before its arguments were complete."""

    is_cut: bool = False


Part: TypeAlias = Content | Reasoning | ToolCall | CallBegun | CallArguments | CallEnded


def merge_texts(parts: Sequence[Part]) -> list[Part]:
    """Merge successive texts of the same kind."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


@dataclass(frozen=True)
class ReadAnswer:
    """A whole answer.

    Attributes:
        content: its text for the client.
        reasoning: the text of its thoughts.
        calls: its calls, in order.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def with_whole_calls(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of a whole answer, with each call as one part."""
    name = call_id = arguments = ""
    for part in parts:
        if isinstance(part, CallBegun):
            name, call_id, arguments = part.name, part.call_id, ""
        elif isinstance(part, CallArguments):
            arguments += part.text
        elif isinstance(part, CallEnded):
            yield ToolCall(name, arguments, call_id, is_cut=part.is_cut)
        else:
            yield part


def collect_answer(parts: Iterable[Part]) -> ReadAnswer:
    """Collect the parts of an answer."""
    parts = list(with_whole_calls(parts))
    return ReadAnswer(
        content="".join(part.text for part in parts if isinstance(part, Content)),
        reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls=tuple(part for part in parts if isinstance(part, ToolCall)),
    )


@dataclass(frozen=True)
class Opening:
    """A way in which calls begin, up to where they are certain to be calls.

    Attributes:
        head: matches the text before the brace of the arguments; its group `name` is the tool's
            name.
        closing: the text that closes such a call behind the arguments.
        next_head: matches the text before the arguments of another call of the same list; None:
            there are no lists.
        ending: text that may end a list, or a section, of calls behind the last one.
    """

    head: re.Pattern[str]
    closing: Closing = ()
    next_head: re.Pattern[str] | None = None
    ending: str = ""


class OpenCall:
    """Parses one call from the brace of its arguments on.

    The arguments are written as `json.dumps` would, up to where the answer was cut, if it was.

    Args:
        name: the tool's name.
        closing: the text that closes it.

    Attributes:
        name: the tool's name.
        closing: the text that closes it.
        begun: the text of its arguments that came together with its head.
        is_over: whether it is closed.
        rest: the text behind it in the piece that closed it.
    """

    def __init__(self, name: str, closing: Closing = ()) -> None:
        self.name = name
        self.closing = closing
        self.begun = ""
        self.is_over = False
        self.rest = ""
        self._stream = JsonStream()
        self._held = ""  # text of the closing that is not matched yet
        self._num_closed = 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next text completes; none for a call that is over."""
        if self.is_over:
            return []
        parts = self._read(text)
        if not self.begun:
            self.begun = text.removesuffix(self.rest)
        return parts

    def end(self) -> list[Part]:
        """Return the last parts, because the answer ends."""
        return [] if self._stream.is_complete else [CallEnded(is_cut=True)]

    def _read(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if not self._stream.is_complete:
            written, num_read = self._stream.push(text)
            if written:
                parts.append(CallArguments(written))
            if not self._stream.is_complete:
                return parts
            parts.append(CallEnded())
            text = text[num_read:]
        self._close(text)
        return parts

    def _close(self, text: str) -> None:
        """Parse the text that closes the call; the text behind it is its rest."""
        self._held += text
        while self._num_closed < len(self.closing):
            found = _behind_blanks(self.closing[self._num_closed]).match(self._held)
            if found is None:
                if len(self._held) < MAX_CLOSING:
                    return
                break
            self._held = self._held[found.end() :]
            self._num_closed += 1
        self.is_over, self.rest = True, self._held


def is_open(call: OpenCall | None) -> OpenCall | None:
    """Return a call if it is open; None: there is none, or it is over."""
    return None if call is None or call.is_over else call


@cache
def _behind_blanks(piece: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return the expression of a closing piece with optional blanks before it."""
    pattern = re.escape(piece) if isinstance(piece, str) else piece.pattern
    return re.compile(BLANKS + pattern)


def num_pending(text: str, marks: Sequence[str]) -> int:
    """Return how many of the last characters may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    last = text[len(text) - longest :]
    if not any(mark[0] in last for mark in marks):  # the common case
        return 0
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


class AnswerReader(Protocol):
    """Parses one answer as it arrives."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside the model's thoughts."""

    @property
    def last_call(self) -> OpenCall | None:
        """The last bound call, open or over; None: there was none."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next text completes."""

    def end(self) -> list[Part]:
        """Return the last parts, because the answer ends."""
