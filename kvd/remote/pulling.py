"""Pull sessions from a remote store: become their owner, then import their chunks, verified.

The server becomes the owner before it reads the chunks. So it gets the last version, and the owner
before can push nothing after it. If the import fails, the chunks stay in the store as they were,
and the next server that pulls becomes the owner.

If kvd may have the first tokens of a session, only the chunks behind them are fetched. kvd receives
the token ids of the other chunks, and checks by its block keys whether it has them. If it has not,
all chunks are fetched.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvd.errors import NotHeldError
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, PushedSession
from kvd.remote.chunk_store import ChunkStore
from kvd.remote.errors import DamagedRemoteError, NotPushedError
from kvd.remote.manifest import Owner, has_expired, key_of, with_owner
from kvd.session_files.file_format import SessionFileError
from kvd.session_files.frame_writer import end_bytes, held_bytes
from shared.blobs.blob_store import BlobStore
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import InvalidInputError, ReportedError, StateError

THREADS = 4  # requests at once; each holds a chunk in memory
GROW_BYTES = 4 << 20  # of KV that arrives before a growing session is extended by it
# kvd refuses a tail if it lacks the tokens before it, or is of a release that knows no tails.
REFUSED = frozenset({NotHeldError.reason, SessionFileError.reason})


class Sink(Protocol):
    """The kvd that imports the sessions."""

    def import_session(
        self, target: pb.ImportTarget, pieces: Iterator[bytes | memoryview]
    ) -> pb.ImportSessionResponse:
        """Store a session from the bytes of a session file."""

    def set_ttl(self, key: pb.SessionKey, ttl_s: float) -> float:
        """Set a session's own TTL; return it."""

    def pin(self, key: pb.SessionKey, *, soft: bool) -> None:
        """Pin a session."""


@dataclass(frozen=True)
class PullResult:
    """The result of one pull.

    Attributes:
        session: the session as it is stored now.
        num_tokens: its tokens.
        num_bytes: bytes that were fetched.
        epoch: the epoch of its manifest.
    """

    session: pb.SessionKey
    num_tokens: int
    num_bytes: int
    epoch: int


class Held(NamedTuple):
    """The part of a session that kvd has: a number of chunks, and the token ids in them."""

    num_chunks: int = 0
    token_ids: bytes = b""


class Puller:
    """Pulls one session after the other.

    Args:
        store: the remote store.
        sink: the kvd that imports the sessions.
        owner: the server of that kvd.
        pace: limits the bytes received.
        on_bytes: called with the bytes of each chunk that has arrived.
        threads: requests at once.
    """

    def __init__(
        self,
        store: BlobStore,
        sink: Sink,
        owner: Owner,
        pace: SharedPace,
        on_bytes: Callable[[int], None] = lambda _: None,
        threads: int = THREADS,
    ) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._sink = sink
        self._owner = owner
        self._pace = pace
        self._on_bytes = on_bytes
        self._threads = threads

    def pull(
        self,
        found: PushedSession,
        now_unix_s: float,
        *,
        copies: bool = False,
        replaces: bool = False,
        replaces_up_to: int = 0,
        may_add_layout: bool = False,
        grows: bool = False,
    ) -> PullResult:
        """Pull a session.

        Args:
            found: the session in the store's catalog.
            now_unix_s: the time, to know whether it has expired.
            copies: do not become its owner.
            replaces: replace a session of this key.
            replaces_up_to: replace one of at most so many tokens, fewer than are pulled. The first
                tokens are not fetched if kvd has them.
            may_add_layout: import even if kvd does not know the layout.
            grows: extend the session while chunks arrive; it keeps them if later ones fail.

        Raises:
            NotPushedError: it has expired.
            FencedError: another server has become its owner meanwhile.
            OvertakenError: its owner has pushed it meanwhile.
            DamagedRemoteError: a chunk is missing or damaged. A session that grows keeps the tokens
                before it; otherwise nothing is stored.
            ReportedError: kvd or the store fails.
        """
        manifest = found.manifest
        if has_expired(manifest, now_unix_s - found.version.stored_unix_s):
            raise NotPushedError(
                f"session {manifest.session.session_id!r} has expired in the object store",
                "nothing needs to be done: its next turn recomputes its history",
            )
        # Before any chunk is read: from now on the owner before is fenced, and cannot push.
        if not copies and manifest.owner != self._owner.server_id:
            manifest = with_owner(manifest, self._owner)
            self._catalog.replace(found.place, found, manifest)
        target = pb.ImportTarget(
            replace=replaces,
            new_layout=may_add_layout,
            replace_up_to=replaces_up_to,
            grow_bytes=GROW_BYTES if grows else 0,
        )
        if manifest.HasField("seal"):
            target.seal.CopyFrom(manifest.seal)
        fetch = _Fetch(
            ChunkStore(self._store, key_of(manifest).tenant),
            manifest,
            self._pace,
            self._on_bytes,
            self._threads,
        )
        stored = self._import(target, fetch)
        if manifest.ttl_s:
            self._sink.set_ttl(stored.session, manifest.ttl_s)
        if manifest.pin != pb.PIN_NONE:
            self._sink.pin(stored.session, soft=manifest.pin == pb.PIN_SOFT)
        return PullResult(stored.session, stored.num_tokens, fetch.num_bytes, manifest.epoch)

    def _import(self, target: pb.ImportTarget, fetch: "_Fetch") -> pb.ImportSessionResponse:
        """Import a session: only its tail if kvd has the tokens before it, otherwise all of it."""
        held = fetch.held(target.replace_up_to)
        if held is not None:
            try:
                return self._send(target, fetch, held)
            except (StateError, InvalidInputError) as error:
                if error.reason not in REFUSED:
                    raise
        return self._send(target, fetch, Held())

    def _send(
        self, target: pb.ImportTarget, fetch: "_Fetch", held: Held
    ) -> pb.ImportSessionResponse:
        """Send a session to kvd; raise the error that stopped its chunks, if one did."""
        stopped: list[ReportedError] = []

        def pieces() -> Iterator[bytes | memoryview]:
            try:
                yield from fetch.pieces(held)
            except ReportedError as error:  # gRPC cannot pass it on: kvd sees a file cut short
                stopped.append(error)

        try:
            return self._sink.import_session(target, pieces())
        except ReportedError as error:
            if stopped:
                raise stopped[0] from error
            raise


class _Fetch:
    """The pull of one session: its chunks on their way out of the store.

    Args:
        chunks: the chunks of its tenant.
        manifest: its manifest.
        pace, on_bytes, threads: see Puller.

    Attributes:
        num_bytes: bytes that have arrived.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        manifest: pb.SessionManifest,
        pace: SharedPace,
        on_bytes: Callable[[int], None],
        threads: int,
    ) -> None:
        self._chunks = chunks
        self._manifest = manifest
        self._pace = pace
        self._on_bytes = on_bytes
        self._threads = threads
        self.num_bytes = 0

    def held(self, num_tokens: int) -> Held | None:
        """Return the part that need not be fetched if kvd has the first `num_tokens`; None: none.

        None also if the token ids are missing or damaged: kvd could not check what it has then.
        """
        manifest = self._manifest
        num_chunks = sum(chunk.end_token <= num_tokens for chunk in manifest.chunks)
        if not num_chunks or not manifest.HasField("token_ids"):
            return None
        try:
            token_ids = self._fetch_chunk(manifest.token_ids)
        except DamagedRemoteError:
            return None
        self.num_bytes += len(token_ids)
        end = manifest.chunks[num_chunks - 1].end_token * TOKEN_BYTES
        return Held(num_chunks, bytes(token_ids[:end])) if end <= len(token_ids) else None

    def pieces(self, held: Held) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the session's file: its header, its chunks in order, its end.

        Instead of the chunks that kvd holds, yield their token ids.
        """
        manifest = self._manifest
        yield manifest.header
        if held.token_ids:
            yield held_bytes(held.token_ids)
        fetching: deque[Future[memoryview]] = deque()

        def next_chunk() -> memoryview:
            data = fetching.popleft().result()
            self.num_bytes += len(data)
            return data

        with ThreadPoolExecutor(self._threads) as threads:
            for chunk in manifest.chunks[held.num_chunks :]:
                fetching.append(threads.submit(self._fetch_chunk, chunk))
                if len(fetching) == self._threads:
                    yield next_chunk()
            while fetching:
                yield next_chunk()
        yield end_bytes(manifest.num_tokens)

    def _fetch_chunk(self, chunk: pb.RemoteChunk) -> memoryview:
        self._pace.take(chunk.num_bytes)
        data = self._chunks.view(chunk)
        self._on_bytes(len(data))
        return data
