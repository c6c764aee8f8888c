"""Conversations that went on at other servers: found by what was said, in the store they share.

Only sessions that no client has named are: to go on with one is to have its transcript here, and
its turn says whether it is the one. What the store says of a history is never believed alone.
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

End = tuple[int, bytes]  # of a beginning of a conversation: its length, and its digest

MOST_ASKED = 2  # beginnings: the longest, and the one before, to which its client has gone back

log = get_logger(__name__)


class Elsewhere:
    """See the module docstring.

    Args:
        sessions: of the service.
        model: fingerprint of the model, part of every session's key.
        store: where those that nobody named are counted.
    """

    def __init__(self, sessions: Sessions, model: str, store: ApiStore) -> None:
        self._sessions = sessions
        self._model = model
        self._store = store

    @property
    def is_shared(self) -> bool:
        """Whether sessions that nobody named are there for other servers, too."""
        return self._sessions.histories is not None

    async def find(self, caller: Caller, ends: Sequence[End]) -> tuple[int, Point] | None:
        """Find the longest of some beginnings that ended at another server, and bring it here.

        Args:
            caller: who asks.
            ends: of beginnings, the longest first.

        Returns:
            Its length, and where it ends; None: none is there, or nobody knows.
        """
        histories, asked = self._sessions.histories, ends[:MOST_ASKED]
        if histories is None or not asked:
            return None
        if histories.calls.is_silent:
            histories.asked.add("silent")
            return None
        result, found = await self._found(caller, histories, asked)
        histories.asked.add(result)
        return found

    async def _found(
        self, caller: Caller, histories: SharedHistories, asked: Sequence[End]
    ) -> tuple[str, tuple[int, Point] | None]:
        """Return what the store had, and what of it is here now."""
        try:
            sessions = await histories.find(caller.tenant, [digest.hex() for _, digest in asked])
        except StoreSilentError:
            return "silent", None
        for length, digest in asked:
            name = sessions.get(digest.hex())
            at = await self._bring(caller, name, digest.hex()) if name else None
            if at is not None:
                return "found", (length, at)
        return "gone" if sessions else "absent", None

    async def _bring(self, caller: Caller, session_id: str, history: str) -> Point | None:
        """Have a session's newest transcript here; return where a history ends in it."""
        try:
            key = caller.key(self._model, session_id)
            transcript, _ = await self._sessions.get(key, is_fresh=True)
        except ReportedError as error:  # deleted, damaged, or the disk is full: it is computed
            log.debug("history_not_brought", session=session_id, reason=error.reason)
            return None
        await self._store.use_session(caller.tenant, session_id)  # its file is here, whatever comes
        return _end_of(transcript, history)


def _end_of(transcript: Transcript, history: str) -> Point | None:
    """Return where a history ends in a session; None: it is not one of the session's own."""
    for turn in transcript.turns:
        if turn.history == history:
            name = transcript.header.session_id
            return Point(name, turn.turn + 1, turn.request_id, is_named=False)
    return None
