"""Encodes a turn's input to the token ids that are appended to the session.

Chat messages go through the model's template (`chat_template.py`, `tool_template.py`), and what
clients have written in them stays text (`control_tokens.py`). Which special tokens begin a message
is tried out when the service starts.

Holds its own copy of the tokenizer: encoding runs on a thread, decoding on the event loop.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from inference_svc.core.chat import Tool
from inference_svc.core.errors import InvalidTurnError, NoChatTemplateError
from inference_svc.core.grammar import Grammar
from inference_svc.core.tools.registry import PLAIN, ToolFormat
from inference_svc.core.tools.thoughts import ThoughtMarks, marks_in
from inference_svc.core.turn_window import FrameTokens, common_prefix
from inference_svc.runtime.turns.chat_template import (
    DUMMY_QUESTION,
    OTHER_QUESTION,
    TALKERS,
    ChatTemplate,
    Message,
    dummy_turn,
    message,
)
from inference_svc.runtime.turns.control_tokens import ControlTokens
from inference_svc.runtime.turns.tool_template import ToolTemplate

FRAMED = "a"  # a text to look around
MAX_MARK_TOKENS = 16  # of an opening mark, and the blanks behind it


class TurnText:
    """Encodes the input of turns.

    Attributes:
        chat_problem: why chat messages cannot be taken; "" if they can.
        frame_tokens: the tokens that begin messages of a chat; set by `try_out`.
        thoughts: the marks around what the model thinks; None: it has none; likewise.
        marks: special tokens that calls and thoughts are written with, texts by ids; likewise.
        control: encodes texts that stay texts; only a model with a tokenizer has it.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._eos_ids = eos_ids
        self.frame_tokens = FrameTokens()
        self.thoughts: ThoughtMarks | None = None
        self.marks: dict[int, str] = {}
        self.chat_problem = "the model has no tokenizer"
        if tokenizer is not None:
            self.chat_problem = "the chat template was not tried out"
            self._template = ChatTemplate(self._tokenizer)
            self._tools = ToolTemplate(self._template.render)
            self.control = ControlTokens(self._tokenizer)

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools."""
        return PLAIN if self.chat_problem else self._tools.format

    def grammar_of_call(self, tools: Sequence[Tool]) -> Grammar:
        """Make the grammar of an answer that is one call of one of these tools.

        Raises:
            NoChatTemplateError: the model has no usable template.
        """
        self._check_chat()
        special = {mark: token_id for token_id, mark in self.marks.items()}
        return self._tools.grammar_of_call(tools, special)

    def try_out(self) -> None:
        """Find out whether, and how, the model's chat template can be applied incrementally."""
        if self._tokenizer is None:
            return
        template, control = self._template, self.control
        self.chat_problem = template.try_out()
        control.add_written(template.source)
        if self.chat_problem:
            return
        question = message("user", DUMMY_QUESTION)
        control.add_written(template.base + template.added([question]))
        template.find_roles(control.num_in)
        for before, after in template.surroundings():
            control.add_written(before + after)
            control.add_neighbours(before, after)
        self.frame_tokens = FrameTokens(self._opening_ids(), self._eos_ids)
        self._tools.try_out([self._tokenizer.decode([found]) for found in self._eos_ids])
        if not self._tools.format.is_always:  # that one has channels
            self.thoughts = marks_in(template.source + template.added([question]))
        self.marks = self._find_marks()

    def encode_text(
        self, text: str, *, opens_session: bool, has_special: bool = False
    ) -> list[int]:
        """Encode raw text; the first turn gets the model's begin token, if it uses one.

        Args:
            text: the client's text.
            opens_session: whether the context is empty.
            has_special: whether names of special tokens in it are these tokens, not text.

        Raises:
            NoChatTemplateError: the model has no tokenizer.
            InvalidTurnError: a part that would be a control token cannot be spelled out.
        """
        if self._tokenizer is None:
            raise NoChatTemplateError("the model has no tokenizer", "send token ids")
        bos_id = self._tokenizer.bos_token_id
        begins = (
            opens_session and bos_id is not None and self._tokenizer("").input_ids[:1] == [bos_id]
        )
        encode = self.control.encode if has_special else self.control.encode_plain
        return [bos_id, *encode(text)] if begins else encode(text)

    def encode_framed(self, text: str) -> list[int]:
        """Encode a text between the special tokens that the tokenizer puts around every text.

        Raises:
            NoChatTemplateError: the model has no tokenizer.
            InvalidTurnError: a part that would be a control token cannot be spelled out.
        """
        if self._tokenizer is None:
            raise NoChatTemplateError("the model has no tokenizer", "send token ids")
        inner = self.control.encode_plain(FRAMED)
        framed: list[int] = self._tokenizer(FRAMED).input_ids
        start = next((at for at in range(len(framed)) if framed[at : at + len(inner)] == inner), 0)
        begin, end = framed[:start], framed[start + len(inner) :]
        return [*begin, *self.control.encode_plain(text), *end]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, special ones by their names.

        Raises:
            NoChatTemplateError: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise NoChatTemplateError("the model has no tokenizer", "use the token ids")
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def thought_begun(self, input_ids: Sequence[int]) -> str:
        """Return the mark of a thought that an input ends with; "" if it begins none."""
        if self.thoughts is None:
            return ""
        return self.thoughts.begun_in(self.decode(input_ids[-MAX_MARK_TOKENS:]))

    def encode_chat(
        self,
        messages: Sequence[Message],
        history_ids: Sequence[int],
        tools: Sequence[Message] = (),
        *,
        continues_answer: bool = True,
    ) -> list[int]:
        """Encode new messages and the prompt for the answer.

        Args:
            messages: the turn's messages.
            history_ids: the tokens of the session's context; () if the session is new.
            tools: what the model may call; a context that is there tells of it already.
            continues_answer: whether the context ends with an answer, which is closed first.

        Raises:
            NoChatTemplateError: the model has no usable template.
            InvalidTurnError: the template does not take these messages.
        """
        self._check_chat()
        if not history_ids:
            return self._encode_opening(messages, tools)
        guarded, _, marked = self._guarded(messages)
        results = list(takewhile(lambda one: "tool_call_id" in one, guarded))
        answer = self._tools.asking(results) if results and self._tools.writes_calls else []
        written, _ = self._tools.written(guarded, (), self._template.roles)
        added = self._template.added(written, answer)
        if not continues_answer:
            return self.control.encode(added, marked)
        closings = list(self._template.closings)
        if answer:
            base = self._template.render([dummy_turn()[0], *answer], is_prompt=False)
            closings.insert(0, self._tools.closing_in(base))
        closing = self._unwritten_closing(history_ids[-1], closings)
        return self.control.encode(closing + added, marked)

    def system_tokens(
        self,
        messages: Sequence[Message],
        input_ids: Sequence[int],
        tools: Sequence[Message] = (),
    ) -> int:
        """Count the first tokens of a session that are its system message.

        What the template writes before the first message (a begin token, a message of its own) is
        among them. Where it puts the system message into the first user message, they end inside.

        Args:
            messages: the messages of the session's first turn.
            input_ids: their token ids.
            tools: what the model may call.
        """
        leading = list(takewhile(lambda one: one["role"] not in TALKERS, messages))
        try:
            questions = [
                self._encode_opening([*leading, message("user", text)], tools)
                for text in (DUMMY_QUESTION, OTHER_QUESTION)
            ]
            shared = common_prefix(input_ids, *questions)
            other = [{**one, "content": OTHER_QUESTION} for one in leading]
            without = self._encode_opening([*other, message("user", DUMMY_QUESTION)], tools)
        except InvalidTurnError:  # the template wants other roles: there is no system message
            return 0
        whole_frames = self.frame_tokens.last_start(input_ids[:shared])
        is_inside = bool(leading) and common_prefix(input_ids, without) >= whole_frames
        return shared if is_inside else whole_frames

    def _opening_ids(self) -> frozenset[int]:
        """Find the special tokens that begin a question, and the prompt for an answer."""
        template = self._template
        turn = [*dummy_turn(), message("user", DUMMY_QUESTION)]
        question = template.render(turn, is_prompt=False)
        prompted = template.render(turn, is_prompt=True)
        texts = (question[len(template.base) :], prompted[len(question) :])
        first_ids = {token for text in texts for token in self.control.encode(text)[:1]}
        return frozenset(first_ids & self.control.ids)

    def _check_chat(self) -> None:
        if self.chat_problem:
            raise NoChatTemplateError(self.chat_problem, "send text or token ids")

    def _find_marks(self) -> dict[int, str]:
        marks = (*self._tools.format.marks, *(self.thoughts or ()))
        ids = [self._tokenizer.convert_tokens_to_ids(mark) for mark in marks]
        shown = self.control.ids - self._eos_ids
        return {found: mark for found, mark in zip(ids, marks, strict=True) if found in shown}

    def _encode_opening(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> list[int]:
        guarded, offered, marked = self._guarded(messages, tools)
        written, told = self._tools.written(guarded, offered, self._template.roles)
        return self.control.encode(self._template.render(written, told, is_prompt=True), marked)

    def _guarded(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> tuple[list[Message], list[Message], list[str]]:
        """Return messages and tools with marks in their texts, and the parts these stand for.

        Raises:
            InvalidTurnError: the template does not know a role, or a part cannot be spelled out.
        """
        self._template.check_roles(messages)
        marked: list[str] = []
        try:
            guarded: list[Message] = [
                {
                    name: value if name == "role" else self._guarded_value(value, marked)
                    for name, value in one.items()
                }
                for one in messages
            ]
            return guarded, [self._guarded_value(tool, marked) for tool in tools], marked
        except RecursionError as error:
            raise InvalidTurnError(
                "a tool's schema, or the arguments of a call, are nested too deeply",
                "send flatter ones",
            ) from error

    def _guarded_value(self, value: Any, marked: list[str]) -> Any:
        """Return a value with marks in all texts of it, names of members included."""
        if isinstance(value, str):
            return self.control.guard(value, marked)
        if isinstance(value, Mapping):
            return {
                self.control.guard(name, marked): self._guarded_value(found, marked)
                for name, found in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guarded_value(found, marked) for found in value]
        return value

    def _unwritten_closing(self, last_id: int, closings: Sequence[str]) -> str:
        """Return what the answer lacks of its closing: of the first that has its end token."""
        if last_id in self._eos_ids:
            end_text: str = self._tokenizer.decode([last_id], skip_special_tokens=False)
            for closing in closings:
                _, found, rest = closing.partition(end_text)
                if found:
                    return rest
        return self._template.closings[0]
