"""Stored responses, also those that other servers have made, where servers share an object store.

A response is where its session is: in the store, with what its turn's record does not have
(`shared_responses.py`). Whoever is asked for one that is not here has the session's transcript
here, and looks whether that has the turn; then it is as if it had been made here. The digest of
its history stays where it was made, for it is keyed with a secret of that server.
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


class MovingResponses:
    """See the module docstring.

    Args:
        sessions: of the service.
        model: fingerprint of the model, part of every session's key.
        store: has the responses that are here.
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
        """Let other servers know a response that is stored here, if they have its session.

        Args:
            caller: whose response it is.
            response_id: of the response.
            response: as it is stored here.
            items: its input as JSON; "": that is not kept.
            call_ids: ids of the calls in its answer.
        """
        at = response.at
        shared = self._shared(caller, at)
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
            caller: who asks.
            response_id: of the response.
            is_followed: whether one that is here is not asked for in the store: a turn waits.

        Raises:
            StoreUnavailableError: what is here cannot be read.
            TranscriptUnavailableError: nobody knows whether there is one.
        """
        tenant = caller.tenant
        stored = await self._store.find_response(tenant, response_id)
        if stored is None:
            is_here = await self._store.find_unanswered(tenant, response_id) is not None
            return None if is_here else await self._from_elsewhere(caller, response_id)
        shared = self._shared(caller, stored.at)
        if shared is None:
            return stored
        if not is_followed and await _is_deleted(shared, tenant, response_id):
            await self._store.forget_response(tenant, response_id)
            return None
        return stored if await self._has(caller, stored.at) else None

    async def is_last(self, caller: Caller, response_id: str, at: Point) -> bool:
        """Whether a session has no other response, wherever these were made.

        Raises:
            StoreUnavailableError: what is here cannot be read.
            TranscriptUnavailableError: nobody knows.
        """
        here = await self._store.responses_of(caller.tenant, at.session_id) - {response_id}
        shared = self._shared(caller, at)
        if shared is None:
            return not here
        try:
            key = caller.key(self._model, at.session_id)
            transcript, _ = await self._sessions.get(key, is_fresh=True)
        except NotFoundError:
            return True
        others = here | {turn.response for turn in transcript.turns} - {"", response_id}
        try:
            found = await shared.standing(caller.tenant, others)
        except StoreSilentError as error:
            _raise_unknown(shared, error)
        return not any(
            standing is Standing.THERE or (standing is Standing.ABSENT and one in here)
            for one, standing in found.items()
        )

    async def delete(self, caller: Caller, response_id: str, at: Point) -> None:
        """Delete a response, for other servers first.

        Raises:
            StoreUnavailableError: it could not be deleted.
            TranscriptUnavailableError: likewise: other servers have it.
        """
        shared = self._shared(caller, at)
        if shared is not None:
            try:
                await shared.delete(caller.tenant, response_id)
            except StoreSilentError as error:
                _raise_unknown(shared, error)
        await self._store.forget_response(caller.tenant, response_id)

    async def _from_elsewhere(self, caller: Caller, response_id: str) -> StoredResponse | None:
        """Have a response here that another server has made; None: there is none."""
        shared, tenant = self._sessions.responses, caller.tenant
        if shared is None:
            return None
        try:
            entry = await shared.find(tenant, response_id)
        except StoreSilentError as error:
            _raise_unknown(shared, error)
        if entry is None:
            return None
        try:
            info = info_of(entry.info)
        except TypeError:  # what every response has is not there
            return None
        at = Point(entry.session, entry.turns, entry.request, entry.named)
        if not await self._has(caller, at):
            return None
        stored = StoredResponse(at, None, info)
        await self._store.keep_response(tenant, response_id, stored, entry.items)
        return stored

    async def _has(self, caller: Caller, at: Point) -> bool:
        """Whether a session has a turn; it is brought here if it is not."""
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
            await self._store.use_session(caller.tenant, at.session_id)  # its file is here
        return at.is_in(found)

    def _shared(self, caller: Caller, at: Point) -> SharedResponses | None:
        """Return where a session's responses are for all servers; None: they are here alone."""
        is_shared = self._sessions.is_shared(caller.key(self._model, at.session_id))
        return self._sessions.responses if is_shared else None


async def _is_deleted(shared: SharedResponses, tenant: str, response_id: str) -> bool:
    """Whether another server has deleted a response, as far as the store answers."""
    try:
        found = await shared.standing(tenant, [response_id])
    except StoreSilentError:
        return False
    return found[response_id] is Standing.DELETED


def _raise_unknown(shared: SharedResponses, error: StoreSilentError) -> NoReturn:
    """Refuse what nobody knows for now.

    Raises:
        TranscriptUnavailableError: always.
    """
    raise TranscriptUnavailableError(
        f"nobody knows how the response stands: {error.message}",
        "come back later; the log of the service says why",
        retry_after_s=shared.retry_s,
    ) from error
