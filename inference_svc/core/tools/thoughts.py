"""A model's thoughts before it answers, between an opening and a closing mark. Pure."""

from enum import Enum, auto
from typing import NamedTuple

from inference_svc.core.tools.parts import AnswerReader, OpenCall, Part, Reasoning, num_pending


class ThoughtMarks(NamedTuple):
    """The marks around a model's thoughts.

    Attributes:
        opening: the mark before them, written by the model or by the prompt.
        closing: the mark behind them.
    """

    opening: str
    closing: str

    def open_mark_in(self, prompt: str) -> str:
        """Return the opening mark if a prompt ends with it, so that the answer begins in a thought.

        Else return "".
        """
        return self.opening if prompt.rstrip().endswith(self.opening) else ""


# In the order in which they are searched.
KNOWN_MARKS = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)


def marks_in(template: str) -> ThoughtMarks | None:
    """Return the marks that a template contains; None: none."""
    return next(
        (each for each in KNOWN_MARKS if each.opening in template or each.closing in template),
        None,
    )


class _State(Enum):
    OPENING = auto()  # only blanks so far, and text that may be a mark
    THOUGHT = auto()
    BEHIND = auto()  # only blanks since it was closed
    ANSWER = auto()


class ThoughtReader:
    """Parses an answer that may begin with a thought; another parser gets the text behind it.

    Blanks around a thought are dropped. A thought that is never closed is the whole answer.

    Args:
        marks: the marks around thoughts.
        answer: parses the text behind the thought.
    """

    def __init__(self, marks: ThoughtMarks, answer: AnswerReader) -> None:
        self._marks = marks
        self._answer = answer
        self._held = ""  # blanks, and text that may be a mark
        self._state = _State.OPENING
        self._is_bare = True  # no reasoning yet

    @property
    def is_thinking(self) -> bool:
        """See AnswerReader."""
        return self._state is _State.THOUGHT

    @property
    def last_call(self) -> OpenCall | None:
        """See AnswerReader."""
        return self._answer.last_call

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        self._held += text
        parts: list[Part] = []
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.THOUGHT:
            self._think(parts)
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            self._state = _State.ANSWER if self._held else _State.BEHIND
        if self._state is _State.ANSWER:
            held, self._held = self._held, ""
            parts += self._answer.push(held)
        return parts

    def end(self) -> list[Part]:
        """See AnswerReader."""
        if self._state is _State.THOUGHT:
            parts: list[Part] = []
            self._take(len(self._held), parts)
            return parts
        held = self._held if self._state is _State.OPENING else ""
        return [*self._answer.push(held), *self._answer.end()]

    def _open(self) -> None:
        """Parse the beginning: an opening mark, or text."""
        stripped, mark = self._held.lstrip(), self._marks.opening
        if stripped.startswith(mark):
            self._held, self._state = stripped.removeprefix(mark), _State.THOUGHT
        elif not mark.startswith(stripped):
            self._state = _State.ANSWER

    def _think(self, parts: list[Part]) -> None:
        """Parse the available text of the thought."""
        closing = self._marks.closing
        end = self._held.find(closing)
        if end < 0:
            self._take(len(self._held) - num_pending(self._held, [closing]), parts)
            return
        self._take(end, parts)
        self._held = self._held.lstrip().removeprefix(closing)
        self._state = _State.BEHIND

    def _take(self, length: int, parts: list[Part]) -> None:
        """Emit the first `length` characters of the held text as reasoning, blanks stripped."""
        thought = self._held[:length].rstrip()
        self._held = self._held[len(thought) :]
        if self._is_bare:
            thought = thought.lstrip()
        if thought:
            self._is_bare = False
            parts.append(Reasoning(thought))
