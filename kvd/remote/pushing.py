"""Push sessions to a remote store: the chunks first, then the manifest that makes them valid.

Until the manifest is stored, a pull gets the version before. The next push finds the chunks that an
interrupted push has sent, and does not send them again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvd.core.operations.growing import NOT_FETCHED
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, PushedSession
from kvd.remote.chunk_store import ChunkStore, has_lost
from kvd.remote.errors import DamagedRemoteError
from kvd.remote.manifest import Owner, is_remnant, is_unchanged, make_manifest, objects_of
from kvd.remote.names import session_place
from kvd.session_files.pieces import Chunk
from kvd.session_files.token_ids import TokenIds
from shared.blobs.blob_store import BlobStore, Data
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import ConflictError, StateError
from shared.types.session_key import session_key

CHUNK_BYTES = 8 << 20
THREADS = 4  # requests at once; each holds a chunk in memory
TRIES = 3  # to export a session that changes meanwhile


class Source(Protocol):
    """The kvd that exports the sessions."""

    def export_chunks(self, request: pb.ExportSessionRequest) -> Iterator[Chunk]:
        """Yield a session in chunks, the header first."""


class Outcome(StrEnum):
    """The result of a session's push."""

    PUSHED = "pushed"
    UNCHANGED = "unchanged"  # the store has this version already
    LONGER = "longer"  # the store has more: this server has lost the session's last tokens


@dataclass(frozen=True)
class PushResult:
    """The result of one push.

    Attributes:
        outcome: the result in a word.
        num_tokens: tokens of the session in the store.
        num_bytes: bytes of all objects that its manifest names.
        sent_bytes: bytes of those that were sent.
        epoch: the epoch of its manifest.
    """

    outcome: Outcome
    num_tokens: int
    num_bytes: int
    sent_bytes: int
    epoch: int


@dataclass(frozen=True)
class _Content:
    """A session's content as kvd exported it; `token_ids`: None if the export has no token ids."""

    header: bytes
    chunks: Sequence[pb.RemoteChunk]
    token_ids: pb.RemoteChunk | None
    seal: pb.SessionSeal | None
    sent_bytes: int


class Pusher:
    """Pushes one session after the other.

    Args:
        store: the remote store.
        source: the kvd that exports the sessions.
        owner: the server of that kvd.
        pace: limits the bytes sent.
        on_bytes: called with the bytes of each chunk, sent or found.
        chunk_bytes: about how large chunks are.
        clock: unix seconds.
        monotonic: monotonic seconds.
        threads: requests at once.
    """

    def __init__(
        self,
        store: BlobStore,
        source: Source,
        owner: Owner,
        pace: SharedPace,
        on_bytes: Callable[[int], None] = lambda _: None,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        threads: int = THREADS,
    ) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._source = source
        self._owner = owner
        self._pace = pace
        self._on_bytes = on_bytes
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._monotonic = monotonic
        self._threads = threads

    def push(
        self,
        info: pb.SessionInfo,
        *,
        takes: bool = False,
        prefix: bool = False,
        resends: bool = False,
    ) -> PushResult:
        """Push a session.

        Args:
            info: the session as it is now.
            takes: take it over if another server owns it in the store, or if its manifest is
                damaged and does not tell.
            prefix: of a session whose discards kvd does not know, push the tokens before them.
            resends: send all its chunks, though the store names them: they may be damaged there.

        Raises:
            FencedError: another server owns it.
            DamagedRemoteError: its manifest is damaged, and it is not to be taken over.
            ReportedError: kvd or the store fails.
        """
        session, seen_unix_s = info.session, self._clock()
        key = session_key(session.tenant, session.model, session.session_id)
        place = session_place(key)
        before = self._read(place, takes=takes)
        last = None if before is None else before.manifest
        manifest = make_manifest(info, last, self._owner, seen_unix_s, takes=takes)
        is_ours = last is not None and last.owner == self._owner.server_id
        is_copy = info.lost == NOT_FETCHED  # kvd has the first part of a session that was pulled
        may_stay = last is not None and (is_ours or is_copy)
        if last is not None and may_stay and not has_lost(self._store, key.tenant, last.chunks):
            if is_ours and not resends and is_unchanged(last, info, seen_unix_s):
                return _result(Outcome.UNCHANGED, last, 0)
            if is_remnant(last, info):
                return _result(Outcome.LONGER, last, 0)
        chunks = ChunkStore(self._store, key.tenant, self._monotonic)
        request = pb.ExportSessionRequest(
            session=session, prefix=prefix, chunk_bytes=self._chunk_bytes
        )
        named = [] if last is None or resends else objects_of(last)
        known = {chunk.blake3: chunk for chunk in named}
        content = self._send(request, known, chunks, resends=resends)
        manifest.header = content.header
        manifest.chunks.extend(content.chunks)
        manifest.num_tokens = content.chunks[-1].end_token if content.chunks else 0
        if content.token_ids is not None:
            manifest.token_ids.CopyFrom(content.token_ids)
        if content.seal is not None:
            manifest.seal.CopyFrom(content.seal)
        if not manifest.num_tokens:
            raise StateError(f"session {key} has no tokens", "push it after its first turn")
        # The manifest comes last, and only while no sweep can have removed a chunk that it names.
        chunks.check_time()
        self._catalog.replace(place, before, manifest)
        return _result(Outcome.PUSHED, manifest, content.sent_bytes)

    def _read(self, place: str, *, takes: bool) -> PushedSession | None:
        """Return the session of a place; with `takes` a tombstone if its manifest is damaged."""
        try:
            return self._catalog.read(place)
        except DamagedRemoteError:
            if not takes:
                raise
            return self._catalog.damaged(place)

    def _send(
        self,
        request: pb.ExportSessionRequest,
        known: Mapping[bytes, pb.RemoteChunk],
        chunks: ChunkStore,
        *,
        resends: bool,
    ) -> _Content:
        """Send what the store lacks, or everything; try again if the session changes meanwhile."""
        for _ in range(TRIES - 1):
            try:
                return self._send_once(request, known, chunks, resends=resends)
            except ConflictError as error:
                if not error.retryable:
                    raise
        return self._send_once(request, known, chunks, resends=resends)

    def _send_once(
        self,
        request: pb.ExportSessionRequest,
        known: Mapping[bytes, pb.RemoteChunk],
        chunks: ChunkStore,
        *,
        resends: bool,
    ) -> _Content:
        under_way: deque[Future[tuple[pb.RemoteChunk, int]]] = deque()
        done: list[pb.RemoteChunk] = []
        header, seal, sent_bytes = b"", None, 0
        tokens: TokenIds | None = None
        is_new = resends

        def send(num_bytes: int) -> None:
            nonlocal is_new
            is_new = True
            self._pace.take(num_bytes)

        def put(data: Data, end_token: int) -> tuple[pb.RemoteChunk, int]:
            # A server that stored a chunk has stored all chunks before it. So behind a missing one
            # there is none to find, except what an interrupted push sent: that is sent again.
            chunk, num_bytes = chunks.put(data, end_token, known, send, looks=not is_new)
            self._on_bytes(chunk.num_bytes)
            return chunk, num_bytes

        def finish_one() -> int:
            chunk, num_bytes = under_way.popleft().result()
            done.append(chunk)
            return num_bytes

        with ThreadPoolExecutor(self._threads) as threads:
            for data, end_token, seal in self._source.export_chunks(request):
                if seal is not None:
                    break
                if tokens is None:
                    header = bytes(data)
                    tokens = TokenIds(header)
                    continue
                tokens.add(data)
                if len(under_way) == self._threads:
                    sent_bytes += finish_one()
                under_way.append(threads.submit(put, data, end_token))
            if tokens is not None and tokens.found:
                under_way.append(threads.submit(put, tokens.found, end_token))
            while under_way:
                sent_bytes += finish_one()
        token_ids = done.pop() if tokens is not None and tokens.found else None
        return _Content(header, done, token_ids, seal, sent_bytes)


def _result(outcome: Outcome, manifest: pb.SessionManifest, sent_bytes: int) -> PushResult:
    num_bytes = sum(chunk.num_bytes for chunk in objects_of(manifest))
    return PushResult(outcome, manifest.num_tokens, num_bytes, sent_bytes, manifest.epoch)


def in_order(sessions: Sequence[pb.SessionInfo]) -> list[pb.SessionInfo]:
    """Order sessions for a push that may be interrupted: the most valuable ones first.

    First those that are only in DRAM, then those on SSD too; superseded and ended ones come last.
    Among equals pinned ones come first, then those with the most tokens to compute again, divided
    by their idle time: how soon they are likely to be used.
    """

    def rank(info: pb.SessionInfo) -> tuple[bool, bool, bool, float]:
        return rank_of(
            is_superseded=info.ended or info.superseded,
            is_dirty=bool(info.dirty_bytes),
            is_pinned=info.pin != pb.PIN_NONE,
            num_tokens=info.num_tokens,
            idle_s=info.idle_s,
        )

    return sorted(sessions, key=rank)


def rank_of(
    *, is_superseded: bool, is_dirty: bool, is_pinned: bool, num_tokens: int, idle_s: float
) -> tuple[bool, bool, bool, float]:
    """Return the rank of a session for a push, lowest first; see `in_order`."""
    return is_superseded, not is_dirty, not is_pinned, -num_tokens / (idle_s + 60.0)
