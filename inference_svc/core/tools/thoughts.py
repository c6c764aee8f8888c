"""What a model thinks before it answers, between an opening and a closing mark. Pure."""

from enum import Enum, auto
from typing import NamedTuple

from inference_svc.core.tools.parts import AnswerReader, OpenCall, Part, Reasoning
from inference_svc.core.tools.reader import num_pending


class ThoughtMarks(NamedTuple):
    """The marks around what a model thinks.

    Attributes:
        opening: stands before it: written by the model, or by the prompt.
        closing: stands behind it.
    """

    opening: str
    closing: str

    def open_mark_in(self, prompt: str) -> str:
        """Return the mark, if a prompt ends with it: the answer begins inside a thought."""
        return self.opening if prompt.rstrip().endswith(self.opening) else ""


# In the order in which they are looked for.
KNOWN_MARKS = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)


def marks_in(template: str) -> ThoughtMarks | None:
    """Return the marks that a template knows; None: none."""
    return next(
        (one for one in KNOWN_MARKS if one.opening in template or one.closing in template), None
    )


class _State(Enum):
    OPENING = auto()  # nothing came but blanks, and what may be a mark
    THOUGHT = auto()
    BEHIND = auto()  # nothing came but blanks since it was closed
    ANSWER = auto()


class ThoughtReader:
    """Reads an answer that may begin with a thought; another reader reads what follows it.

    The blanks around a thought are nobody's. One that is never closed is the whole answer.

    Args:
        marks: around thoughts.
        answer: reads what the model says.
    """

    def __init__(self, marks: ThoughtMarks, answer: AnswerReader) -> None:
        self._marks = marks
        self._answer = answer
        self._held = ""  # blanks, and what may be a mark
        self._state = _State.OPENING
        self._is_bare = True  # nothing was thought

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
            said, self._held = self._held, ""
            parts += self._answer.push(said)
        return parts

    def end(self) -> list[Part]:
        """See AnswerReader."""
        if self._state is _State.THOUGHT:
            parts: list[Part] = []
            self._take(len(self._held), parts)
            return parts
        said = self._held if self._state is _State.OPENING else ""
        return [*self._answer.push(said), *self._answer.end()]

    def _open(self) -> None:
        """Read the beginning."""
        said, mark = self._held.lstrip(), self._marks.opening
        if said.startswith(mark):
            self._held, self._state = said.removeprefix(mark), _State.THOUGHT
        elif not mark.startswith(said):
            self._state = _State.ANSWER

    def _think(self, parts: list[Part]) -> None:
        """Read what there is of the thought."""
        closing = self._marks.closing
        end = self._held.find(closing)
        if end < 0:
            self._take(len(self._held) - num_pending(self._held, [closing]), parts)
            return
        self._take(end, parts)
        self._held = self._held.lstrip().removeprefix(closing)
        self._state = _State.BEHIND

    def _take(self, length: int, parts: list[Part]) -> None:
        """Take so many characters of the held text as thought, but for the blanks around it."""
        thought = self._held[:length].rstrip()
        self._held = self._held[len(thought) :]
        if self._is_bare:
            thought = thought.lstrip()
        if thought:
            self._is_bare = False
            parts.append(Reasoning(thought))
