"""Which arguments of a chat template make another conversation, and which only another prompt.

A template may write an argument among what is said (gpt-oss: how much to think, in the system's
message), or behind all of it, where the answer begins (Qwen3: an empty thought). The former belongs
to a conversation as its tools do; the latter is one turn's. Which it is, is tried out: some
conversations are written with the arguments and without, and with no prompt for an answer.
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

MAX_KNOWN = 256  # arguments whose framing is remembered
_CALL = Message(ASSISTANT, "", (PROBE_CALL,)).as_template()
_RESULT = Message(TOOL, RESULT, (), PROBE_CALL.call_id, PROBE.name).as_template()
_LEADING = message(SYSTEM, "say 4f1d")
_QUESTION = message("user", DUMMY_QUESTION)
_SAID = [*dummy_turn(), _QUESTION]
_CALLED = [_QUESTION, _CALL, _RESULT]


class Settled(NamedTuple):
    """The arguments of a turn.

    Attributes:
        arguments: all of them.
        recorded: what its record says of them: see `TurnRecord.template_arguments`.
    """

    arguments: Arguments
    recorded: str


class Framing:
    """See the module docstring.

    Args:
        template: the model's, tried out.
        tools: likewise.
    """

    def __init__(self, template: ChatTemplate, tools: ToolTemplate) -> None:
        self._template = template
        self._tools = tools
        self._find = lru_cache(MAX_KNOWN)(self._found)
        self._plain = b""  # what is written without any arguments; b"": not yet known

    def of(self, own: Arguments) -> str:
        """Return a digest of what a client's arguments make of conversations.

        Args:
            own: the client's; the usual ones are below them.

        Returns:
            "" if that is what none make of them.
        """
        return self._find(canonical_arguments({**self._template.usual, **own}))

    def settle(self, own: Arguments, began_with: str | None) -> Settled:
        """Return a turn's arguments: the client's, over those that its session began with.

        Those of the session only count where without them it would have begun otherwise: a client
        that sends whole conversations sends what it means.

        Args:
            own: the client's.
            began_with: what the record of the session's first turn says; None: this is the first.

        Raises:
            InvalidTurnError: with these the session would have begun otherwise.
        """
        arguments, framing = {**self._template.usual, **own}, self.of(own)
        if began_with is None:
            return Settled(arguments, canonical_arguments(arguments) if framing else "")
        begun = self._find(began_with)
        if framing != begun:
            arguments = {**read_arguments(began_with), **own}
            if self._find(canonical_arguments(arguments)) != begun:
                raise InvalidTurnError(
                    "with these arguments the chat template writes another conversation",
                    "send those that the session began with, or none, or begin another session",
                )
        return Settled(arguments, "")

    def _found(self, canonical: str) -> str:
        if not canonical:
            return ""
        self._plain = self._plain or self._written({})
        written = self._written(read_arguments(canonical))
        return "" if written == self._plain else written.hex()

    def _written(self, arguments: Arguments) -> bytes:
        """Return a digest of conversations, as the template writes them on any day."""
        digest = hashlib.blake2b(digest_size=16)
        for text in self._texts({**arguments, "strftime_now": str}):
            digest.update(len(text).to_bytes(8, "little") + text.encode())
        return digest.digest()

    def _texts(self, arguments: Arguments) -> Iterator[str]:
        """Yield conversations with and without a system message, and tools; "" for one refused."""
        offered = [PROBE.as_template()]
        for leading in ((), (_LEADING,)):
            for said, tools in ((_SAID, ()), (_SAID, offered), (_CALLED, offered)):
                written, told = self._tools.written([*leading, *said], tools, self._template.roles)
                try:
                    yield self._template.render(written, told, is_prompt=False, arguments=arguments)
                except InvalidTurnError:
                    yield ""
