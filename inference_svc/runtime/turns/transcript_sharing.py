"""What an object store has of the transcripts here, and what it is to get.

    local ─► (never there)
    shared ─► put ─► seen: of this version is the file
       │        └─► silent store: behind ─► put again ─► seen
       └─ another version ─► to be compared (`verdict_on`)

Versions are noted when file and store agree, so that a call that was broken off leaves nothing
wrong: what is not noted is compared anew.
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
from shared.blobs.errors import OvertakenError
from shared.blobs.register import NOTHING, Seen
from shared.types.session_key import SessionKey

MAX_SEEN = 100_000  # versions that are noted


class Verdict(Enum):
    """What becomes of a file, by what the store has."""

    KEEP = "it is all that there is, or more"
    TAKE = "the store has more"
    DIVERGED = "each has what the other has not"
    REMOVE = "the session was deleted"


def verdict_on(here: bytes | None, there: SharedTranscript | None, *, is_behind: bool) -> Verdict:
    """Compare a session's file with what the store has. Files only ever grow at their ends.

    Args:
        here: the file; None: there is none.
        there: the store's.
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
    """Has something else in the same store, and is told when to look after it.

    Each method may raise StoreSilentError.
    """

    async def catch_up(self) -> None:
        """Bring to the store what it lacks."""

    async def forget_deleted(self) -> None:
        """Remove what another service has deleted."""


class Sharing:
    """See the module docstring. Whoever calls for a session has its lock, but for `is_current`.

    Args:
        store: that services share.
        files: of this one.
        histories: in the same store, of sessions that no client has named; None: these stay here.

    Attributes:
        store: likewise.
        histories: likewise.
        responses: in the same store, of all sessions that are there.
        conversations: in the same store.
        companions: look after what else is shared there, once the transcripts are.
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

    def fell_behind(self, keys: Iterable[SessionKey]) -> None:
        """Take which sessions are marked as behind in the directory."""
        self._behind = dict.fromkeys(keys)

    def is_behind(self, key: SessionKey) -> bool:
        """Whether the store does not have all of a session."""
        return key in self._behind

    def is_shared(self, key: SessionKey) -> bool:
        """Whether a session goes to the store."""
        return key not in self._local

    def keep_local(self, key: SessionKey, *, is_local: bool = True) -> None:
        """Have a session not go to the store, if it is not there already; or have it go there."""
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
            StoreSilentError: nobody knows.
        """
        seen = await self.store.look(key)
        return seen == NOTHING or seen.number == self._seen.get(key, NOTHING).number

    async def put(self, key: SessionKey, whole: bytes | None) -> Seen | None:
        """Put a session's file into the store; returns its version there, None: it is silent.

        Args:
            key: the session's.
            whole: the file as it will be; None: the session is deleted.

        Raises:
            SessionMovedError: another service has added something.
            TranscriptDamagedError: what is there cannot be compared.
        """
        try:
            before = self._seen.get(key) or await self._compared(key, whole)
            return await self.store.replace(key, before, whole)
        except OvertakenError as error:
            self._seen.pop(key, None)
            raise moved(key) from error
        except StoreSilentError:
            return None

    async def withdraw(self, key: SessionKey, whole: bytes) -> bool:
        """Have the store delete a session, unless another service has gone on with it.

        Args:
            key: the session's.
            whole: its file here.

        Returns:
            Whether the store has it no more; False, too, if it is silent.
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

    async def _compared(self, key: SessionKey, whole: bytes | None) -> Seen:
        """Return what version there is, of which a file has to be a continuation."""
        if whole is None:
            return await self.store.look(key)
        there = await self.store.read(key)
        if there is not None and there.data is not None and not whole.startswith(there.data):
            raise moved(key)
        return NOTHING if there is None else there.seen

    def agreed(self, key: SessionKey, seen: Seen) -> None:
        """Take of which version a session's file is, or of which one it is a continuation."""
        self._seen[key] = seen
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    async def tell(self, key: SessionKey, history: str) -> None:
        """Tell the store which session a history is of: it has the turn; "": it has none."""
        if self.histories is not None and history:
            await self.histories.keep(key, history)

    async def forget_answers(self, transcript: Transcript) -> None:
        """Have the store forget the histories and responses of a session that is deleted."""
        digests = [turn.history for turn in transcript.turns if turn.history]
        if self.histories is not None and digests:
            await self.histories.forget(transcript.header.key, digests)
        responses = [turn.response for turn in transcript.turns if turn.response]
        await self.responses.delete_all(transcript.header.tenant, responses)

    async def caught_up(self, key: SessionKey) -> None:
        """Take that the store has all of a session.

        Raises:
            OSError: the mark could not be removed.
        """
        if key in self._behind:
            await self._files.unmark_behind(key)
            del self._behind[key]

    async def fall_behind(self, key: SessionKey) -> None:
        """Mark a session whose file will have more than the store.

        Raises:
            OSError: it could not be marked.
        """
        if key not in self._behind:
            await self._files.mark_behind(key)
            self._behind[key] = None


def moved(key: SessionKey) -> SessionMovedError:
    """Say that another server has gone on with a session."""
    return SessionMovedError(
        f"session {key.session_id!r} went on at another server meanwhile",
        "submit the turn again: it then follows what was said there",
    )
