"""Encodes a turn's input to the token ids that are appended to the session.

Chat messages go through the model's template (`chat_template.py`, `tool_template.py`); the texts of
clients in them never become control tokens (`control_tokens.py`). The special tokens that begin a
message are found by trial when the service starts.

It has its own copy of the tokenizer: encoding runs on a thread, decoding on the event loop.
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
from inference_svc.runtime.turns.control_tokens import ControlTokens, Guarded, guarded
from inference_svc.runtime.turns.framing import Framing, Settled
from inference_svc.runtime.turns.tool_template import ToolTemplate

FRAMED = "a"  # a text around which the tokenizer's special tokens are looked for
MAX_MARK_TOKENS = 16  # most tokens of an opening mark and the blanks behind it


class TurnText:
    """Encodes the input of turns.

    Args:
        tokenizer: the model's tokenizer; None: it has none.
        eos_ids: ids of the tokens that end an answer.
        usual: the operator's arguments of the chat template, for turns that name no others.

    Attributes:
        chat_problem: why chat messages cannot be encoded; "" if they can.
        frame_tokens: the tokens that begin messages of a chat; set by `try_out`.
        thoughts: the marks around the model's thoughts; None: it writes none; set by `try_out`.
        marks: texts of the special tokens that tool calls and thoughts are written with, by id; set
            by `try_out`.
        control: encodes texts that must not become control tokens; exists only with a tokenizer.
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
            self.chat_problem = "the chat template was not tested"
            self._template = ChatTemplate(self._tokenizer, usual or {})
            self._tools = ToolTemplate(self._template.render)
            self._framing = Framing(self._template, self._tools)
            self.control = ControlTokens(self._tokenizer)

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        return PLAIN if self.chat_problem else self._tools.format

    @property
    def usual(self) -> Arguments:
        """The operator's arguments of the chat template."""
        return {} if self._tokenizer is None else self._template.usual

    @property
    def named_roles(self) -> frozenset[str]:
        """Roles of which the template writes the names of messages' authors; no tool's role."""
        return frozenset() if self.chat_problem else self._template.named_roles

    def framing(self, own: Arguments) -> str:
        """Return a digest of how template arguments change conversations; see `Framing.of`.

        Returns:
            The digest; "" if they change nothing, or if there is no template.
        """
        return "" if self.chat_problem else self._framing.of(own)

    def settle(self, own: Arguments, began_with: str | None) -> Settled:
        """Return the template arguments of a turn; see `Framing.settle`.

        Raises:
            InvalidTurnError: they belong to another conversation.
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
        """Return the text before the arguments in an answer by that grammar, by the tool's name."""
        return {} if self.chat_problem else self._tools.heads_of_calls(names)

    def try_out(self) -> None:
        """Find out whether and how the model's chat template can be applied incrementally."""
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
        if not self._tools.format.is_always:  # a format that is always read has channels instead
            self.thoughts = marks_in(template.source + template.added([question]))
        self.marks = self._find_marks()

    def encode_text(
        self, text: str, *, opens_session: bool, has_special: bool = False
    ) -> list[int]:
        """Encode raw text; a session's first text gets the model's begin token, if it uses one.

        Args:
            text: the client's text.
            opens_session: whether the context is empty.
            has_special: whether names of special tokens in the text become these tokens.

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

    def num_tokens(self, text: str, *, has_special: bool) -> int:
        """Count the tokens of a text by itself; `has_special`: see `encode_text`."""
        return len(self.control.encode(text) if has_special else self.control.encode_plain(text))

    def encode_framed(self, text: str) -> list[int]:
        """Encode a text, with the special tokens that the tokenizer puts around every text.

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
            raise NoChatTemplateError("the model has no tokenizer", "read the token ids instead")
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def thought_begun(self, input_ids: Sequence[int]) -> str:
        """Return the opening mark of a thought with which an input ends; "" if it does not."""
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
            tools: the tools that the model may call; only a new session needs them, a context
                lists them already.
            continues_answer: whether the context ends with an answer, which is closed first.
            arguments: all of the template's arguments; None: the usual ones.
            beginning: the beginning of the answer, which is written in place of its prompt, without
                a thought; "": none.
            is_prompt: whether to write the prompt for an answer.

        Raises:
            NoChatTemplateError: the model has no usable template.
            InvalidTurnError: the template refuses these messages.
        """
        self._check_chat()
        if not history_ids:
            safe = self._guarded(messages, tools, arguments, beginning)
            return self._encode_opening(safe, is_prompt=is_prompt)
        safe = self._guarded(messages, (), arguments, beginning)
        frames = self._frames(safe.arguments)
        results = list(takewhile(lambda message: "tool_call_id" in message, safe.messages))
        answer = self._tools.calling_answer(results) if results and self._tools.writes_calls else []
        adapted, _ = self._tools.adapt(safe.messages, (), self._template.roles)

        def write(messages: Sequence[Message], *, is_prompt: bool) -> str:
            return self._template.added(messages, answer, frames=frames, is_prompt=is_prompt)

        added = _up_to_answer(write, adapted, safe.beginning, is_prompt=is_prompt)
        if not continues_answer:
            return self.control.encode(added, safe.marked)
        closings = list(frames.closings)
        if answer:
            called = [dummy_turn()[0], *answer]
            base = self._template.render(called, is_prompt=False, arguments=frames.arguments)
            closings.insert(0, self._tools.closing_in(base))
        closing = self._unwritten_closing(history_ids[-1], closings, frames)
        return self.control.encode(closing + added, safe.marked)

    def system_tokens(
        self,
        messages: Sequence[Message],
        input_ids: Sequence[int],
        tools: Sequence[Message] = (),
        arguments: Arguments | None = None,
    ) -> int:
        """Count the first tokens of a session that are its system message.

        They include all that the template writes before the first message (a begin token, a message
        of its own). Where it puts the system message into the first user message, they end inside
        that message.

        Args:
            messages: the messages of the session's first turn.
            input_ids: their token ids.
            tools: the tools that the model may call.
            arguments: all of the template's arguments; None: the usual ones.
        """

        def opening(messages: Sequence[Message]) -> list[int]:
            return self._encode_opening(self._guarded(messages, tools, arguments))

        leading = list(takewhile(lambda message: message["role"] not in TALKERS, messages))
        try:
            questions = [
                opening([*leading, message("user", text)])
                for text in (DUMMY_QUESTION, OTHER_QUESTION)
            ]
            shared = common_prefix(input_ids, *questions)
            other = [{**leader, "content": OTHER_QUESTION} for leader in leading]
            without = opening([*other, message("user", DUMMY_QUESTION)])
        except InvalidTurnError:  # the template takes only other roles: there is no system message
            return 0
        whole_frames = self.frame_tokens.last_start(input_ids[:shared])
        is_inside = bool(leading) and common_prefix(input_ids, without) >= whole_frames
        return shared if is_inside else whole_frames

    def _opening_ids(self) -> frozenset[int]:
        """Find the special tokens that begin a question, and the one that begins an answer."""
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
        """Find the marks of calls and thoughts that are special tokens, by id."""
        marks = (*self._tools.format.marks, *(self.thoughts or ()))
        ids = [self._tokenizer.convert_tokens_to_ids(mark) for mark in marks]
        shown = self.control.ids - self._eos_ids
        return {found: mark for found, mark in zip(ids, marks, strict=True) if found in shown}

    def _frames(self, arguments: Arguments) -> Frames:
        """Return the texts that the template writes around answers, with guarded arguments."""
        usual = self._template.frames
        is_usual = arguments == usual.arguments
        return usual if is_usual else self._template.frames_of(arguments)

    def _encode_opening(self, safe: Guarded, *, is_prompt: bool = True) -> list[int]:
        """Encode the messages that open a session."""
        adapted, listed = self._tools.adapt(safe.messages, safe.tools, self._template.roles)

        def write(messages: Sequence[Message], *, is_prompt: bool) -> str:
            return self._template.render(
                messages, listed, is_prompt=is_prompt, arguments=safe.arguments
            )

        text = _up_to_answer(write, adapted, safe.beginning, is_prompt=is_prompt)
        return self.control.encode(text, safe.marked)

    def _guarded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        arguments: Arguments | None = None,
        beginning: str = "",
    ) -> Guarded:
        """Put marks into a turn's texts in place of parts that would become control tokens.

        Raises:
            InvalidTurnError: the template does not know a role, or a part cannot be spelled out.
        """
        self._template.check_roles(messages)
        chosen = self._template.usual if arguments is None else arguments
        return guarded(self.control, messages, tools, chosen, beginning)

    def _unwritten_closing(self, last_id: int, closings: Sequence[str], frames: Frames) -> str:
        """Return the part of an answer's closing that follows its last token.

        If that is an end token, this is the rest of the first closing that contains it.
        """
        if last_id in self._eos_ids:
            end_text: str = self._tokenizer.decode([last_id], skip_special_tokens=False)
            for closing in closings:
                _, found, after = closing.partition(end_text)
                if found:
                    return after
        return frames.closings[0]


def _up_to_answer(
    write: Callable[..., str], messages: Sequence[Message], beginning: str, *, is_prompt: bool
) -> str:
    """Render messages up to where the model continues: behind the answer's beginning, if any.

    Args:
        write: renders messages: (messages, is_prompt=…).
        messages: the messages before the answer.
        beginning: the beginning of the answer; "": none.
        is_prompt: whether to write the prompt for an answer.

    Raises:
        InvalidTurnError: the template refuses them.
    """
    if not beginning:
        return write(messages, is_prompt=is_prompt)
    # Rendered with a dummy answer: a template may change the first or last characters of another.
    text = write([*messages, message("assistant", DUMMY_ANSWER)], is_prompt=False)
    before, found, _ = text.rpartition(DUMMY_ANSWER)
    if not found:
        raise InvalidTurnError(
            "the chat template does not write the beginning of the answer",
            "end with another message",
        )
    return before + beginning
