"""Parsers of answers with tool calls between marks, and of forced calls, as text arrives. Pure.

A call is shown when it is complete and valid: it names a tool that was offered, and its arguments
are a JSON object. Text that looks like a call but is none is shown as text, as the model wrote it.
So a client never gets half of an invalid call, wherever the answer was cut.

A call that is certain to be one is shown as it arrives: in an answer that has to be one
(`ForcedReader`), and where calls are *bound*: a grammar binds an answer that begins like a call to
be one (`OpenCall`).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.json_value import Nesting, NoCallError, RequestedCall, make_call
from inference_svc.core.tools.parts import (
    AnswerReader,
    CallBegun,
    Content,
    OpenCall,
    Opening,
    Part,
    ReadAnswer,
    collect_answer,
    is_open,
    merge_texts,
    num_pending,
)

MAX_HEAD = 256  # characters before the arguments of a call


class ParsedCalls(NamedTuple):
    """The calls at the beginning of a text, and the index behind them."""

    requested: Sequence[RequestedCall]
    end: int


@dataclass(frozen=True)
class CallFormat(ABC):
    """How a family of models writes calls between marks.

    Attributes:
        name: the format's name.
        starts: texts that begin a call, anywhere in the answer.
        leads: texts that begin a call only where the answer has no text before it.
        between: characters that may separate calls, besides blanks.
        marks: all texts of the format that may be special tokens.
        openings: the beginnings of calls that can be bound.
    """

    name: str
    starts: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    between: str = ""
    marks: tuple[str, ...] = ()
    openings: tuple[Opening, ...] = ()

    @abstractmethod
    def read(self, text: str, *, is_end: bool) -> ParsedCalls | None:
        """Parse the calls at the beginning of a text.

        Args:
            text: begins with one of `starts` or `leads`.
            is_end: whether the answer ends with it.

        Returns:
            None if the text is not complete.

        Raises:
            NoCallError: there is no call, whatever text follows.
        """


class PlainReader:
    """Parses an answer that is text only."""

    is_thinking: ClassVar[bool] = False
    last_call: ClassVar[OpenCall | None] = None

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        """See AnswerReader."""
        return []


class MarkedReader:
    """Parses an answer with calls between marks.

    An answer that has only blanks besides its calls has no content.

    Args:
        call_format: how calls are written.
        names: names of the tools that may be called.
        most_calls: number of calls that are shown; None: all.
        is_bound: whether its calls are bound.

    Attributes:
        last_call: see AnswerReader.
    """

    is_thinking: ClassVar[bool] = False

    def __init__(
        self,
        call_format: CallFormat,
        names: Collection[str],
        most_calls: int | None = None,
        *,
        is_bound: bool = False,
    ) -> None:
        self.last_call: OpenCall | None = None
        self._format = call_format
        self._names = names
        self._most_calls = most_calls
        self._openings = call_format.openings if is_bound else ()
        self._list: Opening | None = None  # how the last call began, if it is in a list
        self._num_calls = 0
        self._held = ""  # text that may begin a call
        self._gap = ""  # blanks, which are dropped if a call follows
        self._is_bare = True  # no content since the beginning, or since the last call
        self._nesting = Nesting()  # of the held text
        self._next_length = 0  # length from which the held text is parsed even if nested

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        parts: list[Part] = []
        call = is_open(self.last_call)
        if call is not None:
            self._follow(call, text, parts)
        else:
            self._held += text
        while self._held and self._read_held(parts):
            pass
        return merge_texts(parts)

    def end(self) -> list[Part]:
        """See AnswerReader."""
        call = is_open(self.last_call)
        if call is not None:
            return self._if_counted(call.end())
        if self._list is not None and self._list.ending.startswith(self._held.lstrip()):
            self._held = ""
        self._next_length, self._list = 0, None
        parts = self.push("")
        if self._start() == 0:
            self._read_call(parts, is_end=True)
        self._emit_text(len(self._held), parts)  # a call that is cut is text
        if self._gap and not self._num_calls:
            parts.append(Content(self._gap))
        return merge_texts(parts)

    def _read_held(self, parts: list[Part]) -> bool:
        """Parse the held text; return whether there may be more to parse in it."""
        if self._list is not None:
            return self._read_list(self._list, parts)
        start = self._start()
        if start < 0:
            self._emit_text(len(self._held) - num_pending(self._held, self._format.starts), parts)
            return False
        self._emit_text(start, parts)
        opening = self._opening()
        if opening is not None:
            self._open(*opening, parts)
            return True
        return self._read_call(parts, is_end=False)

    # ----------------------------------------------------------------------------- bound calls

    def _opening(self) -> tuple[Opening, re.Match[str]] | None:
        """Return how the held call begins, once it is certain to be one."""
        for opening in self._openings:
            head = opening.head.match(self._held)
            if head and head.end() <= MAX_HEAD and head["name"] in self._names:
                return opening, head
        return None

    def _open(self, opening: Opening, head: re.Match[str], parts: list[Part]) -> None:
        """Begin to parse a call behind its head."""
        begun, self._held = self._held[head.end() :], ""
        self._num_calls += 1
        self._gap, self._is_bare = "", True
        self._nesting, self._next_length = Nesting(), 0
        self._list = opening if opening.next_head or opening.ending else None
        self.last_call = OpenCall(head["name"], opening.closing)
        parts += self._if_counted([CallBegun(head["name"])])
        self._follow(self.last_call, begun, parts)

    def _follow(self, call: OpenCall, text: str, parts: list[Part]) -> None:
        """Parse the next text of the open call."""
        parts += self._if_counted(call.push(text))
        self._held = call.rest

    def _read_list(self, opening: Opening, parts: list[Part]) -> bool:
        """Parse the text behind a call in a list, or in a section; return whether to continue."""
        stripped = self._held.lstrip()
        if opening.ending and stripped.startswith(opening.ending):
            self._held, self._list = stripped.removeprefix(opening.ending), None
            return True
        head = opening.next_head.match(self._held) if opening.next_head else None
        if head and head.end() <= MAX_HEAD and head["name"] in self._names:
            self._open(opening, head, parts)
            return True
        is_next = opening.next_head is not None and stripped.startswith(",")
        if opening.ending.startswith(stripped) or (is_next and len(self._held) < MAX_HEAD):
            return False
        self._list = None
        return True

    def _if_counted(self, parts: list[Part]) -> list[Part]:
        """Return the parts of the last call, unless there are too many calls."""
        return parts if self._most_calls is None or self._num_calls <= self._most_calls else []

    # --------------------------------------------------------------------------- unbound calls

    def _read_call(self, parts: list[Part], *, is_end: bool) -> bool:
        """Parse the held text as a call; return whether there may be more to parse behind it.

        All of the text is parsed each time. To bound the cost this is not done at each piece of a
        long one.
        """
        length = len(self._held)
        if length < self._next_length and self._nesting.is_open(self._held):
            return False
        try:
            found = self._format.read(self._held, is_end=is_end)
        except NoCallError as error:
            found = ParsedCalls((), error.end)
        if found is None:
            self._next_length = length + length // 8
            return False
        self._nesting, self._next_length = Nesting(), 0
        calls = self._make_calls(found.requested)
        if not calls:
            self._emit_text(max(found.end, 1), parts)
            return True
        for call in calls:
            self._num_calls += 1
            parts += self._if_counted([call])
        self._held, self._gap, self._is_bare = self._held[found.end :], "", True
        return True

    def _make_calls(self, requested: Sequence[RequestedCall]) -> list[ToolCall]:
        """Make the calls; none if one of them is invalid."""
        try:
            calls = [make_call(call) for call in requested]
        except NoCallError:
            return []
        return calls if all(call.name in self._names for call in calls) else []

    def _start(self) -> int:
        """Return the index in the held text where a call may begin; -1: nowhere."""
        found = [self._held.find(mark) for mark in self._format.starts]
        at = min((place for place in found if place >= 0), default=-1)
        if self._is_bare:
            blanks = len(self._held) - len(self._held.lstrip(self._blanks))
            if self._held.startswith(self._format.leads, blanks):
                return blanks
        return at

    @property
    def _blanks(self) -> str:
        return " \t\r\n" + (self._format.between if self._num_calls else "")

    def _emit_text(self, length: int, parts: list[Part]) -> None:
        """Emit the first `length` characters of the held text as content."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_bare:
            self._gap += text
            if not self._gap.strip(self._blanks):
                return
            text, self._gap, self._is_bare = self._gap, "", False
        if text:
            parts.append(Content(text))


class _ForcedState(Enum):
    HEAD = auto()
    CALL = auto()
    OTHERWISE = auto()


class ForcedReader:
    """Parses an answer that a grammar binds to be one call, shown as it arrives.

    Its arguments are written as `json.dumps` would, up to where the answer was cut, if it was.

    Args:
        heads: the texts before the arguments of a call, by tool name.
        otherwise: parses an answer that does not begin so, or ends before.

    Attributes:
        last_call: see AnswerReader.
    """

    def __init__(self, heads: Mapping[str, str], otherwise: AnswerReader) -> None:
        self._heads = {name: head.lstrip() for name, head in heads.items()}
        self._otherwise = otherwise
        self.last_call: OpenCall | None = None
        self._held = ""
        self._state = _ForcedState.HEAD

    @property
    def is_thinking(self) -> bool:
        """See AnswerReader."""
        return self._otherwise.is_thinking

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        if self._state is _ForcedState.HEAD:
            return self._read_head(text)
        if self.last_call is not None:
            return self.last_call.push(text)
        return self._otherwise.push(text)

    def end(self) -> list[Part]:
        """See AnswerReader."""
        if self.last_call is not None:
            return self.last_call.end()
        return [*self._otherwise.push(self._held), *self._otherwise.end()]

    def _read_head(self, text: str) -> list[Part]:
        self._held += text
        stripped = self._held.lstrip()
        begun = [name for name, head in self._heads.items() if stripped.startswith(head)]
        if begun:
            name = max(begun, key=len)
            self._held, self._state, self.last_call = "", _ForcedState.CALL, OpenCall(name)
            return [CallBegun(name), *self.last_call.push(stripped[len(self._heads[name]) :])]
        if any(head.startswith(stripped) for head in self._heads.values()):
            return []
        held, self._held, self._state = self._held, "", _ForcedState.OTHERWISE
        return self._otherwise.push(held)


def read_whole(reader: AnswerReader, text: str) -> ReadAnswer:
    """Parse an answer that is complete."""
    return collect_answer([*reader.push(text), *reader.end()])
