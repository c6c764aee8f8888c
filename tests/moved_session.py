"""A session that another server has pushed, a real kvd that pulls it, and a paced store.

The store is in memory. Chunks are small, so that a session of some hundred tokens has several.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvd.client.operator_client import OperatorClient, connect_to
from kvd.following.transfers import Transfers
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog
from kvd.remote.manifest import Owner, with_owner
from kvd.remote.names import session_place
from kvd.remote.pulling import PullResult
from kvd.remote.pushing import Pusher
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import ReportedError
from tests.faulty_store import FaultyStore, View
from tests.kvd_polling import all_clean, eventually, sessions_of
from tests.processes import KvdProcess, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * 256  # bytes of the small layout
NUM_CHUNKS = 6
TOKENS = tuple(range(100, 100 + NUM_CHUNKS * CHUNK_TOKENS))
KEY = key_of("s")
ELSEWHERE, HERE = Owner("elsewhere", "elsewhere"), Owner("here", "here")
ALL = 1 << 30


class Paced(View):
    """Gives out a limited number of a session's chunks, in order; readers of others wait.

    Attributes:
        chunks: names of the session's chunks, in order.
        fetched: names of all objects that were requested.
    """

    def __init__(self, store: FaultyStore) -> None:
        super().__init__(store, is_calm=True)
        self.chunks: Sequence[str] = ()
        self.fetched: list[str] = []
        self._allowed = ALL
        self._changed = threading.Condition()

    def allow(self, num_chunks: int) -> None:
        with self._changed:
            self._allowed = num_chunks
            self._changed.notify_all()

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        name_of = name.rpartition("/")[2]
        self.fetched.append(name_of)
        if name_of in self.chunks:
            place = self.chunks.index(name_of)
            with self._changed:
                assert self._changed.wait_for(lambda: place < self._allowed, 60)
        return super().get(name, start, num_bytes)


@dataclass
class Place:
    """See the module docstring.

    Attributes:
        kvd, engine, client: of the server that pulls.
        blobs: the store's objects.
        store: the paced view of it that the server uses.
        transfers: those of the server's follower.
    """

    kvd: KvdProcess
    engine: SyntheticEngine
    client: OperatorClient
    blobs: FaultyStore = field(default_factory=lambda: FaultyStore(Random(1)))  # noqa: S311

    def __post_init__(self) -> None:
        self.blobs.now_s = time.time()
        self.store = Paced(self.blobs)
        self.transfers = Transfers(self.store, self.client, HERE)
        self.transfers.open()

    @property
    def manifest(self) -> pb.SessionManifest:
        found = Catalog(View(self.blobs, is_calm=True)).read(session_place(KEY))
        assert found is not None
        return found.manifest

    async def pushed_elsewhere(self, tokens: Sequence[int] = TOKENS) -> None:
        """Have another server push the session; this server has none of it."""
        await self.engine.store(KEY, tokens)
        await asyncio.to_thread(self._push)
        await self.flush()
        self.store.chunks = [chunk.name for chunk in self.manifest.chunks]

    def _push(self) -> None:
        """Make the other server the owner, as if the session had continued there since then."""
        view = View(self.blobs, is_calm=True)
        info = self.client.describe(key_message(KEY)).info
        pusher = Pusher(view, self.client, ELSEWHERE, SharedPace(), chunk_bytes=CHUNK_BYTES)
        pusher.push(info, takes=True)

    def own_elsewhere(self, *, names_tokens: bool = True) -> None:
        """Have the other server own it, as if it had gone on there since it was here."""
        catalog = Catalog(View(self.blobs, is_calm=True))
        found = catalog.read(session_place(KEY))
        assert found is not None
        manifest = with_owner(found.manifest, ELSEWHERE)
        if not names_tokens:
            manifest.ClearField("token_ids")
        catalog.replace(found.place, found, manifest)

    async def restart(self) -> None:
        """Stop kvd, and start it again; everything is on SSD afterwards."""
        await all_clean(self.kvd)
        await self.kvd.stop()
        await self.kvd.start()

    async def flush(self) -> None:
        request = pb.FlushRequest(session=key_message(KEY))
        await asyncio.to_thread(self.client.flush, request)

    async def pull(self) -> tuple[pb.SessionInfo, PullResult] | None:
        """Pull the session as the follower does."""

        def pulled() -> tuple[pb.SessionInfo, PullResult] | None:
            found = self.transfers.find(KEY)
            return found and self.transfers.pull(KEY, found)

        return await asyncio.to_thread(pulled)

    @asynccontextmanager
    async def pulling(self, num_chunks: int) -> "AsyncIterator[asyncio.Task[object]]":
        """Pull the session: stop after so many chunks for the test, then let all of them come."""
        self.store.allow(num_chunks)
        task = asyncio.create_task(self.pull())
        try:
            await self.until_here(num_chunks * CHUNK_TOKENS)
            yield task
        finally:
            self.store.allow(ALL)
            await asyncio.wait([task])

    async def here(self) -> tuple[int, str] | None:
        """Return how many of the session's tokens kvd has, and the miss reason of the rest."""
        for info in await sessions_of(self.kvd):
            if info.session.session_id == KEY.session_id:
                return info.num_tokens, info.lost
        return None

    async def until_here(self, num_tokens: int) -> None:
        async def num_here() -> int:
            found = await self.here()
            return found[0] if found else 0

        await eventually(num_here, num_tokens)

    def damage(self, chunk: int) -> None:
        """Flip a bit of a chunk; a second call repairs it."""
        name = next(n for n in self.blobs.blobs if n.endswith(self.store.chunks[chunk]))
        data, stored_s = self.blobs.blobs[name]
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        self.blobs.blobs[name] = (bytes(changed), stored_s)

    async def exported(self) -> bytes:
        """Return the chunks that kvd would export of the session."""

        def chunks() -> bytes:
            request = pb.ExportSessionRequest(session=key_message(KEY), chunk_bytes=CHUNK_BYTES)
            _, *rest = self.client.export_chunks(request)
            return b"".join(bytes(chunk.data) for chunk in rest)

        return await asyncio.to_thread(chunks)


async def refusal(task: "asyncio.Task[object]") -> str:
    """Return the reason for which a pull fails."""
    try:
        await task
    except ReportedError as error:
        return error.reason
    return ""


@asynccontextmanager
async def moved_session(
    directory: Path, keep: str = "file", **environ: str
) -> AsyncIterator[Place]:
    """Yield a session of TOKENS in a store, and a kvd without it; `keep` is its dram.keep."""
    settings = {"KVD_REMOTE__PULL": "true", "KVD_REMOTE__URL": "file:///nowhere", **environ}
    sizes = ("--dram", "4MB", "--ssd", "8MB")
    async with (
        running_kvd(directory, *sizes, keep=keep, environ=settings) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        with connect_to(f"unix:{kvd.runtime_dir}/operator.sock") as client:
            place = Place(kvd, engine, client)
            await place.pushed_elsewhere()
            yield place
