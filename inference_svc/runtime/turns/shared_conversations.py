"""Conversations in an object store, where several services have one of each: the newest.

    v1/conversations/TENANT/CONVERSATION/NUMBER    versions of one (shared/blobs/register.py)

    value = eight random bytes, then the entry (conversation_entry.py), sealed if there is a key;
            nothing behind them: the conversation was deleted

Who changes a conversation replaces the version that he has seen, or is told that somebody else has.
"""

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from inference_svc.core.transcript_format import TranscriptDamagedError
from inference_svc.runtime.turns.shared_transcripts import deleted_places, open_value
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.blobs.conversation_entry import (
    ConversationEntry,
    decode_conversation,
    encode_conversation,
)
from shared.blobs.errors import OvertakenError
from shared.blobs.register import Register, Seen
from shared.blobs.release import CONVERSATIONS, DELETED_BYTES, stored_name
from shared.encryption.sealer import PLAIN, SealBrokenError, Sealer

MAX_SEEN = 100_000  # versions that are noted: else a change costs one request more
TRIES = 5  # to delete what others change


@dataclass(frozen=True)
class SharedConversation:
    """A conversation as the store has it.

    Attributes:
        number: of its version.
        entry: what it is; None: it was deleted.
    """

    number: int
    entry: ConversationEntry | None


class SharedConversations:
    """See the module docstring. Methods are called on the event loop.

    Args:
        calls: to the store.
        sealer: of what is put there.
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
            StoreSilentError: nobody knows.
        """
        place = place_of(tenant, conversation_id)
        seen = await self._calls.call("looked", lambda store: Register(store, place).look())
        self._note(place, seen)
        return seen.number

    async def read(self, tenant: str, conversation_id: str) -> SharedConversation | None:
        """Return the newest; None: there never was one, or it was deleted long ago.

        Raises:
            StoreSilentError: nobody knows.
            TranscriptDamagedError: it is not what was put there.
            TranscriptSealedError: it was sealed by a key that this service does not have.
        """
        place = place_of(tenant, conversation_id)
        version = await self._calls.call("read", lambda store: Register(store, place).read())
        if version is None:
            return None
        self._note(place, version.seen)
        entry = await asyncio.to_thread(self._decoded, version.data, place)
        if entry is not None and (entry.tenant, entry.conversation) != (tenant, conversation_id):
            raise _damaged(conversation_id)
        if entry is None and len(version.data) != DELETED_BYTES:
            raise _damaged(conversation_id)
        return SharedConversation(version.seen.number, entry)

    async def replace(self, number: int, entry: ConversationEntry) -> int | None:
        """Put a conversation in place of a version; returns its own version's number.

        Args:
            number: of the version that it comes from; 0: there was none.
            entry: the conversation.

        Returns:
            None: it is too long, and stays where it is.

        Raises:
            OvertakenError: another service has changed it.
            StoreSilentError: nobody knows whether it was replaced.
        """
        place = place_of(entry.tenant, entry.conversation)
        value = await asyncio.to_thread(self._encoded, entry, place)
        if value is None:
            return None
        known = self._seen.get(place)
        seen = await self._calls.call(
            "replaced", lambda store: _replace(Register(store, place), known, number, value)
        )
        self._note(place, seen)
        return seen.number

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Say that a conversation is deleted, whatever others make of it meanwhile.

        Raises:
            StoreSilentError: nobody knows whether it is.
        """
        place = place_of(tenant, conversation_id)
        await self._calls.call("replaced", lambda store: _delete(Register(store, place)))

    async def deleted(self) -> frozenset[str]:
        """Return the places of conversations that were deleted.

        Raises:
            StoreSilentError: nobody knows.
        """
        return await self._calls.call(
            "looked", lambda store: frozenset(deleted_places(store, CONVERSATIONS)), is_long=True
        )

    def _note(self, place: str, seen: Seen) -> None:
        self._seen[place] = seen
        self._seen.move_to_end(place)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _encoded(self, entry: ConversationEntry, place: str) -> bytes | None:
        data = encode_conversation(entry)
        return None if data is None else _unlike_others(self._sealer.seal(data, place))

    def _decoded(self, value: bytes, place: str) -> ConversationEntry | None:
        try:
            return decode_conversation(open_value(self._sealer, value[DELETED_BYTES:], place))
        except SealBrokenError:
            return None


def place_of(tenant: str, conversation_id: str) -> str:
    """Return the beginning of the names of a conversation's versions."""
    return f"{CONVERSATIONS}/{stored_name(tenant)}/{stored_name(conversation_id)}"


def _replace(register: Register, known: Seen | None, number: int, value: bytes) -> Seen:
    before = known if known is not None and known.number == number else register.look()
    if before.number != number:
        raise OvertakenError("the conversation was changed meanwhile", "try again")
    return register.replace(before, value)


def _delete(register: Register) -> None:
    value = _unlike_others(b"")
    for _ in range(TRIES - 1):
        try:
            register.replace(register.look(), value)
        except OvertakenError:
            continue
        return
    register.replace(register.look(), value)


def _unlike_others(data: bytes) -> bytes:
    """Return a register's value, unlike every other one."""
    return secrets.token_bytes(DELETED_BYTES) + data


def _damaged(conversation_id: str) -> TranscriptDamagedError:
    return TranscriptDamagedError(
        f"what the object store has of conversation {conversation_id} is damaged, or of a newer"
        " release",
        "delete the conversation, or serve it with that release",
    )
