"""Transcripts: the token ids of every session (D8), so that nothing is lost without kvd.

A turn is on disk when `append` returns; the fsyncs of turns that end together run together and
share the file system's commit. Where services share an object store, the turn is there before: any
of them can continue the session, and `refresh` fetches what another has added. If the store does
not answer, no turn fails: the session is *behind* there, and is put there later.

The histories of a session that no client has named are put into the store, too, each once the store
has its turn; of a session that was behind, only that of its last turn.

Invariants:
    1. one session's reads and writes are serialised, so that a read never overtakes a write;
    2. a file that the object store does not have all of is marked as behind before it is written;
    3. a history in the store leads to a transcript in the store that has it.
"""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

from inference_svc.core.errors import TranscriptUnavailableError, UnknownSessionError
from inference_svc.core.transcript_format import (
    Header,
    Transcript,
    encode_discard,
    encode_end,
    encode_transcript,
    encode_turn,
)
from inference_svc.core.turn_record import Discard, TurnRecord
from inference_svc.runtime.turns.local_transcripts import MAX_CACHED_TOKENS, LocalTranscripts
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_transcripts import SharedTranscripts
from inference_svc.runtime.turns.store_calls import StoreSilentError
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from inference_svc.runtime.turns.transcript_sharing import Sharing, Verdict, moved_error, verdict_on
from shared.blobs.register import NOTHING, Seen
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

NUM_LOCKS = 64  # sessions that share a lock merely wait for each other's file

log = get_logger(__name__)


class TranscriptStore:
    """The transcripts of all sessions. Methods are called on the event loop.

    Args:
        directory: the directory of the files.
        shared: transcripts in the object store that services share; None: they share none.
        histories: histories of unnamed sessions in the same store; None: these are not shared.
        max_cached_tokens: most tokens of the transcripts in memory.

    Attributes:
        local: this service's own files, and the number of each tenant's sessions.
        trouble: failures of the disk.
        sharing: the state of the transcripts in the object store; None: services share none.
    """

    def __init__(
        self,
        directory: Path,
        shared: SharedTranscripts | None = None,
        histories: SharedHistories | None = None,
        max_cached_tokens: int = MAX_CACHED_TOKENS,
    ) -> None:
        files = TranscriptFiles(directory)
        self.local = LocalTranscripts(files, max_cached_tokens)
        self.trouble = self.local.trouble
        self.sharing = None if shared is None else Sharing(shared, files, histories)
        self._locks = [asyncio.Lock() for _ in range(NUM_LOCKS)]

    def open(self) -> None:
        """Make the directory, check that it can be written, and lock it until `close`.

        Raises:
            TranscriptError: the directory cannot be used.
        """
        self.local.files.open()

    def count_sessions(self) -> None:
        """Count each tenant's sessions; blocks while the first line of every file is read."""
        self.local.count_sessions()
        if self.sharing is not None:
            self.sharing.load_behind(header.key for header in self.local.files.behind())

    def close(self) -> None:
        """Unlock the directory, and stop calling the object store."""
        if self.sharing is not None:
            self.sharing.store.calls.close()
        self.local.files.close()

    async def find(self, key: SessionKey) -> Transcript | None:
        """Return the session's transcript; None: there is no such session.

        Does not yield to the event loop after it has the answer: the caller may act on it.
        """
        cached = self.local.cache.get(key)
        if cached is not None:
            return cached
        async with self._lock(key):
            return await self.local.current(key)

    async def get(self, key: SessionKey) -> Transcript:
        """Return the session's transcript.

        Raises:
            UnknownSessionError: there is no such session.
        """
        transcript = await self.find(key)
        if transcript is None:
            raise UnknownSessionError(
                f"there is no session {key.session_id!r} of tenant {key.tenant!r} for this model",
                "check the id, or submit a turn to begin it",
            )
        return transcript

    async def append(
        self, key: SessionKey, turn: TurnRecord, *, is_final: bool, is_local: bool = False
    ) -> Transcript:
        """Record a turn, durably; opens the session if it is the first.

        Args:
            key: the session's key.
            turn: the record of its next turn.
            is_final: whether the session takes no further turn.
            is_local: whether to keep the session out of the shared store, if it is not there yet.

        Raises:
            SessionMovedError: another service has added a turn meanwhile; nothing was recorded.
            TranscriptUnavailableError: nothing was recorded.
        """
        async with self._lock(key):
            before = await self.local.current(key)
            if self.sharing is not None:
                self.sharing.keep_local(key, is_local=is_local)
            before = before or Transcript(Header(*key))
            if turn.turn != len(before.turns):
                raise moved_error(key)
            after = before.with_turn(turn, is_final=is_final)
            lines = encode_turn(turn) + (encode_end() if is_final else b"")
            await self._write(key, after, lines, history=turn.history)
            return after

    async def fork_with(
        self, before: Transcript, turn: TurnRecord, session_id: str, *, is_local: bool
    ) -> None:
        """Record a turn, durably, in a fork of a session to which another service added turns.

        Args:
            before: the session as it was when the turn began.
            turn: the record of the turn.
            session_id: the new session's id, which is unique.
            is_local: whether to keep the new session out of the shared store.

        Raises:
            TranscriptUnavailableError: nothing was recorded.
        """
        forked = before.forked(session_id, len(before.turns))
        await asyncio.to_thread(getattr, forked, "context")  # replaying discards may take long
        key = forked.header.key
        async with self._lock(key):
            if self.sharing is not None:
                self.sharing.keep_local(key, is_local=is_local)
            after = forked.with_turn(turn, is_final=False)
            await self._write(key, after, b"", history=turn.history)

    async def discard(self, key: SessionKey, discard: Discard) -> Transcript:
        """Record, durably, a discard of a session's context between turns.

        Raises:
            UnknownSessionError: there is no such session.
            SessionMovedError: another service has added a turn meanwhile.
            TranscriptUnavailableError: nothing was recorded.
        """
        before = await self.get(key)
        async with self._lock(key):
            if await self.local.current(key) != before:
                raise moved_error(key)
            after = before.with_discard(discard)
            await self._write(key, after, encode_discard(discard))
            return after

    async def end(self, key: SessionKey) -> None:
        """Record, durably, that the session takes no further turn.

        Raises:
            UnknownSessionError: there is no such session.
            SessionMovedError: another service has added a turn meanwhile.
            TranscriptUnavailableError: nothing was recorded.
        """
        await self.get(key)
        async with self._lock(key):
            before = await self.local.current(key)
            if before is None or before.has_ended:
                return
            after = before.with_end()
            await self._write(key, after, encode_end())

    async def fork(
        self, key: SessionKey, session_id: str, at_turn: int, *, is_local: bool = False
    ) -> Transcript | None:
        """Start a new session from another's first turns; None: the new one exists already.

        If `is_local`, or if the other is local, it is not shared until its next turn.
        """
        new_key = key._replace(session_id=session_id)
        forked = (await self.get(key)).forked(session_id, at_turn)
        await asyncio.to_thread(getattr, forked, "context")  # replaying discards may take long
        async with self._lock(new_key):
            if await self.local.current(new_key):
                return None
            if self.sharing is not None and (is_local or self._sharing_of(key) is None):
                self.sharing.keep_local(new_key)
            await self._write(new_key, forked, b"")
            return forked

    async def delete(self, key: SessionKey) -> None:
        """Remove a session for good, from the object store first.

        Raises:
            UnknownSessionError: there is no such session.
            TranscriptUnavailableError: it is still there.
        """
        before = await self.get(key)
        async with self._lock(key):
            sharing = self._sharing_of(key)
            if sharing is not None and await sharing.put(key, None) is None:
                raise TranscriptUnavailableError(
                    f"session {key.session_id!r} is not deleted: the object store does not answer",
                    "try again later; the log of the service says what to do",
                )
            await self._remove(key, before)

    async def release(self, key: SessionKey) -> bool:
        """Remove a session here, and from the store unless another service has added turns to it.

        Returns:
            Whether it is gone for good; False, too, if the store is silent and may still have it.

        Raises:
            UnknownSessionError: there is no such session.
            TranscriptUnavailableError: it is still there.
        """
        before = await self.get(key)
        async with self._lock(key):
            data, sharing = await self.local.read(key), self._sharing_of(key)
            is_gone = sharing is None or data is None or await sharing.withdraw(key, data)
            await self._remove(key, before if is_gone else None)
        return is_gone

    # ------------------------------------------------------------------------------ other services

    async def refresh(self, key: SessionKey, *, must_know: bool = False) -> None:
        """Fetch the newest transcript of a session, if services share an object store.

        Args:
            key: the session's key.
            must_know: whether to fail if the session is unknown here and the store is silent.

        Raises:
            TranscriptUnavailableError: the session is unknown, or cannot be written here.
            TranscriptDamagedError: the store's transcript is damaged.
        """
        sharing = self._sharing_of(key)
        if sharing is None:
            return
        try:
            if not await sharing.is_current(key):
                async with self._lock(key):
                    await self._adopt(sharing, key)
        except StoreSilentError as error:
            if must_know and await self.find(key) is None:
                raise TranscriptUnavailableError(
                    f"it is not known whether session {key.session_id!r} exists: {error.message}",
                    "try again later; or send expected_turn = 0 with a session's first turn",
                    retry_after_s=sharing.store.calls.retry_s,
                ) from error

    async def catch_up(self) -> None:
        """Put all that is behind into the object store, until it is silent."""
        if (sharing := self.sharing) is None:
            return
        for key in sharing.behind:
            try:
                async with self._lock(key):
                    await self._adopt(sharing, key)
                    data = await self.local.read(key) if sharing.is_behind(key) else None
                    seen = await sharing.put(key, data) if data else None
                    found = await self.local.current(key)
                    if seen is not None and found is not None:
                        await self._note_agreement(sharing, key, seen, found.history)
            except StoreSilentError:
                return
            except ReportedError as error:
                log.warning("transcript_not_shared", session=str(key), error=str(error))
        with suppress(StoreSilentError):
            await sharing.responses.catch_up()
            for companion in sharing.companions:
                await companion.catch_up()

    async def forget_deleted(self) -> None:
        """Remove the files of sessions that other services deleted, unless the store is silent."""
        if self.sharing is None:
            return
        with suppress(StoreSilentError):
            for digest in await self.sharing.store.deleted():
                header = await asyncio.to_thread(self.local.files.header_of, digest)
                if header is not None:
                    await self.refresh(header.key)
            for companion in self.sharing.companions:
                await companion.forget_deleted()

    async def _adopt(self, sharing: Sharing, key: SessionKey) -> None:
        """Replace a session's file by the store's, if that has more; the caller has its lock."""
        there = await sharing.store.read(key)
        here = await self.local.read(key) if await self.local.current(key) is not None else None
        verdict = verdict_on(here, there, is_behind=sharing.is_behind(key))
        if verdict is Verdict.REMOVE:
            await self._remove(key)
        elif there is not None and verdict is not Verdict.KEEP:
            assert there.data is not None and there.transcript is not None  # noqa: S101, PT018
            sets_aside = verdict is Verdict.DIVERGED
            await self.local.replace(key, there.data, there.transcript, sets_aside=sets_aside)
        if there is not None and (verdict is not Verdict.KEEP or here == there.data):
            await self._note_agreement(sharing, key, there.seen)
        else:
            sharing.note_version(key, NOTHING if there is None else there.seen)

    async def _note_agreement(
        self, sharing: Sharing, key: SessionKey, seen: Seen, history: str = ""
    ) -> None:
        """Record that file and object store have the same; then put the history, if any, there."""
        try:
            await sharing.unmark_behind(key)
        except OSError as error:
            raise self.local.record_failure(key, error, "write") from error
        sharing.note_version(key, seen)
        await sharing.put_history(key, history)

    # ----------------------------------------------------------------------------------- the files

    async def _write(
        self, key: SessionKey, transcript: Transcript, lines: bytes, history: str = ""
    ) -> None:
        """Append the lines, or start the file with the whole transcript; then cache it.

        On failure the file is what it was. The session leaves the cache meanwhile: if this task is
        cancelled, the write may still complete, and it is not known what the file has.

        Raises:
            SessionMovedError: another service has added something.
            TranscriptDiskFullError: there is no room for the lines.
            TranscriptUnavailableError: they cannot be written for another reason.
        """
        self.local.cache.drop(key)
        sharing, begin = self._sharing_of(key), partial(encode_transcript, transcript)
        seen: Seen | None = None
        if sharing is not None:
            before = await self.local.read(key)
            seen = await sharing.put(key, before + lines if before else begin())
        try:
            if sharing is not None and seen is None:
                await sharing.mark_behind(key)
            await self.local.append(key, lines, begin)
        except OSError as error:
            raise self.local.record_failure(key, error, "write") from error
        if sharing is not None and seen is not None:
            await self._note_agreement(sharing, key, seen, history)
        self.local.cache.keep(key, transcript)

    async def _remove(self, key: SessionKey, gone: Transcript | None = None) -> None:
        """Remove a file, and what is known of it; the caller has its lock.

        Args:
            key: the session's key.
            gone: its transcript, if it is gone for good: the store then forgets its answers.
        """
        sharing = self._sharing_of(key)
        try:
            await self.local.remove(key)
            if self.sharing is not None:
                await self.sharing.unmark_behind(key)
                self.sharing.forget(key)
        except OSError as error:
            raise self.local.record_failure(key, error, "write") from error
        if sharing is not None and gone is not None:
            await sharing.forget_answers(gone)

    def _sharing_of(self, key: SessionKey) -> Sharing | None:
        """Return the sharing of a session; None: it is kept by this service alone."""
        sharing = self.sharing
        return sharing if sharing is not None and sharing.is_shared(key) else None

    def _lock(self, key: SessionKey) -> asyncio.Lock:
        return self._locks[hash(key) % NUM_LOCKS]
