"""Pulls sessions: a server becomes the owner first, then takes the chunks in, each compared.

So what it has is what was pushed last, and the owner before it can push nothing behind its back. If
it then cannot take them in, they lie there as they were; whoever pulls next becomes the owner.

Of a session whose first tokens may be there only the chunks behind them are fetched: kvd is told
which tokens the others hold, and finds out whether it has them, by its own keys. If it has not, all
chunks are fetched.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvd.errors import NotHeldError
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, Pushed
from kvd.remote.chunk_store import ChunkStore
from kvd.remote.errors import DamagedRemoteError, NotPushedError
from kvd.remote.manifest import Owner, has_expired, key_of, taken
from kvd.session_files.file_format import SessionFileError
from kvd.session_files.frame_writer import end_bytes, held_bytes
from shared.blobs.blob_store import BlobStore
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import InvalidInputError, ReportedError, StateError

THREADS = 4  # requests at once; each holds a chunk
GROW_BYTES = 4 << 20  # of rows that are stored before a session that grows has them
# Why kvd takes no tail: it does not have what comes before, or is of a release that knows none.
REFUSED = frozenset({NotHeldError.reason, SessionFileError.reason})


class Sink(Protocol):
    """The kvd that is to have the sessions."""

    def import_session(
        self, target: pb.ImportTarget, pieces: Iterator[bytes | memoryview]
    ) -> pb.ImportSessionResponse:
        """Store a session."""

    def set_ttl(self, key: pb.SessionKey, ttl_s: float) -> float:
        """Set a session's own TTL."""

    def pin(self, key: pb.SessionKey, *, soft: bool) -> None:
        """Pin a session."""


@dataclass(frozen=True)
class PullResult:
    """One session's pull.

    Attributes:
        session: as it is stored now.
        num_tokens: of it.
        num_bytes: that were fetched for it.
        epoch: of its manifest.
    """

    session: pb.SessionKey
    num_tokens: int
    num_bytes: int
    epoch: int


class Held(NamedTuple):
    """What kvd has of a session: its first chunks, and the tokens in these."""

    num_chunks: int = 0
    token_ids: bytes = b""


class Puller:
    """Pulls one session after the other.

    Args:
        store: where from.
        sink: where to.
        owner: that server.
        pace: of the bytes received.
        on_bytes: told how many bytes of a session have come.
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
        found: Pushed,
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
            found: of the store's catalog.
            now_unix_s: the clock, to know what has expired.
            copies: leave its owner what it is.
            replaces: a session of this key gives way.
            replaces_up_to: so does one of at most so many tokens, fewer than are pulled; if these
                are its first ones, they are not fetched.
            may_add_layout: even if kvd does not know the layout.
            grows: the session has what has come meanwhile, and keeps it if the rest does not come.

        Raises:
            NotPushedError: it has expired.
            FencedError: another server has become its owner just now.
            OvertakenError: its owner has pushed it just now.
            DamagedRemoteError: it is not what was put there; only what lies before that is stored,
                and nothing of a session that does not grow.
            ReportedError: kvd, or the store, does not do its part.
        """
        manifest = found.manifest
        if has_expired(manifest, now_unix_s - found.version.stored_unix_s):
            raise NotPushedError(
                f"session {manifest.session.session_id!r} has expired in the store",
                "its next turn computes its history anew",
            )
        if not copies and manifest.owner != self._owner.server_id:
            manifest = taken(manifest, self._owner)
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
        stored = self._stored(target, fetch)
        if manifest.ttl_s:
            self._sink.set_ttl(stored.session, manifest.ttl_s)
        if manifest.pin != pb.PIN_NONE:
            self._sink.pin(stored.session, soft=manifest.pin == pb.PIN_SOFT)
        return PullResult(stored.session, stored.num_tokens, fetch.num_bytes, manifest.epoch)

    def _stored(self, target: pb.ImportTarget, fetch: "_Fetch") -> pb.ImportSessionResponse:
        """Have kvd store a session, by its tail if kvd has what comes before, else by all of it."""
        held = fetch.held(target.replace_up_to)
        if held is not None:
            try:
                return self._sent(target, fetch, held)
            except (StateError, InvalidInputError) as error:
                if error.reason not in REFUSED:
                    raise
        return self._sent(target, fetch, Held())

    def _sent(
        self, target: pb.ImportTarget, fetch: "_Fetch", held: Held
    ) -> pb.ImportSessionResponse:
        """Send a session to kvd; what stops its chunks from coming is what is raised."""
        stopped: list[ReportedError] = []

        def pieces() -> Iterator[bytes | memoryview]:
            try:
                yield from fetch.pieces(held)
            except ReportedError as error:  # gRPC has no way for it: kvd gets a file cut short
                stopped.append(error)

        try:
            return self._sink.import_session(target, pieces())
        except ReportedError as error:
            if stopped:
                raise stopped[0] from error
            raise


class _Fetch:
    """One session on its way out of the store.

    Args:
        chunks: of its tenant.
        manifest: its own.
        pace, on_bytes, threads: see Puller.

    Attributes:
        num_bytes: that have come.
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
        """Return what need not be fetched where the first tokens are; None: all has to be.

        What says which tokens these are may be gone, or damaged: then nobody can tell.
        """
        manifest = self._manifest
        num_chunks = sum(chunk.end_token <= num_tokens for chunk in manifest.chunks)
        if not num_chunks or not manifest.HasField("token_ids"):
            return None
        try:
            token_ids = self._got(manifest.token_ids)
        except DamagedRemoteError:
            return None
        self.num_bytes += len(token_ids)
        end = manifest.chunks[num_chunks - 1].end_token * TOKEN_BYTES
        return Held(num_chunks, bytes(token_ids[:end])) if end <= len(token_ids) else None

    def pieces(self, held: Held) -> Iterator[bytes | memoryview]:
        """Yield the session's file: its header, its chunks as they come, its end.

        In place of the chunks that are held come their tokens.
        """
        manifest = self._manifest
        yield manifest.header
        if held.token_ids:
            yield held_bytes(held.token_ids)
        coming: deque[Future[memoryview]] = deque()

        def next_one() -> memoryview:
            data = coming.popleft().result()
            self.num_bytes += len(data)
            return data

        with ThreadPoolExecutor(self._threads) as threads:
            for chunk in manifest.chunks[held.num_chunks :]:
                coming.append(threads.submit(self._got, chunk))
                if len(coming) == self._threads:
                    yield next_one()
            while coming:
                yield next_one()
        yield end_bytes(manifest.num_tokens)

    def _got(self, chunk: pb.RemoteChunk) -> memoryview:
        self._pace.take(chunk.num_bytes)
        data = self._chunks.view(chunk)
        self._on_bytes(len(data))
        return data
