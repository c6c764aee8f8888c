"""What an answer is made of as it is read: text, what was thought, and calls. Pure.

What a model writes is certain to be a call once its arguments begin behind the name of a tool that
was offered: from there on a grammar keeps the answer to it, up to what closes it. Such a call is
read as it comes (`OpenCall`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

from inference_svc.core.chat import ToolCall
from inference_svc.core.json_stream import JsonStream

MAX_BLANKS = 40  # where blanks may stand: small models would write them for ever
BLANKS = rf"[ \t\r\n]{{0,{MAX_BLANKS}}}"
# Closes an object with a call in it. Mistral's models may write an id behind the arguments.
END_OF_OBJECT = re.compile(rf'(?:,{BLANKS}"id"{BLANKS}:{BLANKS}"[^"\\]{{0,64}}"{BLANKS})?\}}')
MAX_CLOSING = 512  # characters, of each piece

# The pieces that close a call, each behind blanks: a mark as it is, or what an expression matches.
Closing: TypeAlias = tuple[str | re.Pattern[str], ...]


@dataclass(frozen=True)
class Content:
    """What the answer says."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins, whose arguments follow; its id is "" before it has one."""

    name: str
    call_id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """What follows of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The call that has begun is over; `is_cut`: before its arguments were."""

    is_cut: bool = False


Part: TypeAlias = Content | Reasoning | ToolCall | CallBegun | CallArguments | CallEnded


def merge_texts(parts: Sequence[Part]) -> list[Part]:
    """Join texts of a kind that follow one another."""
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
        content: all that it says.
        reasoning: all that it thinks.
        calls: what it asks for, in order.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def with_whole_calls(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of a whole answer, each call as one."""
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
    """Sum up the parts of an answer."""
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
        head: what stands before the brace of the arguments; `name` is the tool's.
        closing: what closes such a call behind them.
        next_head: what stands before those of another call of the same list; None: it is no list.
        ending: what may end a list, or a section, of calls behind the last one.
    """

    head: re.Pattern[str]
    closing: Closing = ()
    next_head: re.Pattern[str] | None = None
    ending: str = ""


class OpenCall:
    """Reads one call from the brace of its arguments on.

    The arguments are what `json.dumps` writes of them, up to where the answer was cut, if it was.

    Args:
        name: the tool's.
        closing: what closes it.

    Attributes:
        name: the tool's.
        closing: what closes it.
        begun: what came of it at first: its text when it was found to be a call.
        is_over: whether it is closed.
        rest: what came behind it in the text that closed it.
    """

    def __init__(self, name: str, closing: Closing = ()) -> None:
        self.name = name
        self.closing = closing
        self.begun = ""
        self.is_over = False
        self.rest = ""
        self._stream = JsonStream()
        self._held = ""  # of what closes it
        self._num_closed = 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next text completes; of a call that is over, there are none."""
        if self.is_over:
            return []
        parts = self._read(text)
        if not self.begun:
            self.begun = text.removesuffix(self.rest)
        return parts

    def end(self) -> list[Part]:
        """Return the last parts: the answer ends."""
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
        """Read what closes the call; what does not is behind it."""
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
    """Return a call that is open; None: there is none, or it is over."""
    return None if call is None or call.is_over else call


@cache
def _behind_blanks(piece: str | re.Pattern[str]) -> re.Pattern[str]:
    pattern = re.escape(piece) if isinstance(piece, str) else piece.pattern
    return re.compile(BLANKS + pattern)


class AnswerReader(Protocol):
    """Reads one answer."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text up to here ends inside of what the model thinks."""

    @property
    def last_call(self) -> OpenCall | None:
        """The last call that is bound, be it open or over; None: there was none."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next text completes."""

    def end(self) -> list[Part]:
        """Return the last parts."""
