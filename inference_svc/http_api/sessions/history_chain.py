"""Digests of histories: a chain over the messages of a conversation. Pure.

A history is a sequence of messages. Its digest is chained, message by message, from a seed of the
tenant and the model. So histories of two tenants never have the same digest, and the digests of
all beginnings of a conversation cost one pass over it. White space around an answer does not
count, because clients strip it.

A service keys the digests in its own store with a secret: a reader of the store learns nothing
from them. The digests in transcripts (`TurnRecord.said`, `history`) have no key, so that every
server with the transcript knows the history. They stand beside the text itself, and so disclose
nothing. The same is true of these digests in an object store that servers share: the transcripts
are in the same store.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

from inference_svc.core.chat import ASSISTANT, TOOL, Message, Tool, ToolCall, canonical

DIGEST_BYTES = 16
CALL_ID = 24  # characters of a call's id, after its prefix
NO_SECRET = b""


class HistoryChain:
    """Makes the digests of one tenant's histories under one model.

    Args:
        key: the service's secret, or `NO_SECRET`.
        tenant: the tenant whose histories these are.
        model: the model's fingerprint.

    Attributes:
        start: digest of the empty history.
    """

    def __init__(self, key: bytes, tenant: str, model: str) -> None:
        self._key = key
        self.start = self._digest(b"history", tenant, model)

    def opening(self, tools: Sequence[Tool], framing: str = "") -> bytes:
        """Return the digest of a history without messages, whose tools and framing are known.

        Args:
            tools: the tools that the model may call.
            framing: what the template makes of the client's arguments; see `TurnText.framing`.
        """
        digest = self._digest(self.start, "tools", canonical(tools)) if tools else self.start
        return self._digest(digest, "framing", framing) if framing else digest

    def after(self, digest: bytes, message: Message) -> bytes:
        """Return the digest of a history and one more message.

        The name of a message's author counts, except in answers and results of tools, whose
        author is known.
        """
        content = message.content
        if message.tool_calls:
            content = "".join(content.split())  # clients split and join an answer's text blocks
        elif message.role == ASSISTANT:
            content = content.strip()
        calls = [
            part for call in message.tool_calls for part in (call.name, _canonical_arguments(call))
        ]
        result = ("of", message.tool_call_id) if message.tool_call_id else ()
        has_author = message.name and message.role not in {ASSISTANT, TOOL}
        author_parts = ("named", message.name) if has_author else ()
        return self._digest(digest, message.role, content, *calls, *result, *author_parts)

    def along(self, digest: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Return the digests of a history with none of the messages, the first one, … all."""
        digests = [digest]
        for message in messages:
            digests.append(self.after(digests[-1], message))
        return digests

    def within(self, digest: bytes, session_id: str) -> bytes:
        """Return the digest of a history within one session, which other sessions do not have."""
        return self._digest(digest, "session", session_id)

    def exchange(self, before: Message, answer: Message) -> bytes:
        """Return the digest of an answer and the message before it, at any position."""
        return self.along(self._digest(self.start, "exchange"), [before, answer])[-1]

    def id_of(self, *parts: str) -> str:
        """Make an id, as hex, that cannot be guessed without the service's secret."""
        return self._digest(self.start, "id", *parts).hex()

    def call_ids(self, request_id: str, prefix: str = "call_") -> Callable[[int], str]:
        """Return a function from the index of a turn's tool call to the call's id."""
        return lambda index: prefix + self.id_of("call", request_id, str(index))[:CALL_ID]

    def _digest(self, before: bytes, *parts: str) -> bytes:
        """Chain parts to a digest; a length before each part keeps the encoding unambiguous."""
        digest = hashlib.blake2b(before, digest_size=DIGEST_BYTES, key=self._key)
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()


def beginnings(messages: Sequence[Message]) -> list[int]:
    """Return the lengths of the messages' beginnings that may be stored histories, longest first.

    A stored history ends with an answer, and at least one message follows it.
    """
    return [
        length
        for length in range(len(messages) - 1, 0, -1)
        if messages[length - 1].role == ASSISTANT
    ]


def open_chain(tenant: str, model: str) -> HistoryChain:
    """Return the chain without a secret, whose digests are the same on every server."""
    return HistoryChain(NO_SECRET, tenant, model)


def _canonical_arguments(call: ToolCall) -> str:
    """Write a call's arguments in a canonical form: clients decode and encode them again."""
    return json.dumps(call.values, ensure_ascii=False, sort_keys=True)
