"""A turn's input to the token ids that are appended to the session.

A session's tokens only grow, so the chat template is applied incrementally: what new messages add
is the template of (dummy turn, new messages) less the template of the dummy turn. Whether a model's
template allows that is tried out when the service starts, and which special tokens begin a message.

Holds its own copy of the tokenizer: encoding runs on a thread, decoding on the event loop.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from inference_svc.core.chat_frames import FrameTokens, common_prefix
from inference_svc.core.errors import InvalidTurnError, NoChatTemplateError

DUMMY_QUESTION = "ping 7f3a"
DUMMY_ANSWER = "pong 9c1e"
OTHER_QUESTION = "what 5b20"  # begins with another token than DUMMY_QUESTION
TALKERS = frozenset({"user", "assistant"})  # roles that end what leads a conversation
Message = Mapping[str, str]  # role, content


class TurnText:
    """Encodes the input of turns.

    Attributes:
        chat_problem: why chat messages cannot be taken; "" if they can.
        frame_tokens: where messages of a chat begin; set by `try_out`.
        _closing: what the template writes after an answer, end-of-turn token included.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._eos_ids = eos_ids
        self._base = ""
        self._closing = ""
        self.frame_tokens = FrameTokens()
        self.chat_problem = "the model has no tokenizer" if tokenizer is None else ""

    def try_out(self) -> None:
        """Find out whether, and how, the model's chat template can be applied incrementally."""
        if self._tokenizer is None:
            return
        if not getattr(self._tokenizer, "chat_template", None):
            self.chat_problem = "the model has no chat template"
            return
        try:
            self._base = self._render(_dummy_turn(), is_prompt=False)
            self._closing = self._base.rpartition(DUMMY_ANSWER)[2]
            self._added_text([{"role": "user", "content": DUMMY_QUESTION}])
        except InvalidTurnError as error:
            self.chat_problem = error.message
        if DUMMY_ANSWER not in self._base:
            self.chat_problem = "the chat template does not repeat answers"
        if not self.chat_problem:
            self.frame_tokens = FrameTokens(self._opening_ids(), self._eos_ids)

    def encode_text(self, text: str, *, opens_session: bool) -> list[int]:
        """Encode raw text; the first turn gets the model's begin token, if it uses one.

        Raises:
            NoChatTemplateError: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise NoChatTemplateError("the model has no tokenizer", "send token ids")
        bos_id = self._tokenizer.bos_token_id
        begins = (
            opens_session and bos_id is not None and self._tokenizer("").input_ids[:1] == [bos_id]
        )
        return [bos_id, *self._encode(text)] if begins else self._encode(text)

    def encode_chat(
        self,
        messages: Sequence[Message],
        history_ids: Sequence[int],
        *,
        continues_answer: bool = True,
    ) -> list[int]:
        """Encode new messages and what asks for the answer.

        Args:
            messages: of the turn.
            history_ids: of the session's context; the first messages of one are rendered whole.
            continues_answer: the context ends with an answer, which is closed first.

        Raises:
            NoChatTemplateError: the model has no usable template.
            InvalidTurnError: the template does not take these messages.
        """
        if self.chat_problem:
            raise NoChatTemplateError(self.chat_problem, "send text or token ids")
        if not history_ids:
            return self._encode_opening(messages)
        closing = self._unwritten_closing(history_ids[-1]) if continues_answer else ""
        return self._encode(closing + self._added_text(messages))

    def system_tokens(self, messages: Sequence[Message], input_ids: Sequence[int]) -> int:
        """Count the first tokens of a session that are its system message.

        What the template writes before the first message (a begin token, a message of its own) is
        among them. Where it puts the system message into the first user message, they end inside.

        Args:
            messages: of the session's first turn.
            input_ids: how they were encoded.
        """
        leading = list(takewhile(lambda message: message["role"] not in TALKERS, messages))
        try:
            questions = [
                self._encode_opening([*leading, _question(text)])
                for text in (DUMMY_QUESTION, OTHER_QUESTION)
            ]
            shared = common_prefix(input_ids, *questions)
            other = [{**message, "content": OTHER_QUESTION} for message in leading]
            without = self._encode_opening([*other, _question(DUMMY_QUESTION)])
        except InvalidTurnError:  # the template wants other roles: there is no system message
            return 0
        whole_frames = self.frame_tokens.last_start(input_ids[:shared])
        is_inside = bool(leading) and common_prefix(input_ids, without) >= whole_frames
        return shared if is_inside else whole_frames

    def encode_piece(self, text: str) -> list[int]:
        """Encode the part of a token that stands before a stop string."""
        return self._encode(text)

    def _opening_ids(self) -> frozenset[int]:
        """Special tokens that begin a question, and the prompt for an answer."""
        turn = [*_dummy_turn(), _question(DUMMY_QUESTION)]
        question = self._render(turn, is_prompt=False)
        prompted = self._render(turn, is_prompt=True)
        texts = (question[len(self._base) :], prompted[len(question) :])
        first_ids = {token for text in texts for token in self._encode(text)[:1]}
        return frozenset(first_ids.intersection(self._tokenizer.added_tokens_decoder))

    def _encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self._render(messages, is_prompt=True))

    def _unwritten_closing(self, last_id: int) -> str:
        """What the answer did not write of the closing: all, unless it has its end token."""
        if last_id not in self._eos_ids:
            return self._closing
        end_text: str = self._tokenizer.decode([last_id], skip_special_tokens=False)
        _, found, rest = self._closing.partition(end_text)
        return rest if found else self._closing

    def _added_text(self, messages: Sequence[Message]) -> str:
        text = self._render([*_dummy_turn(), *messages], is_prompt=True)
        if not text.startswith(self._base):
            raise InvalidTurnError(
                "the chat template rewrites earlier messages when these are added",
                "send other roles, or text or token ids",
            )
        return text[len(self._base) :]

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
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

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return token_ids


def _question(text: str) -> Message:
    return {"role": "user", "content": text}


def _dummy_turn() -> list[Message]:
    return [
        _question(DUMMY_QUESTION),
        {"role": "assistant", "content": DUMMY_ANSWER},
    ]
