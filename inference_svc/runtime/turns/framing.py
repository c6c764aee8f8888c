"""Finds the arguments of a chat template that change a whole conversation, not only one prompt.

A template may write an argument into the messages (gpt-oss: how much to think, in the system
message), or behind all of them, where the answer begins (Qwen3: an empty thought). The former
belongs to a conversation, as its tools do; the latter belongs to one turn. The two are told apart
by trial: some conversations are rendered with the arguments and without them, each without the
prompt for an answer.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, Message
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import Arguments, canonical_arguments, read_arguments
from inference_svc.runtime.turns.chat_template import (
    DUMMY_QUESTION,
    ChatTemplate,
    dummy_turn,
    message,
)
from inference_svc.runtime.turns.tool_template import PROBE, PROBE_CALL, RESULT, ToolTemplate

MAX_KNOWN = 256  # sets of arguments whose digests are cached
_CALL = Message(ASSISTANT, "", (PROBE_CALL,)).as_template()
_RESULT = Message(TOOL, RESULT, (), PROBE_CALL.call_id, PROBE.name).as_template()
_LEADING = message(SYSTEM, "say 4f1d")
_QUESTION = message("user", DUMMY_QUESTION)
_ANSWERED = [*dummy_turn(), _QUESTION]
_CALLED = [_QUESTION, _CALL, _RESULT]


class Settled(NamedTuple):
    """The arguments of a turn.

    Attributes:
        arguments: all arguments that the template gets.
        recorded: the arguments as the turn's record has them: see `TurnRecord.template_arguments`.
    """

    arguments: Arguments
    recorded: str


class Framing:
    """Tells template arguments that change conversations from those that change only prompts.

    Args:
        template: the model's chat template, after `try_out`.
        tools: how the template writes tools, after `try_out`.
    """

    def __init__(self, template: ChatTemplate, tools: ToolTemplate) -> None:
        self._template = template
        self._tools = tools
        self._find = lru_cache(MAX_KNOWN)(self._compute)
        self._plain = b""  # the digest without any arguments; b"": not computed yet

    def of(self, own: Arguments) -> str:
        """Return a digest of how a client's arguments change conversations.

        Args:
            own: the client's arguments; they override the operator's usual ones.

        Returns:
            The digest; "" if they change nothing.
        """
        return self._find(canonical_arguments({**self._template.usual, **own}))

    def settle(self, own: Arguments, began_with: str | None) -> Settled:
        """Return a turn's arguments: the client's, over those that its session began with.

        The session's arguments count only if it would have begun differently without them: a client
        that sends whole conversations sends the arguments that it means.

        Args:
            own: the client's arguments.
            began_with: the arguments in the record of the session's first turn; None: this turn is
                the first.

        Raises:
            InvalidTurnError: with these arguments the session would have begun differently.
        """
        arguments, framing = {**self._template.usual, **own}, self.of(own)
        if began_with is None:
            return Settled(arguments, canonical_arguments(arguments) if framing else "")
        begun = self._find(began_with)
        if framing != begun:
            arguments = {**read_arguments(began_with), **own}
            if self._find(canonical_arguments(arguments)) != begun:
                raise InvalidTurnError(
                    "with these arguments the chat template writes the conversation differently",
                    "send the arguments that the session began with, or none, or begin another "
                    "session",
                )
        return Settled(arguments, "")

    def _compute(self, canonical: str) -> str:
        """Return the digest of arguments in their canonical form; "" if they change nothing."""
        if not canonical:
            return ""
        self._plain = self._plain or self._digest({})
        digest = self._digest(read_arguments(canonical))
        return "" if digest == self._plain else digest.hex()

    def _digest(self, arguments: Arguments) -> bytes:
        """Return a digest of conversations as the template writes them, independent of the day."""
        digest = hashlib.blake2b(digest_size=16)
        # Templates may write today's date: `str` returns the date's format in place of the date.
        for text in self._texts({**arguments, "strftime_now": str}):
            digest.update(len(text).to_bytes(8, "little") + text.encode())
        return digest.digest()

    def _texts(self, arguments: Arguments) -> Iterator[str]:
        """Yield conversations with and without a system message and tools; "" for a refused one."""
        offered = [PROBE.as_template()]
        for leading in ((), (_LEADING,)):
            for turns, tools in ((_ANSWERED, ()), (_ANSWERED, offered), (_CALLED, offered)):
                messages, listed = self._tools.adapt(
                    [*leading, *turns], tools, self._template.roles
                )
                try:
                    yield self._template.render(
                        messages, listed, is_prompt=False, arguments=arguments
                    )
                except InvalidTurnError:
                    yield ""
