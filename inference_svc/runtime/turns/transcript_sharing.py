"""The state of this service's transcripts in the shared object store: versions, and what it lacks.

    local ─► (never put there)
    shared ─► put ─► seen: the file is this version
       │        └─► silent store: behind ─► put again ─► seen
       └─ another version ─► compared with the file (`verdict_on`)

A version is noted when file and store agree. So a call that was interrupted leaves nothing wrong:
without a noted version they are compared again.
"""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from inference_svc.core.errors import SessionMovedError
from inference_svc.core.transcript_format import Transcript, TranscriptDamagedError
from inference_svc.runtime.turns.shared_conversations import SharedConversations
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_responses import SharedResponses
from inference_svc.runtime.turns.shared_transcripts import SharedTranscript, SharedTranscripts
from inference_svc.runtime.turns.store_calls import StoreSilentError
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from shared.blobs.blob_store import OvertakenError
from shared.blobs.register import NOTHING, Seen
from shared.types.session_key import SessionKey

MAX_SEEN = 100_000  # most versions that are noted; the oldest are forgotten


class Verdict(Enum):
    """What to do with a session's file, given what the store has."""

    KEEP = "it is all that there is, or more"
    TAKE = "the store has more"
    DIVERGED = "each has what the other has not"
    REMOVE = "the session was deleted"


def verdict_on(here: bytes | None, there: SharedTranscript | None, *, is_behind: bool) -> Verdict:
    """Compare a session's file with what the store has. Files only grow at their ends.

    Args:
        here: the file; None: there is none.
        there: the store's transcript; None: it has none.
        is_behind: whether the store is known not to have all of the file.
    """
    if there is None or (there.data is None and (here is None or is_behind)):
        return Verdict.KEEP
    if there.data is None:
        return Verdict.REMOVE
    if here is None or there.data.startswith(here):
        return Verdict.KEEP if here == there.data else Verdict.TAKE
    return Verdict.KEEP if here.startswith(there.data) else Verdict.DIVERGED


class Companion(Protocol):
    """Keeps other data in the same store, which is synchronised when transcripts are.

    Each method may raise StoreSilentError.
    """

    async def catch_up(self) -> None:
        """Put into the store what it lacks."""

    async def forget_deleted(self) -> None:
        """Remove what another service has deleted."""


class Sharing:
    """The state of the sessions in the shared store.

    The caller of a method for a session has the session's lock, except for `is_current`.

    Args:
        store: the transcripts in the shared store.
        files: this service's files.
        histories: histories in the same store, of sessions that no client has named; None: these
            are not shared.

    Attributes:
        store: the transcripts in the shared store.
        histories: the histories there; None: they are not shared.
        responses: stored responses in the same store, of all sessions there.
        conversations: conversations in the same store.
        companions: keep other data in the store; called once the transcripts are synchronised.
    """

    def __init__(
        self,
        store: SharedTranscripts,
        files: TranscriptFiles,
        histories: SharedHistories | None = None,
    ) -> None:
        self.store = store
        self.histories = histories
        self.responses = SharedResponses(store.calls, store.sealer)
        self.conversations = SharedConversations(store.calls, store.sealer)
        self.companions: list[Companion] = []
        self._files = files
        self._seen: OrderedDict[SessionKey, Seen] = OrderedDict()
        self._local: set[SessionKey] = set()
        self._behind: dict[SessionKey, None] = {}

    @property
    def behind(self) -> list[SessionKey]:
        """Sessions of which the store does not have everything."""
        return list(self._behind)

    def load_behind(self, keys: Iterable[SessionKey]) -> None:
        """Set the sessions that are marked as behind in the directory, at start."""
        self._behind = dict.fromkeys(keys)

    def is_behind(self, key: SessionKey) -> bool:
        """Whether the store does not have all of a session."""
        return key in self._behind

    def is_shared(self, key: SessionKey) -> bool:
        """Whether a session is put into the store."""
        return key not in self._local

    def keep_local(self, key: SessionKey, *, is_local: bool = True) -> None:
        """Keep a session out of the store, unless it is there already.

        Args:
            key: the session's key.
            is_local: False: put the session into the store from now on.
        """
        if not is_local:
            self._local.discard(key)
        elif not self._seen.get(key, NOTHING).number:
            self._local.add(key)

    def forget(self, key: SessionKey) -> None:
        """Forget a session that was removed here."""
        self._local.discard(key)
        self._seen.pop(key, None)

    async def is_current(self, key: SessionKey) -> bool:
        """Whether the file has all that the store has.

        Raises:
            StoreSilentError: it is not known.
        """
        seen = await self.store.look(key)
        return seen == NOTHING or seen.number == self._seen.get(key, NOTHING).number

    async def put(self, key: SessionKey, whole: bytes | None) -> Seen | None:
        """Put a session's file into the store; return its version there, None: the store is silent.

        Args:
            key: the session's key.
            whole: the file as it will be; None: the session is deleted.

        Raises:
            SessionMovedError: another service has added something.
            TranscriptDamagedError: the store's transcript is damaged and cannot be compared.
        """
        try:
            before = self._seen.get(key) or await self._find_version(key, whole)
            return await self.store.replace(key, before, whole)
        except OvertakenError as error:
            self._seen.pop(key, None)
            raise moved_error(key) from error
        except StoreSilentError:
            return None

    async def withdraw(self, key: SessionKey, whole: bytes) -> bool:
        """Delete a session from the store, unless another service has added turns to it.

        Args:
            key: the session's key.
            whole: its file here.

        Returns:
            Whether the store does not have it any more; False, too, if the store is silent.
        """
        try:
            before = self._seen.get(key, NOTHING)
            if before == NOTHING:
                there = await self.store.read(key)
                if there is None or there.data is None:
                    return True
                if not whole.startswith(there.data):
                    return False
                before = there.seen
            await self.store.replace(key, before, None)
        except (OvertakenError, StoreSilentError, TranscriptDamagedError):
            return False
        return True

    async def _find_version(self, key: SessionKey, whole: bytes | None) -> Seen:
        """Return the store's version, after checking that the file continues it.

        Raises:
            SessionMovedError: the file does not.
        """
        if whole is None:
            return await self.store.look(key)
        there = await self.store.read(key)
        if there is not None and there.data is not None and not whole.startswith(there.data):
            raise moved_error(key)
        return NOTHING if there is None else there.seen

    def note_version(self, key: SessionKey, seen: Seen) -> None:
        """Note the store's version that a session's file equals or continues."""
        self._seen[key] = seen
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    async def put_history(self, key: SessionKey, history: str) -> None:
        """Put a turn's history into the store, which has the turn; "": the turn has none."""
        if self.histories is not None and history:
            await self.histories.keep(key, history)

    async def forget_answers(self, transcript: Transcript) -> None:
        """Remove the histories and responses of a deleted session from the store."""
        digests = [turn.history for turn in transcript.turns if turn.history]
        if self.histories is not None and digests:
            await self.histories.forget(transcript.header.key, digests)
        responses = [turn.response for turn in transcript.turns if turn.response]
        await self.responses.delete_all(transcript.header.tenant, responses)

    async def unmark_behind(self, key: SessionKey) -> None:
        """Record that the store has all of a session.

        Raises:
            OSError: the mark could not be removed.
        """
        if key in self._behind:
            await self._files.unmark_behind(key)
            del self._behind[key]

    async def mark_behind(self, key: SessionKey) -> None:
        """Mark a session whose file is about to have more than the store.

        Raises:
            OSError: it could not be marked.
        """
        if key not in self._behind:
            await self._files.mark_behind(key)
            self._behind[key] = None


def moved_error(key: SessionKey) -> SessionMovedError:
    """Return the error of a turn to whose session another server has added one."""
    return SessionMovedError(
        f"session {key.session_id!r} was continued on another server in the meantime",
        "submit the turn again: it then follows what was said there",
    )
