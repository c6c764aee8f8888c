"""Histories as digests: what was said, in order, without saying it. Pure.

A history is a sequence of messages. Its digest is chained, message by message, from a seed of the
tenant and the model, so that no tenant's history is another's, and the histories of all beginnings
of a conversation cost one pass over it. White space around an answer does not count: clients like
to strip it.

A service keys its own digests with a secret: who reads them learns nothing. What it writes into
transcripts (`TurnRecord.said`, `history`) is keyed with nothing, so that whichever server has a
session knows its history; it stands beside the words themselves, and gives nothing away. So do the
same digests in the store that services share, whose transcripts lie beside them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

from inference_svc.core.chat import ASSISTANT, TOOL, Message, Tool, ToolCall, canonical

DIGEST_BYTES = 16
CALL_ID = 24  # characters of a call's id, behind its prefix
NO_SECRET = b""


class HistoryChain:
    """Digests of one tenant's histories under one model.

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
        """Return the digest of the history of which only tools and framing are known.

        Args:
            tools: what the model may call.
            framing: what the template's arguments make of it; see `TurnText.framing`.
        """
        digest = self._digest(self.start, "tools", canonical(tools)) if tools else self.start
        return self._digest(digest, "framing", framing) if framing else digest

    def after(self, digest: bytes, message: Message) -> bytes:
        """Return the digest of a history and one more message; who says an answer is known."""
        content = message.content
        if message.tool_calls:
            content = "".join(content.split())  # clients take blocks apart, and join them
        elif message.role == ASSISTANT:
            content = content.strip()
        calls = [part for call in message.tool_calls for part in (call.name, _sorted(call))]
        result = ("of", message.tool_call_id) if message.tool_call_id else ()
        has_sayer = message.name and message.role not in {ASSISTANT, TOOL}
        sayer = ("named", message.name) if has_sayer else ()
        return self._digest(digest, message.role, content, *calls, *result, *sayer)

    def along(self, digest: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Return digests of a history with none of the messages, the first, … all of them."""
        digests = [digest]
        for message in messages:
            digests.append(self.after(digests[-1], message))
        return digests

    def within(self, digest: bytes, session_id: str) -> bytes:
        """Return the digest of a history as one session's own."""
        return self._digest(digest, "session", session_id)

    def exchange(self, before: Message, answer: Message) -> bytes:
        """Return the digest of an answer and the message before it, wherever they stand."""
        return self.along(self._digest(self.start, "exchange"), [before, answer])[-1]

    def id_of(self, *parts: str) -> str:
        """Make an id that nobody can guess: hex."""
        return self._digest(self.start, "id", *parts).hex()

    def call_ids(self, request_id: str, prefix: str = "call_") -> Callable[[int], str]:
        """Return what makes the ids of a turn's calls of tools, by their indexes."""
        return lambda index: prefix + self.id_of("call", request_id, str(index))[:CALL_ID]

    def _digest(self, before: bytes, *parts: str) -> bytes:
        """Chain parts; each is preceded by its length, so that they cannot run together."""
        digest = hashlib.blake2b(before, digest_size=DIGEST_BYTES, key=self._key)
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()


def beginnings(messages: Sequence[Message]) -> list[int]:
    """Return the lengths of histories that may be stored, longest first.

    They end with an answer, and something follows them.
    """
    return [
        length
        for length in range(len(messages) - 1, 0, -1)
        if messages[length - 1].role == ASSISTANT
    ]


def open_chain(tenant: str, model: str) -> HistoryChain:
    """Return the digests of histories that are the same on every server."""
    return HistoryChain(NO_SECRET, tenant, model)


def _sorted(call: ToolCall) -> str:
    """Write a call's arguments as they compare: clients decode and encode them."""
    return json.dumps(call.values, ensure_ascii=False, sort_keys=True)
