"""Conversations that several servers change, synchronized through a shared object store.

This server's tables are read. Before a conversation is read or changed, it is synchronized with
the object store's newest version. A change is in the store before the client gets its answer.

    in step ─► changed here: behind ─► put ─► in step
                       │          └─► store does not answer: put later
                       └─ another server was faster ─► undone and refused, or merged

An answered turn is not undone, nor is a change that was made while the store did not answer.
These are merged: the new items follow those of other servers, as items that no turn has read.

Invariants:
    1. while a request here changes a conversation, no other version replaces it;
    2. a conversation that the store may lack is marked as behind before its client is answered;
    3. a conversation that was deleted, at any server, does not come back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from inference_svc.core.errors import SessionMovedError, TranscriptUnavailableError
from inference_svc.core.transcript_format import TranscriptDamagedError
from inference_svc.http_api.errors import unknown_conversation
from inference_svc.http_api.sessions.conversation_versions import ABSENT
from inference_svc.http_api.sessions.conversations import Holds, Items
from inference_svc.http_api.sessions.lookup import (
    CONVERSATION,
    Conversation,
    ConversationTurn,
    Point,
)
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.shared_conversations import (
    SharedConversation,
    SharedConversations,
    place_of,
)
from inference_svc.runtime.turns.store_calls import StoreSilentError
from shared.blobs.blob_store import OvertakenError
from shared.blobs.conversation_entry import merged
from shared.process.log import get_logger
from shared.types.errors import ReportedError

NUM_LOCKS = 64  # conversations that share a lock wait for each other, and no harm is done
TRIES = 5  # attempts to put a conversation that other servers change at the same time
MOST_AT_ONCE = 100  # conversations put in one run, so that transcripts need not wait for all

log = get_logger(__name__)


class ReplicatedConversations:
    """Reads and changes conversations in step with the object store; see the module docstring.

    Args:
        shared: the conversations in the object store; None if servers share none.
        store: the store of this server.

    Attributes:
        holds: the requests of this server that change conversations.
    """

    def __init__(self, shared: SharedConversations | None, store: ApiStore) -> None:
        self._shared = shared
        self._here = store.conversations
        self._versions = store.versions
        self.holds = Holds()
        self._locks = [asyncio.Lock() for _ in range(NUM_LOCKS)]
        self._stuck: set[str] = set()  # conversations that cannot be put; logged once

    # -------------------------------------------------------------------------------- for requests

    async def find(self, tenant: str, name: str, *, is_held: bool = False) -> Conversation | None:
        """Return the newest version of a conversation; None if the tenant has none of that id.

        Args:
            tenant: the conversation's tenant.
            name: the conversation's id.
            is_held: whether the caller holds it.

        Raises:
            StoreUnavailableError: this server's tables cannot be read.
            TranscriptUnavailableError: it is not here, and the object store does not answer.
            TranscriptDamagedError: the object store's version is damaged.
        """
        shared, has_other_holder = (
            self._shared,
            self._has_other_holder(tenant, name, is_held=is_held),
        )
        async with self._lock(name):  # so a repeat waits for the first request to synchronize
            if shared is None or has_other_holder:
                return await self._here.find(tenant, name)
            try:
                await self._synchronize(shared, tenant, name)
            except StoreSilentError as error:
                found = await self._here.find(tenant, name)
                return found or _raise_unavailable(shared, error)
            return await self._here.find(tenant, name)

    async def create(self, tenant: str, conversation: Conversation, items: Items) -> None:
        """Store a new conversation.

        Raises:
            ConversationsFullError: the tenant has no room for it.
        """
        name = conversation.conversation_id
        await self._change(tenant, name, lambda: self._here.create(tenant, conversation, items))

    async def set_metadata(self, tenant: str, name: str, metadata: Mapping[str, str]) -> None:
        """Replace a conversation's metadata; another request may hold it.

        Raises:
            ConversationsFullError: the tenant has no room for it.
            SessionMovedError: another server has changed the conversation meanwhile.
        """
        await self._change(tenant, name, lambda: self._here.set_metadata(tenant, name, metadata))

    async def add(self, tenant: str, name: str, items: Items) -> None:
        """Add items, which the next turn reads; the caller holds the conversation.

        Raises:
            ConversationsFullError: the tenant has no room for them.
            SessionMovedError: another server has changed the conversation meanwhile.
            UnknownConversationError: it is gone.
        """
        await self._change(tenant, name, lambda: self._here.add(tenant, name, items), is_held=True)

    async def delete_item(self, tenant: str, remaining: Conversation, item_id: str) -> None:
        """Delete an item of a conversation that the caller holds.

        Args:
            tenant: the conversation's tenant.
            remaining: the conversation with the turns that stay valid.
            item_id: id of the item.

        Raises:
            SessionMovedError: another server has changed the conversation meanwhile.
        """
        name = remaining.conversation_id
        await self._change(
            tenant, name, lambda: self._here.delete_item(remaining, item_id), is_held=True
        )

    async def record(
        self, tenant: str, turn: ConversationTurn, end: Point, items: Items
    ) -> set[str]:
        """Add an answered turn: its items, and the session and turn where the conversation is now.

        The turn is never refused: if another server was faster, the versions are merged.

        Args:
            tenant: the conversation's tenant.
            turn: the turn.
            end: where it ended.
            items: the items of its input and its answer.

        Returns:
            The sessions that the conversation does not use any more; the caller owes their removal.
        """
        name, shared = turn.before.conversation_id, self._shared
        async with self._lock(name):
            sync_state = await self._versions.sync_state(tenant, name)
            if not await self._here.record(tenant, turn, end, items):
                return set()  # a repeat has added the turn already
            try:
                if shared is not None and not await self._put(
                    shared, tenant, name, sync_state.number
                ):
                    await self._synchronize(shared, tenant, name)
            except StoreSilentError:
                log.debug("conversation_behind", conversation=name)
            except TranscriptDamagedError as error:  # no reason to refuse an answered turn
                self._mark_stuck(name, str(error))
            now = await self._here.find(tenant, name)
        return {turn.before.session_id, end.session_id} - ({now.session_id} if now else set())

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a conversation and its items, first in the object store, then here.

        Raises:
            StoreUnavailableError: it could not be deleted here.
            TranscriptUnavailableError: it could not be deleted in the object store.
        """
        async with self._lock(name):
            if self._shared is not None:
                try:
                    await self._shared.delete(tenant, name)
                except StoreSilentError as error:
                    _raise_unavailable(self._shared, error)
            await self._here.delete(tenant, name)

    async def forget_session(self, tenant: str, session_id: str) -> None:
        """Delete the conversation of a deleted session, if the session is a conversation's.

        Raises:
            StoreUnavailableError: it could not be deleted here.
            TranscriptUnavailableError: it could not be deleted in the object store.
        """
        name = session_id.partition("-")[0]  # a conversation's sessions: its id, or id-suffix
        if not name.startswith(CONVERSATION):
            return
        found = await self.find(tenant, name)
        if found is not None and found.session_id == session_id:
            await self.delete(tenant, name)

    # ----------------------------------------------------------------------- beside everything else

    async def catch_up(self) -> None:
        """Put conversations that are behind into the object store, at most `MOST_AT_ONCE`.

        Raises:
            StoreSilentError: the object store does not answer.
        """
        if self._shared is None:
            return
        for tenant, name in await self._versions.list_behind(MOST_AT_ONCE + len(self._stuck)):
            if name not in self._stuck:
                await self._synchronize_idle(self._shared, tenant, name)

    async def forget_deleted(self) -> None:
        """Delete the conversations here that another server has deleted.

        Raises:
            StoreSilentError: the object store does not answer.
        """
        if self._shared is None:
            return
        deleted = await self._shared.deleted()
        for tenant, name in await self._versions.list_shared():
            if place_of(tenant, name) in deleted:
                await self._synchronize_idle(self._shared, tenant, name)

    async def _synchronize_idle(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Synchronize a conversation, unless a request holds it and so does this itself."""
        if self._has_other_holder(tenant, name):
            return
        async with self._lock(name):
            try:
                await self._synchronize(shared, tenant, name)
            except StoreSilentError:
                raise
            except ReportedError as error:
                self._mark_stuck(name, str(error))

    # ------------------------------------------------------------- in step; the caller has the lock

    async def _change(
        self,
        tenant: str,
        name: str,
        change: Callable[[], Awaitable[None]],
        *,
        is_held: bool = False,
    ) -> None:
        """Change a conversation here, then in the object store; acquires its lock.

        Raises:
            SessionMovedError: another server has changed it; the change here was undone.
            UnknownConversationError: another server has deleted it; the change here was undone.
        """
        async with self._lock(name):
            before = await self._versions.sync_state(tenant, name)
            await change()
            shared = self._shared
            if shared is None:
                return
            try:
                if await self._put(shared, tenant, name, before.number):
                    return
                if self._has_other_holder(tenant, name, is_held=is_held):
                    return  # a turn holds it, and puts this change together with its own
                if before.is_behind:
                    await self._synchronize(shared, tenant, name)
                else:
                    await self._undo(shared, tenant, name)
            except StoreSilentError:
                log.debug("conversation_behind", conversation=name)

    async def _undo(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Replace a changed conversation by the object store's version.

        Raises:
            SessionMovedError: always, if the store has a version: the change was undone.
            UnknownConversationError: instead, if the conversation was deleted there.
            StoreSilentError: the store does not answer; nothing was undone.
        """
        stored = await shared.read(tenant, name)
        if stored is None:
            return  # no other server was faster: the store has lost the conversation
        await self._replace_here(stored, tenant, name)
        raise unknown_conversation(name) if stored.entry is None else conversation_moved(name)

    async def _synchronize(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Synchronize a conversation: get the store's newest version, put what the store lacks.

        Raises:
            StoreSilentError: the object store does not answer.
            TranscriptDamagedError: the object store's version is damaged.
        """
        for _ in range(TRIES):
            state = await self._versions.sync_state(tenant, name)
            if state == ABSENT and not self._here.are_kept:
                return
            number = await shared.look(tenant, name)
            if number not in {0, state.number}:
                await self._adopt_newest(shared, tenant, name, is_behind=state.is_behind)
            elif number != state.number:
                await self._versions.mark_lost(name)
            state = await self._versions.sync_state(tenant, name)
            if not state.is_behind or name in self._stuck:
                return
            if await self._put(shared, tenant, name, state.number):
                return

    async def _adopt_newest(
        self, shared: SharedConversations, tenant: str, name: str, *, is_behind: bool
    ) -> None:
        """Replace a conversation by the store's version, merged with what the store lacks."""
        stored = await shared.read(tenant, name)
        if stored is None:
            return
        found = await self._versions.read(tenant, name) if is_behind else None
        if found is None or stored.entry is None:
            if is_behind:
                log.warning("conversation_diverged", conversation=name, kept="none: it is deleted")
            await self._replace_here(stored, tenant, name)
            return
        entry, has_diverged = merged(found, stored.entry)
        if has_diverged:
            log.warning("conversation_diverged", conversation=name, kept="both")
        await self._versions.replace(entry, stored.entry, stored.number)
        self._stuck.discard(name)

    async def _replace_here(self, stored: SharedConversation, tenant: str, name: str) -> None:
        """Replace a conversation by the store's version; delete it if it was deleted there."""
        if stored.entry is None:
            await self._here.delete(tenant, name)
        else:
            await self._versions.replace(stored.entry, stored.entry, stored.number)

    async def _put(self, shared: SharedConversations, tenant: str, name: str, number: int) -> bool:
        """Put a conversation into the object store, if the store still has version `number`.

        A conversation that is too long is marked as stuck, and counts as put.

        Returns:
            False if another server has changed the store's version.

        Raises:
            StoreSilentError: the object store does not answer; it may have been put or not.
        """
        found = await self._versions.read(tenant, name)
        if found is None:
            return True
        try:
            put = await shared.replace(number, found)
        except OvertakenError:
            return False
        if put is None:
            self._mark_stuck(name, "it is too long")
        else:
            self._stuck.discard(name)
            await self._versions.mark_in_step(name, put)
        return True

    def _mark_stuck(self, name: str, why: str) -> None:
        """Mark a conversation as one that cannot be shared; log it once."""
        if name not in self._stuck:
            self._stuck.add(name)
            log.warning("conversation_not_shared", conversation=name, reason=why)

    def _has_other_holder(self, tenant: str, name: str, *, is_held: bool = False) -> bool:
        """Return whether another request than the caller's holds a conversation."""
        return self.holds.num_holders(tenant, name) > is_held

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks[hash(name) % NUM_LOCKS]


def conversation_moved(conversation_id: str) -> SessionMovedError:
    """Make the error of a conversation that another server has changed."""
    return SessionMovedError(
        f"conversation {conversation_id} was changed on another server in the meantime",
        "send the request again: it then continues from that change",
    )


def _raise_unavailable(shared: SharedConversations, error: StoreSilentError) -> NoReturn:
    """Refuse a request, because the object store does not answer.

    Raises:
        TranscriptUnavailableError: always.
    """
    raise TranscriptUnavailableError(
        f"the state of the conversation is not known: {error.message}",
        "try again later; the log of the service says why",
        retry_after_s=shared.retry_s,
    ) from error
