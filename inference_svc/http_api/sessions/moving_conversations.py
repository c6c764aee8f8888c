"""Conversations, also those that other servers have changed, where servers share an object store.

What is here is what is read. Before a conversation is shown or changed it is brought in step with
the store's newest version; a change is there before its client is told of it.

    in step ─► changed here: behind ─► put ─► in step
                       │          └─► silent store: put when it answers
                       └─ another server was faster ─► undone, and refused; or put together

A turn that was answered is not undone, nor what was changed while the store was silent: what is new
follows what others have added, as items that no turn has read.

Invariants:
    1. while a request here changes a conversation, nothing from elsewhere takes its place;
    2. what the store may not have of a conversation is marked before its client is told;
    3. a conversation that was deleted, by whomever, is not brought back.
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
from shared.blobs.conversation_entry import merged
from shared.blobs.errors import OvertakenError
from shared.process.log import get_logger
from shared.types.errors import ReportedError

NUM_LOCKS = 64  # conversations that share one only wait for each other
TRIES = 5  # to put what others change
MOST_AT_ONCE = 100  # that are brought to the store before it is given its next transcripts

log = get_logger(__name__)


class MovingConversations:
    """See the module docstring.

    Args:
        shared: where they are for all servers; None: they are here alone.
        store: has those that are here.

    Attributes:
        holds: who changes which of them.
    """

    def __init__(self, shared: SharedConversations | None, store: ApiStore) -> None:
        self._shared = shared
        self._here = store.conversations
        self._versions = store.versions
        self.holds = Holds()
        self._locks = [asyncio.Lock() for _ in range(NUM_LOCKS)]
        self._stuck: set[str] = set()  # that cannot be put there: it was logged

    # -------------------------------------------------------------------------------- for requests

    async def find(self, tenant: str, name: str, *, is_held: bool = False) -> Conversation | None:
        """Return a tenant's conversation as it is now; None if it has none of that id.

        Args:
            tenant: whose it is.
            name: its id.
            is_held: whether the caller holds it.

        Raises:
            StoreUnavailableError: what is here cannot be read.
            TranscriptUnavailableError: nobody knows whether there is one.
            TranscriptDamagedError: what the store has is not what was put there.
        """
        shared, is_changing = self._shared, self._is_changing(tenant, name, is_held=is_held)
        async with self._lock(name):  # a repeat waits for what the first request brings
            if shared is None or is_changing:
                return await self._here.find(tenant, name)
            try:
                await self._bring(shared, tenant, name)
            except StoreSilentError as error:
                found = await self._here.find(tenant, name)
                return found or _raise_unknown(shared, error)
            return await self._here.find(tenant, name)

    async def create(self, tenant: str, made: Conversation, items: Items) -> None:
        """Store a new conversation.

        Raises:
            ConversationsFullError: the tenant has no room for it.
        """
        name = made.conversation_id
        await self._change(tenant, name, lambda: self._here.create(tenant, made, items))

    async def set_metadata(self, tenant: str, name: str, metadata: Mapping[str, str]) -> None:
        """Put a client's notes in the place of those that are there; others may hold it.

        Raises:
            ConversationsFullError: the tenant has no room for them.
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

    async def delete_item(self, tenant: str, left: Conversation, item_id: str) -> None:
        """Delete an item of a conversation that the caller holds, and which has so much left.

        Raises:
            SessionMovedError: another server has changed the conversation meanwhile.
        """
        name = left.conversation_id
        await self._change(
            tenant, name, lambda: self._here.delete_item(left, item_id), is_held=True
        )

    async def record(
        self, tenant: str, turn: ConversationTurn, end: Point, items: Items
    ) -> set[str]:
        """Add a turn: what it brought and said, and where the conversation is now.

        Args:
            tenant: whose conversation it is.
            turn: the turn.
            end: where it ended.
            items: of input and answer.

        Returns:
            The sessions that the conversation has left by that.
        """
        name, shared = turn.before.conversation_id, self._shared
        async with self._lock(name):
            standing = await self._versions.standing(tenant, name)
            if not await self._here.record(tenant, turn, end, items):
                return set()  # a repeat that followed it has added it before, or will
            try:
                if shared is not None and not await self._put(
                    shared, tenant, name, standing.number
                ):
                    await self._bring(shared, tenant, name)
            except StoreSilentError:
                log.debug("conversation_behind", conversation=name)
            except TranscriptDamagedError as error:  # what was answered is not refused for it
                self._keep_here(name, str(error))
            now = await self._here.find(tenant, name)
        return {turn.before.session_id, end.session_id} - ({now.session_id} if now else set())

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a conversation and its items, for other servers first.

        Raises:
            StoreUnavailableError: it could not be deleted.
            TranscriptUnavailableError: likewise: other servers have it.
        """
        async with self._lock(name):
            if self._shared is not None:
                try:
                    await self._shared.delete(tenant, name)
                except StoreSilentError as error:
                    _raise_unknown(self._shared, error)
            await self._here.delete(tenant, name)

    async def forget_session(self, tenant: str, session_id: str) -> None:
        """Delete the conversation whose session a client has deleted, if it is one.

        Raises:
            StoreUnavailableError: it could not be deleted.
            TranscriptUnavailableError: likewise: other servers have it.
        """
        name = session_id.partition("-")[0]  # the session was made for the one of this id
        if not name.startswith(CONVERSATION):
            return
        found = await self.find(tenant, name)
        if found is not None and found.session_id == session_id:
            await self.delete(tenant, name)

    # ----------------------------------------------------------------------- beside everything else

    async def catch_up(self) -> None:
        """Bring to the store what it lacks: some of it, if that is much.

        Raises:
            StoreSilentError: it still is silent.
        """
        if self._shared is None:
            return
        for tenant, name in await self._versions.behind(MOST_AT_ONCE + len(self._stuck)):
            if name not in self._stuck:
                await self._look_after(self._shared, tenant, name)

    async def forget_deleted(self) -> None:
        """Delete here what another server has deleted, though nobody asks for it.

        Raises:
            StoreSilentError: nobody knows what that is.
        """
        if self._shared is None:
            return
        deleted = await self._shared.deleted()
        for tenant, name in await self._versions.shared():
            if place_of(tenant, name) in deleted:
                await self._look_after(self._shared, tenant, name)

    async def _look_after(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Bring a conversation in step, unless a request changes it, which does so itself."""
        if self._is_changing(tenant, name):
            return
        async with self._lock(name):
            try:
                await self._bring(shared, tenant, name)
            except StoreSilentError:
                raise
            except ReportedError as error:
                self._keep_here(name, str(error))

    # ------------------------------------------------------------- in step; the caller has the lock

    async def _change(
        self,
        tenant: str,
        name: str,
        change: Callable[[], Awaitable[None]],
        *,
        is_held: bool = False,
    ) -> None:
        """Change a conversation here, then in the store; takes its lock itself.

        Raises:
            SessionMovedError: another server has changed it meanwhile; nothing was changed here.
            UnknownConversationError: likewise: it has deleted it.
        """
        async with self._lock(name):
            before = await self._versions.standing(tenant, name)
            await change()
            shared = self._shared
            if shared is None:
                return
            try:
                if await self._put(shared, tenant, name, before.number):
                    return
                if self._is_changing(tenant, name, is_held=is_held):
                    return  # a turn, which brings the change there with its own
                if before.is_behind:
                    await self._bring(shared, tenant, name)
                else:
                    await self._undo(shared, tenant, name)
            except StoreSilentError:
                log.debug("conversation_behind", conversation=name)

    async def _undo(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Take what another server has made of a conversation, without what was changed here.

        Raises:
            SessionMovedError: it is done.
            UnknownConversationError: likewise: the conversation was deleted.
            StoreSilentError: nothing is done.
        """
        there = await shared.read(tenant, name)
        if there is None:
            return  # nobody was faster: the store has lost it
        await self._take(there, tenant, name)
        raise unknown_conversation(name) if there.entry is None else moved(name)

    async def _bring(self, shared: SharedConversations, tenant: str, name: str) -> None:
        """Have the newest version of a conversation here, and all of what is here in the store.

        Raises:
            StoreSilentError: nobody knows what it is.
            TranscriptDamagedError: the store's is not what was put there.
        """
        for _ in range(TRIES):
            here = await self._versions.standing(tenant, name)
            if here == ABSENT and not self._here.are_kept:
                return
            number = await shared.look(tenant, name)
            if number not in {0, here.number}:
                await self._adopt(shared, tenant, name, is_behind=here.is_behind)
            elif number != here.number:
                await self._versions.lost(name)
            here = await self._versions.standing(tenant, name)
            if not here.is_behind or name in self._stuck:
                return
            if await self._put(shared, tenant, name, here.number):
                return

    async def _adopt(
        self, shared: SharedConversations, tenant: str, name: str, *, is_behind: bool
    ) -> None:
        """Take what the store has of a conversation, with what is here and not there."""
        there = await shared.read(tenant, name)
        if there is None:
            return
        found = await self._versions.whole(tenant, name) if is_behind else None
        if found is None or there.entry is None:
            if is_behind:
                log.warning("conversation_diverged", conversation=name, kept="none: it is deleted")
            await self._take(there, tenant, name)
            return
        entry, has_diverged = merged(found, there.entry)
        if has_diverged:
            log.warning("conversation_diverged", conversation=name, kept="both")
        await self._versions.take(entry, there.entry, there.number)
        self._stuck.discard(name)

    async def _take(self, there: SharedConversation, tenant: str, name: str) -> None:
        """Have here what the store has of a conversation, and nothing else."""
        if there.entry is None:
            await self._here.delete(tenant, name)
        else:
            await self._versions.take(there.entry, there.entry, there.number)

    async def _put(self, shared: SharedConversations, tenant: str, name: str, number: int) -> bool:
        """Put a conversation in the place of the version that it comes from.

        Returns:
            Whether nobody was faster.

        Raises:
            StoreSilentError: nobody knows whether it was put there.
        """
        found = await self._versions.whole(tenant, name)
        if found is None:
            return True
        try:
            put = await shared.replace(number, found)
        except OvertakenError:
            return False
        if put is None:
            self._keep_here(name, "it is too long")
        else:
            self._stuck.discard(name)
            await self._versions.agreed(name, put)
        return True

    def _keep_here(self, name: str, why: str) -> None:
        """Say once that other servers do not get what is here of a conversation."""
        if name not in self._stuck:
            self._stuck.add(name)
            log.warning("conversation_not_shared", conversation=name, reason=why)

    def _is_changing(self, tenant: str, name: str, *, is_held: bool = False) -> bool:
        """Whether a request changes a conversation, but for the caller's own."""
        return self.holds.num_holders(tenant, name) > is_held

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks[hash(name) % NUM_LOCKS]


def moved(conversation_id: str) -> SessionMovedError:
    """Say that another server has changed a conversation."""
    return SessionMovedError(
        f"conversation {conversation_id} was changed at another server meanwhile",
        "send the request again: it then follows what was changed there",
    )


def _raise_unknown(shared: SharedConversations, error: StoreSilentError) -> NoReturn:
    """Refuse what nobody knows for now.

    Raises:
        TranscriptUnavailableError: always.
    """
    raise TranscriptUnavailableError(
        f"nobody knows how the conversation stands: {error.message}",
        "come back later; the log of the service says why",
        retry_after_s=shared.retry_s,
    ) from error
