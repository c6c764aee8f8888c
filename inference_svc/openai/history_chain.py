"""Histories as keyed digests: what was said, in order, without saying it. Pure.

A history is a sequence of messages. Its digest is chained, message by message, from a seed of the
tenant and the model, and keyed with a secret of this service: who reads the digests learns nothing,
no tenant's history is another's, and the histories of all beginnings of a conversation cost one
pass over it.

White space around an answer does not count: clients like to strip it.
"""

import hashlib
from collections.abc import Sequence

from inference_svc.openai.messages import ASSISTANT, Message

DIGEST_BYTES = 16
KEY_BYTES = 32


class HistoryChain:
    """Digests of one tenant's histories under one model.

    Args:
        key: the service's secret.
        tenant: whose.
        model: its fingerprint.
    """

    def __init__(self, key: bytes, tenant: str, model: str) -> None:
        self._key = key
        self.start = self._digest(b"history", tenant, model)

    def after(self, digest: bytes, message: Message) -> bytes:
        """The digest of a history and one more message."""
        is_answer = message.role == ASSISTANT
        content = message.content.strip() if is_answer else message.content
        return self._digest(digest, message.role, content)

    def along(self, digest: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Digests of a history with none of the messages, with the first, … with all of them."""
        digests = [digest]
        for message in messages:
            digests.append(self.after(digests[-1], message))
        return digests

    def within(self, digest: bytes, session_id: str) -> bytes:
        """The digest of a history as one session's own."""
        return self._digest(digest, "session", session_id)

    def id_of(self, *parts: str) -> str:
        """An id that nobody can guess: hex."""
        return self._digest(self.start, "id", *parts).hex()

    def _digest(self, before: bytes, *parts: str) -> bytes:
        """Keyed digest; each part is preceded by its length, so that parts cannot run together."""
        digest = hashlib.blake2b(before, digest_size=DIGEST_BYTES, key=self._key)
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()


def beginnings(messages: Sequence[Message]) -> list[int]:
    """How long the histories are that may be known, longest first.

    They end with an answer, and something follows them.
    """
    return [
        length
        for length in range(len(messages) - 1, 0, -1)
        if messages[length - 1].role == ASSISTANT
    ]
