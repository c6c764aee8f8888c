"""Histories of other servers: unnamed sessions, found by history in the shared object store.

To continue such a session, its transcript is copied to this server. The store's entry of a
history is never trusted alone: a turn of the transcript has to have the same digest.
"""

from collections.abc import Sequence

from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import Point
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.store_calls import StoreSilentError
from shared.process.log import get_logger
from shared.types.errors import ReportedError

End = tuple[int, bytes]  # length and digest of a beginning of a conversation

# Beginnings to look up: the longest, and the one before it, in case the client has gone back to it.
MAX_LOOKUPS = 2

log = get_logger(__name__)


class RemoteHistories:
    """Finds histories of unnamed sessions in the object store, and copies their transcripts here.

    Args:
        sessions: the service's sessions.
        model: fingerprint of the model, part of every session's key.
        store: counts the unnamed sessions of this server.
    """

    def __init__(self, sessions: Sessions, model: str, store: ApiStore) -> None:
        self._sessions = sessions
        self._model = model
        self._store = store

    @property
    def is_shared(self) -> bool:
        """Whether servers share their unnamed sessions."""
        return self._sessions.histories is not None

    async def find(self, caller: Caller, ends: Sequence[End]) -> tuple[int, Point] | None:
        """Find the longest beginning that another server answered; copy its transcript here.

        Args:
            caller: the client and its tenant.
            ends: lengths and digests of the beginnings, longest first.

        Returns:
            Its length, and where it ends; None if there is none, or the store does not answer.
        """
        histories, looked_up = self._sessions.histories, ends[:MAX_LOOKUPS]
        if histories is None or not looked_up:
            return None
        if histories.calls.is_silent:
            histories.asked.add("silent")
            return None
        result, found = await self._look_up(caller, histories, looked_up)
        histories.asked.add(result)
        return found

    async def _look_up(
        self, caller: Caller, histories: SharedHistories, looked_up: Sequence[End]
    ) -> tuple[str, tuple[int, Point] | None]:
        """Look beginnings up; return the result for the metric, and the one that is here now."""
        try:
            sessions = await histories.find(
                caller.tenant, [digest.hex() for _, digest in looked_up]
            )
        except StoreSilentError:
            return "silent", None
        for length, digest in looked_up:
            name = sessions.get(digest.hex())
            at = await self._copy_transcript(caller, name, digest.hex()) if name else None
            if at is not None:
                return "found", (length, at)
        return "gone" if sessions else "absent", None

    async def _copy_transcript(self, caller: Caller, session_id: str, history: str) -> Point | None:
        """Copy a session's newest transcript here; return where a history ends in it."""
        try:
            key = caller.key(self._model, session_id)
            transcript, _ = await self._sessions.get(key, is_fresh=True)
        except ReportedError as error:  # deleted, damaged, or a full disk: the turn is recomputed
            log.debug("history_not_brought", session=session_id, reason=error.reason)
            return None
        await self._store.use_session(caller.tenant, session_id)  # counted: its file is here now
        return _find_end(transcript, history)


def _find_end(transcript: Transcript, history: str) -> Point | None:
    """Return where a history ends in a session; None if the session does not have it."""
    for turn in transcript.turns:
        if turn.history == history:
            name = transcript.header.session_id
            return Point(name, turn.turn + 1, turn.request_id, is_named=False)
    return None
