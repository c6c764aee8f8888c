"""Reads an answer as it comes: what it says, what it thinks, and the calls that it asks for. Pure.

A call is shown when it is complete and is one: it names a tool that was offered, and its arguments
are a JSON object. What looks like a call and is none is text, as the model wrote it. So a client
never gets half of what is no call, wherever the answer was cut. One that is certain to be a call is
shown as it comes (`forced.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.json_value import Asked, Nesting, NoCallError, make_call


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


class AnswerReader(Protocol):
    """Reads one answer."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text up to here ends inside of what the model thinks."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that the next text completes."""

    def end(self) -> list[Part]:
        """Return the last parts."""


class Found(NamedTuple):
    """What the beginning of a text asks for, and the index behind it."""

    asked: Sequence[Asked]
    end: int


@dataclass(frozen=True)
class CallFormat(ABC):
    """How a family of models writes calls between marks.

    Attributes:
        name: of the format.
        starts: texts that begin a call, wherever they stand.
        leads: texts that begin one only where nothing else was said.
        between: characters that stand between calls, beside blanks.
        marks: all texts of the format that may be special tokens.
    """

    name: str
    starts: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    between: str = ""
    marks: tuple[str, ...] = ()

    @abstractmethod
    def read(self, text: str, *, is_end: bool) -> Found | None:
        """Read what is asked for at the beginning of a text.

        Args:
            text: begins with one of `starts` or `leads`.
            is_end: whether the answer ends with it.

        Returns:
            None if it is not complete.

        Raises:
            NoCallError: nothing is, whatever follows.
        """


class PlainReader:
    """Reads an answer of text alone."""

    is_thinking: ClassVar[bool] = False

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        """See AnswerReader."""
        return []


class MarkedReader:
    """Reads an answer whose calls stand between marks.

    An answer that says nothing but blanks beside its calls says nothing.

    Args:
        call_format: how calls are written.
        names: of the tools that may be called.
        most_calls: so many are shown; None: all.
    """

    is_thinking: ClassVar[bool] = False

    def __init__(
        self, call_format: CallFormat, names: Collection[str], most_calls: int | None = None
    ) -> None:
        self._format = call_format
        self._names = names
        self._most_calls = most_calls
        self._num_calls = 0
        self._held = ""  # text that may begin a call
        self._gap = ""  # blanks, where a call may follow and take them away
        self._is_bare = True  # nothing was said since the beginning, or since the last call
        self._nesting = Nesting()  # of the held text, and how long it is read again at the latest
        self._next_length = 0

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            start = self._start()
            if start < 0:
                self._say(len(self._held) - num_open(self._held, self._format.starts), parts)
                break
            self._say(start, parts)
            if not self._read_call(parts, is_end=False):
                break
        return joined(parts)

    def end(self) -> list[Part]:
        """See AnswerReader."""
        self._next_length = 0
        parts = self.push("")
        if self._start() == 0:
            self._read_call(parts, is_end=True)
        self._say(len(self._held), parts)  # a call that is cut is none, whatever is in it
        if self._gap and not self._num_calls:
            parts.append(Content(self._gap))
        return joined(parts)

    def _read_call(self, parts: list[Part], *, is_end: bool) -> bool:
        """Read what begins like a call, if that is all there; return whether it is.

        It is all read each time: not at each piece, where it goes on for long.
        """
        length = len(self._held)
        if length < self._next_length and self._nesting.is_open(self._held):
            return False
        try:
            found = self._format.read(self._held, is_end=is_end)
        except NoCallError as error:
            found = Found((), error.end)
        if found is None:
            self._next_length = length + length // 8
            return False
        self._nesting, self._next_length = Nesting(), 0
        calls = self._calls_of(found.asked)
        if not calls:
            self._say(max(found.end, 1), parts)
            return True
        for call in calls:
            self._num_calls += 1
            if self._most_calls is None or self._num_calls <= self._most_calls:
                parts.append(call)
        self._held, self._gap, self._is_bare = self._held[found.end :], "", True
        return True

    def _calls_of(self, asked: Sequence[Asked]) -> list[ToolCall]:
        """Make calls; none, if one of them is none."""
        try:
            calls = [make_call(one) for one in asked]
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

    def _say(self, length: int, parts: list[Part]) -> None:
        """Take so many characters of the held text as text."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_bare:
            self._gap += text
            if not self._gap.strip(self._blanks):
                return
            text, self._gap, self._is_bare = self._gap, "", False
        if text:
            parts.append(Content(text))


def num_open(text: str, marks: Sequence[str]) -> int:
    """Return how many of the last characters may begin one of some marks."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


def joined(parts: Sequence[Part]) -> list[Part]:
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


def read_whole(reader: AnswerReader, text: str) -> ReadAnswer:
    """Read an answer that is complete."""
    return summed([*reader.push(text), *reader.end()])


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


def summed(parts: Iterable[Part]) -> ReadAnswer:
    """Sum up the parts of an answer."""
    parts = list(with_whole_calls(parts))
    return ReadAnswer(
        content="".join(part.text for part in parts if isinstance(part, Content)),
        reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls=tuple(part for part in parts if isinstance(part, ToolCall)),
    )
