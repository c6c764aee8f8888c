"""Stored responses that several servers can read, through a shared object store.

The object store has a response where it has the session: an entry with the members that the
turn's record lacks (`shared_responses.py`). A server without the response copies the session's
transcript, and checks that it has the turn. From then on the response is stored here as if it had
been made here, except for the digest of its history, which is keyed with the other server's
secret.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NoReturn

from inference_svc.core.errors import TranscriptUnavailableError
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import Point, StoredResponse
from inference_svc.http_api.sessions.store import ApiStore, info_of
from inference_svc.runtime.turns.sessions import Sessions
from inference_svc.runtime.turns.shared_responses import SharedResponses, Standing
from inference_svc.runtime.turns.shared_transcripts import place_of
from inference_svc.runtime.turns.store_calls import StoreSilentError
from shared.blobs.response_entry import ResponseEntry
from shared.types.errors import NotFoundError


class ReplicatedResponses:
    """Finds, shares and deletes responses, here and in the object store.

    Args:
        sessions: the service's sessions.
        model: fingerprint of the model, part of every session's key.
        store: the store of this server's responses.
    """

    def __init__(self, sessions: Sessions, model: str, store: ApiStore) -> None:
        self._sessions = sessions
        self._model = model
        self._store = store

    async def share(
        self,
        caller: Caller,
        response_id: str,
        response: StoredResponse,
        items: str,
        call_ids: Sequence[str],
    ) -> None:
        """Put a response into the object store, if its session is shared.

        Args:
            caller: the client and its tenant.
            response_id: id of the response.
            response: the response as it is stored here.
            items: its input as JSON; "" if that is not stored.
            call_ids: ids of the tool calls in its answer.
        """
        at = response.at
        shared = self._shared_responses(caller, at)
        if shared is None:
            return
        entry = ResponseEntry(
            transcript=place_of(caller.key(self._model, at.session_id)),
            session=at.session_id,
            turns=at.turns,
            request=at.request_id,
            named=at.is_named,
            info=asdict(replace(response.info, call_ids=call_ids)),
            items=items,
        )
        await shared.keep(caller.tenant, response_id, entry)

    async def find(
        self, caller: Caller, response_id: str, *, is_followed: bool = False
    ) -> StoredResponse | None:
        """Return a response; None if the caller's tenant has none of that id.

        Args:
            caller: the client and its tenant.
            response_id: id of the response.
            is_followed: whether a turn follows it and waits: then the object store is not asked
                whether another server has deleted a response that is here.

        Raises:
            StoreUnavailableError: this server's tables cannot be read.
            TranscriptUnavailableError: it is not here, and the object store does not answer.
        """
        tenant = caller.tenant
        stored = await self._store.find_response(tenant, response_id)
        if stored is None:
            is_here = await self._store.find_unanswered(tenant, response_id) is not None
            return None if is_here else await self._copy_remote(caller, response_id)
        shared = self._shared_responses(caller, stored.at)
        if shared is None:
            return stored
        if not is_followed and await _is_deleted(shared, tenant, response_id):
            await self._store.forget_response(tenant, response_id)
            return None
        return stored if await self._has_turn(caller, stored.at) else None

    async def is_last(self, caller: Caller, response_id: str, at: Point) -> bool:
        """Return whether a session has no other response, at any server.

        Raises:
            StoreUnavailableError: this server's tables cannot be read.
            TranscriptUnavailableError: the object store does not answer.
        """
        local_ids = await self._store.responses_of(caller.tenant, at.session_id) - {response_id}
        shared = self._shared_responses(caller, at)
        if shared is None:
            return not local_ids
        try:
            key = caller.key(self._model, at.session_id)
            transcript, _ = await self._sessions.get(key, is_fresh=True)
        except NotFoundError:
            return True
        other_ids = local_ids | {turn.response for turn in transcript.turns} - {"", response_id}
        try:
            found = await shared.standing(caller.tenant, other_ids)
        except StoreSilentError as error:
            _raise_unavailable(shared, error)
        return not any(
            standing is Standing.THERE or (standing is Standing.ABSENT and found_id in local_ids)
            for found_id, standing in found.items()
        )

    async def delete(self, caller: Caller, response_id: str, at: Point) -> None:
        """Delete a response, first in the object store, then here.

        Raises:
            StoreUnavailableError: it could not be deleted here.
            TranscriptUnavailableError: it could not be deleted in the object store.
        """
        shared = self._shared_responses(caller, at)
        if shared is not None:
            try:
                await shared.delete(caller.tenant, response_id)
            except StoreSilentError as error:
                _raise_unavailable(shared, error)
        await self._store.forget_response(caller.tenant, response_id)

    async def _copy_remote(self, caller: Caller, response_id: str) -> StoredResponse | None:
        """Copy a response of another server here, and return it; None if there is none."""
        shared, tenant = self._sessions.responses, caller.tenant
        if shared is None:
            return None
        try:
            entry = await shared.find(tenant, response_id)
        except StoreSilentError as error:
            _raise_unavailable(shared, error)
        if entry is None:
            return None
        try:
            info = info_of(entry.info)
        except TypeError:  # a required member is missing
            return None
        at = Point(entry.session, entry.turns, entry.request, entry.named)
        if not await self._has_turn(caller, at):
            return None
        stored = StoredResponse(at, None, info)
        await self._store.keep_response(tenant, response_id, stored, entry.items)
        return stored

    async def _has_turn(self, caller: Caller, at: Point) -> bool:
        """Return whether a session has a turn, here or, once copied here, at another server."""
        key = caller.key(self._model, at.session_id)
        try:
            found, _ = await self._sessions.get(key)
        except NotFoundError:
            pass
        else:
            if at.is_in(found):
                return True
        try:
            found, _ = await self._sessions.get(key, is_fresh=True, must_know=True)
        except NotFoundError:
            return False
        if not at.is_named:
            await self._store.use_session(caller.tenant, at.session_id)  # counted: its file is here
        return at.is_in(found)

    def _shared_responses(self, caller: Caller, at: Point) -> SharedResponses | None:
        """Return the object store's responses if a session is shared, else None."""
        is_shared = self._sessions.is_shared(caller.key(self._model, at.session_id))
        return self._sessions.responses if is_shared else None


async def _is_deleted(shared: SharedResponses, tenant: str, response_id: str) -> bool:
    """Return whether another server has deleted a response; False if the store does not answer."""
    try:
        found = await shared.standing(tenant, [response_id])
    except StoreSilentError:
        return False
    return found[response_id] is Standing.DELETED


def _raise_unavailable(shared: SharedResponses, error: StoreSilentError) -> NoReturn:
    """Refuse a request, because the object store does not answer.

    Raises:
        TranscriptUnavailableError: always.
    """
    raise TranscriptUnavailableError(
        f"the state of the response is not known: {error.message}",
        "try again later; the log of the service says why",
        retry_after_s=shared.retry_s,
    ) from error
