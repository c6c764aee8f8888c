"""Encodes a turn's input to the token ids that are appended to the session.

Chat messages go through the model's template (`chat_template.py`, `tool_template.py`), and what
clients have written in them stays text (`control_tokens.py`). Which special tokens begin a message
is tried out when the service starts.

Holds its own copy of the tokenizer: encoding runs on a thread, decoding on the event loop.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from inference_svc.core.chat import Tool
from inference_svc.core.errors import InvalidTurnError, NoChatTemplateError
from inference_svc.core.grammar import Grammar
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.tools.formats import PLAIN, ToolFormat
from inference_svc.core.tools.thoughts import ThoughtMarks, marks_in
from inference_svc.core.truncation import FrameTokens
from inference_svc.runtime.turns.chat_template import (
    DUMMY_ANSWER,
    DUMMY_QUESTION,
    OTHER_QUESTION,
    TALKERS,
    ChatTemplate,
    Frames,
    Message,
    common_prefix,
    dummy_turn,
    message,
)
from inference_svc.runtime.turns.control_tokens import ControlTokens
from inference_svc.runtime.turns.framing import Framing, Settled
from inference_svc.runtime.turns.guarded import Guarded, guarded
from inference_svc.runtime.turns.tool_template import ToolTemplate

FRAMED = "a"  # a text to look around
MAX_MARK_TOKENS = 16  # of an opening mark, and the blanks behind it


class TurnText:
    """Encodes the input of turns.

    Args:
        tokenizer: the model's; None: it has none.
        eos_ids: ids of the tokens that end an answer.
        usual: the chat template's arguments of whoever names none: the operator's.

    Attributes:
        chat_problem: why chat messages cannot be taken; "" if they can.
        frame_tokens: the tokens that begin messages of a chat; set by `try_out`.
        thoughts: the marks around what the model thinks; None: it has none; likewise.
        marks: special tokens that calls and thoughts are written with, texts by ids; likewise.
        control: encodes texts that stay texts; only a model with a tokenizer has it.
    """

    def __init__(
        self, tokenizer: Any | None, eos_ids: frozenset[int], usual: Arguments | None = None
    ) -> None:
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._eos_ids = eos_ids
        self.frame_tokens = FrameTokens()
        self.thoughts: ThoughtMarks | None = None
        self.marks: dict[int, str] = {}
        self.chat_problem = "the model has no tokenizer"
        if tokenizer is not None:
            self.chat_problem = "the chat template was not tried out"
            self._template = ChatTemplate(self._tokenizer, usual or {})
            self._tools = ToolTemplate(self._template.render)
            self._framing = Framing(self._template, self._tools)
            self.control = ControlTokens(self._tokenizer)

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools."""
        return PLAIN if self.chat_problem else self._tools.format

    @property
    def usual(self) -> Arguments:
        """The chat template's arguments of whoever names none."""
        return {} if self._tokenizer is None else self._template.usual

    @property
    def named_roles(self) -> frozenset[str]:
        """Roles of messages of which the template writes who says them; of no tool's."""
        return frozenset() if self.chat_problem else self._template.named_roles

    def framing(self, own: Arguments) -> str:
        """Return a digest of what a client's template arguments make of conversations: `Framing`.

        Returns:
            "" if it is what none make of them, or if there is no template.
        """
        return "" if self.chat_problem else self._framing.of(own)

    def settle(self, own: Arguments, began_with: str | None) -> Settled:
        """Return the template arguments of a turn: `Framing.settle`.

        Raises:
            InvalidTurnError: they are of another conversation.
        """
        return Settled(own, "") if self.chat_problem else self._framing.settle(own, began_with)

    def grammar_of_call(self, tools: Sequence[Tool]) -> Grammar:
        """Make the grammar of an answer that is one call of one of these tools.

        Raises:
            NoChatTemplateError: the model has no usable template.
        """
        self._check_chat()
        special = {mark: token_id for token_id, mark in self.marks.items()}
        return self._tools.grammar_of_call(tools, special)

    def heads_of_calls(self, names: Sequence[str]) -> dict[str, str]:
        """Return what an answer by that grammar has before the arguments, by the tool's name."""
        return {} if self.chat_problem else self._tools.heads_of_calls(names)

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
        control.add_written(template.frames.base + template.added([question]))
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
        return self.thoughts.open_mark_in(self.decode(input_ids[-MAX_MARK_TOKENS:]))

    def encode_chat(
        self,
        messages: Sequence[Message],
        history_ids: Sequence[int],
        tools: Sequence[Message] = (),
        *,
        continues_answer: bool = True,
        arguments: Arguments | None = None,
        beginning: str = "",
        is_prompt: bool = True,
    ) -> list[int]:
        """Encode new messages and the prompt for the answer.

        Args:
            messages: the turn's messages.
            history_ids: the tokens of the session's context; () if the session is new.
            tools: what the model may call; a context that is there tells of it already.
            continues_answer: whether the context ends with an answer, which is closed first.
            arguments: all of the template's; None: the usual ones.
            beginning: of the answer: it stands where an answer without a thought does; "": none.
            is_prompt: whether an answer is to follow.

        Raises:
            NoChatTemplateError: the model has no usable template.
            InvalidTurnError: the template does not take these messages.
        """
        self._check_chat()
        if not history_ids:
            said = self._guarded(messages, tools, arguments, beginning)
            return self._encode_opening(said, is_prompt=is_prompt)
        said = self._guarded(messages, (), arguments, beginning)
        frames = self._frames(said.arguments)
        results = list(takewhile(lambda one: "tool_call_id" in one, said.messages))
        answer = self._tools.asking(results) if results and self._tools.writes_calls else []
        written, _ = self._tools.written(said.messages, (), self._template.roles)

        def write(messages: Sequence[Message], *, is_prompt: bool) -> str:
            return self._template.added(messages, answer, frames=frames, is_prompt=is_prompt)

        added = _up_to_answer(write, written, said.beginning, is_prompt=is_prompt)
        if not continues_answer:
            return self.control.encode(added, said.marked)
        closings = list(frames.closings)
        if answer:
            asked = [dummy_turn()[0], *answer]
            base = self._template.render(asked, is_prompt=False, arguments=frames.arguments)
            closings.insert(0, self._tools.closing_in(base))
        closing = self._unwritten_closing(history_ids[-1], closings, frames)
        return self.control.encode(closing + added, said.marked)

    def system_tokens(
        self,
        messages: Sequence[Message],
        input_ids: Sequence[int],
        tools: Sequence[Message] = (),
        arguments: Arguments | None = None,
    ) -> int:
        """Count the first tokens of a session that are its system message.

        What the template writes before the first message (a begin token, a message of its own) is
        among them. Where it puts the system message into the first user message, they end inside.

        Args:
            messages: the messages of the session's first turn.
            input_ids: their token ids.
            tools: what the model may call.
            arguments: all of the template's; None: the usual ones.
        """

        def opening(messages: Sequence[Message]) -> list[int]:
            return self._encode_opening(self._guarded(messages, tools, arguments))

        leading = list(takewhile(lambda one: one["role"] not in TALKERS, messages))
        try:
            questions = [
                opening([*leading, message("user", text)])
                for text in (DUMMY_QUESTION, OTHER_QUESTION)
            ]
            shared = common_prefix(input_ids, *questions)
            other = [{**one, "content": OTHER_QUESTION} for one in leading]
            without = opening([*other, message("user", DUMMY_QUESTION)])
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
        texts = (question[len(template.frames.base) :], prompted[len(question) :])
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

    def _frames(self, arguments: Arguments) -> Frames:
        """Return what the template writes around answers, with guarded arguments."""
        usual = self._template.frames
        is_usual = arguments == usual.arguments
        return usual if is_usual else self._template.frames_of(arguments)

    def _encode_opening(self, said: Guarded, *, is_prompt: bool = True) -> list[int]:
        written, told = self._tools.written(said.messages, said.tools, self._template.roles)

        def write(messages: Sequence[Message], *, is_prompt: bool) -> str:
            return self._template.render(
                messages, told, is_prompt=is_prompt, arguments=said.arguments
            )

        text = _up_to_answer(write, written, said.beginning, is_prompt=is_prompt)
        return self.control.encode(text, said.marked)

    def _guarded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        arguments: Arguments | None = None,
        beginning: str = "",
    ) -> Guarded:
        """Return what is said with marks in its texts, and the parts these stand for.

        Raises:
            InvalidTurnError: the template does not know a role, or a part cannot be spelled out.
        """
        self._template.check_roles(messages)
        given = self._template.usual if arguments is None else arguments
        return guarded(self.control, messages, tools, given, beginning)

    def _unwritten_closing(self, last_id: int, closings: Sequence[str], frames: Frames) -> str:
        """Return what the answer lacks of its closing: of the first that has its end token."""
        if last_id in self._eos_ids:
            end_text: str = self._tokenizer.decode([last_id], skip_special_tokens=False)
            for closing in closings:
                _, found, rest = closing.partition(end_text)
                if found:
                    return rest
        return frames.closings[0]


def _up_to_answer(
    write: Callable[..., str], messages: Sequence[Message], beginning: str, *, is_prompt: bool
) -> str:
    """Write messages up to where the answer goes on: behind its beginning, if it has one.

    Args:
        write: writes messages: (messages, is_prompt=…).
        messages: what is said before.
        beginning: of the answer; "": none.
        is_prompt: whether an answer is to follow.

    Raises:
        InvalidTurnError: the template does not take them.
    """
    if not beginning:
        return write(messages, is_prompt=is_prompt)
    # Behind another text, for a template may change how the beginning's own begins or ends.
    text = write([*messages, message("assistant", DUMMY_ANSWER)], is_prompt=False)
    before, found, _ = text.rpartition(DUMMY_ANSWER)
    if not found:
        raise InvalidTurnError(
            "the chat template does not write the answer that is begun", "end with another message"
        )
    return before + beginning
