"""The parts of an answer for its client: text, thoughts, and tool calls with their ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inference_svc.core.chat import ASSISTANT, Message, ToolCall, ToolUse
from inference_svc.core.tools.bound_calls import BoundCalls
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
from inference_svc.core.tools.reader import ForcedReader
from inference_svc.core.tools.thoughts import ThoughtMarks, ThoughtReader
from inference_svc.core.turn_record import AnswerToken


@dataclass(frozen=True)
class Reading:
    """How the answer of a turn is parsed.

    Attributes:
        tool_format: the model's format of tool calls.
        use: the offered tools, and how they may be called.
        call_id: returns the id of the answer's call with a given index.
        thoughts: the marks around the model's thoughts; None if it has none.
        beginning: the client's own beginning of the answer, which the parsed text does not
            contain; no thought can follow it. "" if there is none.
        heads: the text before the arguments of a forced call, by the tool's name.
        is_bound: whether a grammar keeps the answer to the format of calls, once a call begins.
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
        """The marks of calls and thoughts, which have to stay in the text as special tokens."""
        return frozenset((*self._format.marks, *(self._thoughts or ())))

    @property
    def calls(self) -> BoundCalls | None:
        """The calls whose format a grammar enforces; None if none is enforced."""
        if not (self.is_bound and self._callable_names):
            return None
        return BoundCalls(self.use.callable_tools, self.tool_format.closings, self._answer_reader)

    def reader(self) -> "PartsReader":
        """Return a new reader of the answer."""
        return PartsReader(self._answer_reader(), self.call_id)

    def _answer_reader(self) -> AnswerReader:
        reader = self._format.reader(
            self._callable_names, self.use.most_calls, is_bound=self.is_bound
        )
        if self._thoughts is not None:
            reader = ThoughtReader(self._thoughts, reader)
        if self.heads:
            reader = ForcedReader(self.heads, reader)
        return reader

    def whole(self, text: str) -> ReadAnswer:
        """Parse a complete answer."""
        reader = self.reader()
        return collect_answer([*reader.push_text(text), *reader.end()])

    def message(self, text: str) -> Message:
        """Return a complete answer, its beginning included, as the client's next history has it."""
        read = self.whole(text)
        return Message(ASSISTANT, self.beginning + read.content, read.calls)

    @property
    def _thoughts(self) -> ThoughtMarks | None:
        return None if self.beginning else self.thoughts

    @property
    def _format(self) -> ToolFormat:
        """The answer's format: plain text if no tool may be called, unless it always applies."""
        return self.tool_format if self.tool_format.is_always or self._callable_names else PLAIN

    @property
    def _callable_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.use.callable_tools)


class PartsReader:
    """Parses one answer as it arrives, and gives its calls their ids.

    Args:
        reader: the reader of the answer's format.
        call_id: returns the id of the call with a given index.

    Attributes:
        num_calls: number of calls so far.
        num_thought: number of thought tokens so far, the marks around them included.
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
        parts = self._with_ids(self._reader.push(text))
        self.num_thought += was_thinking or self._reader.is_thinking
        return parts

    def end(self) -> list[Part]:
        """Return the parts that the end of the answer completes."""
        return self._with_ids(self._reader.end())

    def _with_ids(self, parts: Iterable[Part]) -> list[Part]:
        return [shown for part in parts for shown in self._expand(part)]

    def _expand(self, part: Part) -> Iterator[Part]:
        """Yield a part; a whole call as its beginning, arguments and end, with its id."""
        if isinstance(part, ToolCall):
            yield self._begin_call(part.name)
            yield CallArguments(part.arguments)
            yield CallEnded()
        else:
            yield self._begin_call(part.name) if isinstance(part, CallBegun) else part

    def _begin_call(self, name: str) -> CallBegun:
        self.num_calls += 1
        return CallBegun(name, self._call_id(self.num_calls - 1))
