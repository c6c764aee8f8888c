"""Conversations of the HTTP API in an object store that services share: the newest of each.

    v1/conversations/TENANT/CONVERSATION/NUMBER    versions of one (shared/blobs/register.py)

    value = eight random bytes, then the entry (conversation_entry.py), sealed if there is a key;
            no entry behind them: the conversation was deleted

A service that changes a conversation replaces the version that it has seen; if another service has
replaced that already, it gets an OvertakenError.
"""

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from inference_svc.core.transcript_format import TranscriptDamagedError
from inference_svc.runtime.turns.shared_transcripts import deleted_places, open_value
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.blobs.blob_store import OvertakenError
from shared.blobs.conversation_entry import (
    ConversationEntry,
    decode_conversation,
    encode_conversation,
)
from shared.blobs.register import Register, Seen
from shared.blobs.release import CONVERSATIONS, DELETED_BYTES, stored_name
from shared.encryption.sealer import PLAIN, SealBrokenError, Sealer

MAX_SEEN = 100_000  # most versions that are noted; without one a change costs one more request
TRIES = 5  # attempts to delete a conversation that other services change meanwhile


@dataclass(frozen=True)
class SharedConversation:
    """A conversation as the store has it.

    Attributes:
        number: the number of its version.
        entry: the conversation; None: it was deleted.
    """

    number: int
    entry: ConversationEntry | None


class SharedConversations:
    """Reads, replaces and deletes conversations. Methods are called on the event loop.

    Args:
        calls: the calls to the store.
        sealer: seals and opens values there.
    """

    def __init__(self, calls: StoreCalls, sealer: Sealer = PLAIN) -> None:
        self._calls = calls
        self._sealer = sealer
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    @property
    def retry_s(self) -> float:
        """Seconds until the store is called again, if it is silent."""
        return self._calls.retry_s

    async def look(self, tenant: str, conversation_id: str) -> int:
        """Return the number of the newest version; 0: there is none.

        Raises:
            StoreSilentError: it is not known.
        """
        place = place_of(tenant, conversation_id)
        seen = await self._calls.call("looked", lambda store: Register(store, place).look())
        self._note(place, seen)
        return seen.number

    async def read(self, tenant: str, conversation_id: str) -> SharedConversation | None:
        """Return the newest version of a conversation.

        Returns:
            The version; None: there never was one, or it was deleted long ago.

        Raises:
            StoreSilentError: it is not known.
            TranscriptDamagedError: the value is damaged, or another conversation's.
            TranscriptSealedError: it was sealed by a key that this service does not have.
        """
        place = place_of(tenant, conversation_id)
        version = await self._calls.call("read", lambda store: Register(store, place).read())
        if version is None:
            return None
        self._note(place, version.seen)
        entry = await asyncio.to_thread(self._decode, version.data, place)
        if entry is not None and (entry.tenant, entry.conversation) != (tenant, conversation_id):
            raise _damaged_error(conversation_id)
        if entry is None and len(version.data) != DELETED_BYTES:
            raise _damaged_error(conversation_id)
        return SharedConversation(version.seen.number, entry)

    async def replace(self, number: int, entry: ConversationEntry) -> int | None:
        """Replace a version of a conversation.

        Args:
            number: the number of the version that was changed; 0: there was none.
            entry: the changed conversation.

        Returns:
            The number of the new version; None: the entry is too long, nothing was replaced.

        Raises:
            OvertakenError: another service has changed the conversation.
            StoreSilentError: it is not known whether it was replaced.
        """
        place = place_of(entry.tenant, entry.conversation)
        value = await asyncio.to_thread(self._encode, entry, place)
        if value is None:
            return None
        known = self._seen.get(place)
        seen = await self._calls.call(
            "replaced", lambda store: _replace(Register(store, place), known, number, value)
        )
        self._note(place, seen)
        return seen.number

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Mark a conversation as deleted, even if other services change it meanwhile.

        Raises:
            OvertakenError: other services have changed it at each of TRIES attempts.
            StoreSilentError: it is not known whether it is marked.
        """
        place = place_of(tenant, conversation_id)
        await self._calls.call("replaced", lambda store: _delete(Register(store, place)))

    async def deleted(self) -> frozenset[str]:
        """Return the places of conversations that were deleted.

        Raises:
            StoreSilentError: it is not known.
        """
        return await self._calls.call(
            "looked", lambda store: frozenset(deleted_places(store, CONVERSATIONS)), is_long=True
        )

    def _note(self, place: str, seen: Seen) -> None:
        """Remember the newest known version of a conversation."""
        self._seen[place] = seen
        self._seen.move_to_end(place)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _encode(self, entry: ConversationEntry, place: str) -> bytes | None:
        data = encode_conversation(entry)
        return None if data is None else _with_nonce(self._sealer.seal(data, place))

    def _decode(self, value: bytes, place: str) -> ConversationEntry | None:
        """Return the entry of a register's value; None: there is none, or it is damaged."""
        try:
            return decode_conversation(open_value(self._sealer, value[DELETED_BYTES:], place))
        except SealBrokenError:
            return None


def place_of(tenant: str, conversation_id: str) -> str:
    """Return the place of a conversation: the beginning of its versions' names."""
    return f"{CONVERSATIONS}/{stored_name(tenant)}/{stored_name(conversation_id)}"


def _replace(register: Register, known: Seen | None, number: int, value: bytes) -> Seen:
    """Replace the version with this number; `known`: the newest version noted here, if any."""
    before = known if known is not None and known.number == number else register.look()
    if before.number != number:
        raise OvertakenError(
            "the conversation was changed by another request in the meantime", "try again"
        )
    return register.replace(before, value)


def _delete(register: Register) -> None:
    """Put a mark of deletion in place of the newest version, in TRIES attempts."""
    value = _with_nonce(b"")
    for _ in range(TRIES - 1):
        try:
            register.replace(register.look(), value)
        except OvertakenError:
            continue
        return
    register.replace(register.look(), value)


def _with_nonce(data: bytes) -> bytes:
    """Put random bytes before a value: a register's values must all differ."""
    return secrets.token_bytes(DELETED_BYTES) + data


def _damaged_error(conversation_id: str) -> TranscriptDamagedError:
    return TranscriptDamagedError(
        f"the object store's data of conversation {conversation_id} is damaged, or from a "
        "newer release",
        "delete the conversation, or serve it with that release",
    )
