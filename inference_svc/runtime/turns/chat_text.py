"""Encodes a turn's input to the token ids that are appended to the session.

Chat messages go through the model's template, and what clients have written in them stays text
(`control_tokens.py`). A session's tokens only grow, so the template is applied incrementally: what
new messages add is the template of (dummy turn, new messages) less the template of the dummy turn.
Whether that is so, what is written around messages, which roles there are, and which special
tokens begin a message, is tried out when the service starts.

Holds its own copy of the tokenizer: encoding runs on a thread, decoding on the event loop.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from inference_svc.core.errors import InvalidTurnError, NoChatTemplateError
from inference_svc.core.turn_window import FrameTokens, common_prefix
from inference_svc.runtime.turns.control_tokens import ControlTokens

DUMMY_QUESTION = "ping 7f3a"
DUMMY_ANSWER = "pong 9c1e"
OTHER_QUESTION = "what 5b20"  # begins with another token than DUMMY_QUESTION
NO_ROLE = "zebra 3d7c"  # a role that no template knows
MAX_ROLES = 256  # words of a template, that are tried as roles
ALWAYS_TRIED = ("system", "user", "assistant", "tool")
_WORDS = re.compile(r"""(["'])([A-Za-z_][\w-]{0,31})\1""")
Message = Mapping[str, str]  # role, content
TALKERS = frozenset({"user", "assistant"})  # roles that end what leads a conversation


class ChatTemplate:
    """A model's chat template; see the module docstring.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        source: the template's text; "" if there is none.
        base: the dummy turn as the template writes it; set by `try_out`.
        closing: the text it writes after an answer, end-of-turn token included; set by `try_out`.
        roles: the roles that messages may have; set by `find_roles`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        has_any = bool(getattr(tokenizer, "chat_template", None))
        self.source: str = tokenizer.get_chat_template() if has_any else ""

    def try_out(self) -> str:
        """Find out how the template is applied; return why it cannot be, "" if it can."""
        if not self.source:
            return "the model has no chat template"
        try:
            self.base = self.render(dummy_turn(), is_prompt=False)
            self.closing = self.base.rpartition(DUMMY_ANSWER)[2]
            self.added([message("user", DUMMY_QUESTION)])
        except InvalidTurnError as error:
            return error.message
        return "" if DUMMY_ANSWER in self.base else "the chat template does not repeat answers"

    def render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        """Return messages as the template writes them, with or without the prompt for an answer.

        Raises:
            InvalidTurnError: the template does not take them.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=is_prompt,
            )
        except Exception as error:  # a template is a program of the model's author
            raise InvalidTurnError(
                f"the chat template refuses these messages ({' '.join(str(error).split()):.120})",
                "send the roles and the order that the model expects",
            ) from error
        return text

    def added(self, messages: Sequence[Message]) -> str:
        """Return the text that messages after an answer add, with the prompt for the next one.

        Raises:
            InvalidTurnError: the template does not take them, or not after an answer.
        """
        text = self.render([*dummy_turn(), *messages], is_prompt=True)
        if not text.startswith(self.base):
            raise InvalidTurnError(
                "the chat template rewrites earlier messages when these are added",
                "send other roles, or text or token ids",
            )
        return text[len(self.base) :]

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raise InvalidTurnError unless the template knows the roles of all messages.

        A role is written into the prompt as it is: an unknown one could forge structure.
        """
        for one in messages:
            if one["role"] not in self.roles:
                raise InvalidTurnError(
                    f"role {one['role'][:40]!r} is none that the chat template knows",
                    f"send one of {', '.join(self.roles)}",
                )

    # -------------------------------------------------------------------------------------- roles

    def find_roles(self, num_control: Callable[[str], int]) -> None:
        """Set `roles`: those that the template treats as it treats no other.

        A template that writes any role's name where it stands knows the usual ones, if they give
        as many control tokens as "user" does. The roles of the dummy turn it always knows.

        Args:
            num_control: counts control tokens in a rendered text.
        """
        words = dict.fromkeys([*ALWAYS_TRIED, *(found[1] for found in _WORDS.findall(self.source))])
        others = [self._tried(NO_ROLE, number) for number in range(len(_CONVERSATIONS))]
        self.roles: tuple[str, ...] = tuple(
            role for role in list(words)[:MAX_ROLES] if self._knows(role, others, num_control)
        )

    def _knows(self, role: str, others: list[str], num_control: Callable[[str], int]) -> bool:
        for number, other in enumerate(others):
            text = self._tried(role, number)
            if DUMMY_QUESTION not in text:
                continue
            if role in {"user", "assistant"}:
                return True
            if text.casefold() != other.casefold().replace(NO_ROLE, role):
                return True
            if NO_ROLE in other.casefold() and role in ALWAYS_TRIED:
                return num_control(text) == num_control(self._tried("user", number) or text)
        return False

    def _tried(self, role: str, number: int) -> str:
        """Render a conversation with one message of a role; "" if it is refused."""
        try:
            return self.render(
                _CONVERSATIONS[number](message(role, DUMMY_QUESTION)), is_prompt=False
            )
        except InvalidTurnError:
            return ""

    def surroundings(self) -> Iterator[tuple[str, str]]:
        """Yield what the template writes before and after a message's text, for each role."""
        for role in self.roles:
            for number in range(len(_CONVERSATIONS)):
                before, found, after = self._tried(role, number).partition(DUMMY_QUESTION)
                if found:
                    yield before, after


def message(role: str, content: str) -> Message:
    """Make a message as templates take it."""
    return {"role": role, "content": content}


def dummy_turn() -> list[Message]:
    """Make a question and its answer."""
    return [message("user", OTHER_QUESTION), message("assistant", DUMMY_ANSWER)]


# Conversations with one message of a role: alone, before a question, after one, after an answer.
_CONVERSATIONS: tuple[Callable[[Message], list[Message]], ...] = (
    lambda one: [one],
    lambda one: [one, message("user", OTHER_QUESTION)],
    lambda one: [message("user", OTHER_QUESTION), one],
    lambda one: [*dummy_turn(), one],
)


class TurnText:
    """Encodes the input of turns.

    Attributes:
        chat_problem: why chat messages cannot be taken; "" if they can.
        frame_tokens: the tokens that begin messages of a chat; set by `try_out`.
        control: encodes texts that stay texts; only a model with a tokenizer has it.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._eos_ids = eos_ids
        self.frame_tokens = FrameTokens()
        self.chat_problem = "the model has no tokenizer"
        if tokenizer is not None:
            self.chat_problem = "the chat template was not tried out"
            self._template = ChatTemplate(self._tokenizer)
            self.control = ControlTokens(self._tokenizer)

    def try_out(self) -> None:
        """Find out whether, and how, the model's chat template can be applied incrementally."""
        if self._tokenizer is None:
            return
        template, control = self._template, self.control
        self.chat_problem = template.try_out()
        control.add_written(template.source)
        if self.chat_problem:
            return
        control.add_written(template.base + template.added([message("user", DUMMY_QUESTION)]))
        template.find_roles(control.num_in)
        for before, after in template.surroundings():
            control.add_written(before + after)
            control.add_neighbours(before, after)
        self.frame_tokens = FrameTokens(self._opening_ids(), self._eos_ids)

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

    def encode_chat(
        self,
        messages: Sequence[Message],
        history_ids: Sequence[int],
        *,
        continues_answer: bool = True,
    ) -> list[int]:
        """Encode new messages and the prompt for the answer.

        Args:
            messages: the turn's messages.
            history_ids: the tokens of the session's context; () if the session is new.
            continues_answer: whether the context ends with an answer, which is closed first.

        Raises:
            NoChatTemplateError: the model has no usable template.
            InvalidTurnError: the template does not take these messages.
        """
        if self.chat_problem:
            raise NoChatTemplateError(self.chat_problem, "send text or token ids")
        if not history_ids:
            return self._encode_opening(messages)
        closing = self._unwritten_closing(history_ids[-1]) if continues_answer else ""
        guarded, marked = self._guarded(messages)
        return self.control.encode(closing + self._template.added(guarded), marked)

    def system_tokens(self, messages: Sequence[Message], input_ids: Sequence[int]) -> int:
        """Count the first tokens of a session that are its system message.

        What the template writes before the first message (a begin token, a message of its own) is
        among them. Where it puts the system message into the first user message, they end inside.

        Args:
            messages: the messages of the session's first turn.
            input_ids: their token ids.
        """
        leading = list(takewhile(lambda one: one["role"] not in TALKERS, messages))
        try:
            questions = [
                self._encode_opening([*leading, message("user", text)])
                for text in (DUMMY_QUESTION, OTHER_QUESTION)
            ]
            shared = common_prefix(input_ids, *questions)
            other = [{**one, "content": OTHER_QUESTION} for one in leading]
            without = self._encode_opening([*other, message("user", DUMMY_QUESTION)])
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

    def _encode_opening(self, messages: Sequence[Message]) -> list[int]:
        guarded, marked = self._guarded(messages)
        return self.control.encode(self._template.render(guarded, is_prompt=True), marked)

    def _guarded(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Return messages with marks in their texts, and the parts that the marks stand for.

        Raises:
            InvalidTurnError: the template does not know a role, or a part cannot be spelled out.
        """
        self._template.check_roles(messages)
        marked: list[str] = []
        guarded: list[Message] = [
            {
                name: value if name == "role" else self.control.guard(value, marked)
                for name, value in one.items()
            }
            for one in messages
        ]
        return guarded, marked

    def _unwritten_closing(self, last_id: int) -> str:
        """Return the part of the closing that the answer lacks: all but its end token, if any."""
        if last_id not in self._eos_ids:
            return self._template.closing
        end_text: str = self._tokenizer.decode([last_id], skip_special_tokens=False)
        _, found, rest = self._template.closing.partition(end_text)
        return rest if found else self._template.closing
