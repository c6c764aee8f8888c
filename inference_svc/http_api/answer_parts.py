"""An answer as its client reads it: text, what was thought, and calls of tools with their ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inference_svc.core.chat import ASSISTANT, Message, ToolCall, ToolUse
from inference_svc.core.tools.bound_calls import BoundCalls
from inference_svc.core.tools.forced import ForcedReader
from inference_svc.core.tools.formats import PLAIN, ToolFormat
from inference_svc.core.tools.parts import (
    AnswerReader,
    CallArguments,
    CallBegun,
    CallEnded,
    Part,
    ReadAnswer,
    collect_answer,
    merge_texts,
)
from inference_svc.core.tools.thoughts import ThoughtMarks, ThoughtReader
from inference_svc.core.turn_record import AnswerToken


@dataclass(frozen=True)
class Reading:
    """How the answers of one turn are read.

    Attributes:
        tool_format: how the model writes calls.
        use: the tools that were offered.
        call_id: makes the id of the answer's call of an index.
        thoughts: the marks around what the model thinks; None: it has none.
        beginning: of the answer, in the client's words: it is none of what is read, and no thought
            can follow it. "": it begins with the model's.
        heads: what an answer that has to be a call has before the arguments, by the tool's name.
        is_bound: whether a grammar keeps the answer to a call, once it has begun one.
    """

    tool_format: ToolFormat = PLAIN
    use: ToolUse = field(default_factory=ToolUse)
    call_id: Callable[[int], str] = "call_{}".format
    thoughts: ThoughtMarks | None = None
    beginning: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    is_bound: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """The texts that the answer is read by: wanted in it, should they be special tokens."""
        return frozenset((*self._format.marks, *(self._thoughts or ())))

    @property
    def calls(self) -> BoundCalls | None:
        """The calls that a grammar keeps the answer to; None: to none."""
        if not (self.is_bound and self._names):
            return None
        return BoundCalls(self.use.callable_tools, self.tool_format.closings, self._answer_reader)

    def reader(self) -> "PartsReader":
        """Make the reader of an answer."""
        return PartsReader(self._answer_reader(), self.call_id)

    def _answer_reader(self) -> AnswerReader:
        made = self._format.reader(self._names, self.use.most_calls, is_bound=self.is_bound)
        if self._thoughts is not None:
            made = ThoughtReader(self._thoughts, made)
        if self.heads:
            made = ForcedReader(self.heads, made)
        return made

    def whole(self, text: str) -> ReadAnswer:
        """Read an answer that is complete."""
        reader = self.reader()
        return collect_answer([*reader.push_text(text), *reader.end()])

    def message(self, text: str) -> Message:
        """Return a whole answer as the message that its client sends back: with its beginning."""
        read = self.whole(text)
        return Message(ASSISTANT, self.beginning + read.content, read.calls)

    @property
    def _thoughts(self) -> ThoughtMarks | None:
        return None if self.beginning else self.thoughts

    @property
    def _format(self) -> ToolFormat:
        """How the answer is written, given whether it may call."""
        return self.tool_format if self.tool_format.is_always or self._names else PLAIN

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.use.callable_tools)


class PartsReader:
    """Reads one answer; its calls have ids.

    Args:
        reader: of its format.
        call_id: makes the id of the call of an index.

    Attributes:
        num_calls: how many calls there were so far.
        num_thought: how many tokens were thought, with the marks that they stand between.
    """

    def __init__(self, reader: AnswerReader, call_id: Callable[[int], str]) -> None:
        self._reader = reader
        self._call_id = call_id
        self.num_calls = 0
        self.num_thought = 0

    def push(self, tokens: Iterable[AnswerToken]) -> list[Part]:
        """Return the parts that the next tokens complete."""
        return merge_texts([part for token in tokens for part in self.push_text(token.text)])

    def push_text(self, text: str) -> list[Part]:
        """Return the parts that the text of the next token completes."""
        was_thinking = self._reader.is_thinking
        parts = self._named(self._reader.push(text))
        self.num_thought += was_thinking or self._reader.is_thinking
        return parts

    def end(self) -> list[Part]:
        """Return the last parts."""
        return self._named(self._reader.end())

    def _named(self, parts: Iterable[Part]) -> list[Part]:
        return [shown for part in parts for shown in self._shown(part)]

    def _shown(self, part: Part) -> Iterator[Part]:
        """Yield a part; a call as what it is of, with its id."""
        if isinstance(part, ToolCall):
            yield self._begun(part.name)
            yield CallArguments(part.arguments)
            yield CallEnded()
        else:
            yield self._begun(part.name) if isinstance(part, CallBegun) else part

    def _begun(self, name: str) -> CallBegun:
        self.num_calls += 1
        return CallBegun(name, self._call_id(self.num_calls - 1))
