"""What an answer is made of as it is read: text, what was thought, and calls. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from inference_svc.core.chat import ToolCall


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
