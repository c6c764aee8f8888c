"""A kvd without a cache behind it: real sockets, a real arena, answers that tests choose."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc

from kvd.engines.data_socket import DataConnection, DataSocket, EngineUsers
from kvd.host.listening import listen_at
from kvd.rpc.local_calls import LocalCalls
from kvd.tiers.arena import Arena
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET
from shared.types.kv_layout import KVLayout

NUM_SLOTS = 4
MAX_QUEUE_JOBS = 3
MAX_CALLS = 100  # local ones at once
MOST_SNAPSHOTS = 3  # snapshots of a queue, after which the stream ends


class SmallKvd(kvd_pb2_grpc.EngineServicer):
    """The service of one run of this kvd.

    Attributes:
        confirms: whether it confirms leases of an earlier kvd.
        attaches: requests, newest last.
        completed: lease ids of CompleteStore and CompleteLoad with their success.
        gone: peers whose connections have ended.
        may_attach: Attach is answered once it is set.
        mute: names of calls that are never answered: PrepareStore, CompleteStore, EndSession.
        unanswered: received calls of these, oldest first.
        ended: ids of sessions that end, oldest first.
        snapshots: queue snapshots received, newest last.
        offers_local_calls: whether engines get a socket for calls; False: it is older.
    """

    offers_local_calls = True

    def __init__(self, arena: Arena, data_socket: DataSocket, *, confirms: bool) -> None:
        self.arena = arena
        self.confirms = confirms
        self.attaches: list[kvd_pb2.AttachRequest] = []
        self.completed: list[tuple[int, bool]] = []
        self.gone: list[DataConnection] = []
        self.may_attach = asyncio.Event()
        self.may_attach.set()
        self.mute: set[str] = set()
        self.unanswered: list[str] = []
        self.ended: list[str] = []
        self.snapshots: list[kvd_pb2.QueueSnapshot] = []
        self.connection: DataConnection | None = None
        self.next_lease = arena.first_lease_id
        self._data_socket = data_socket

    async def Attach(self, request, context):  # noqa: N802
        """Attach, and hold until the connection ends."""
        self.connection = self._data_socket.claim(request.data_token)
        self.connection.arena = self.arena
        self.attaches.append(request)
        await self.may_attach.wait()
        attached = kvd_pb2.Attached(
            engine_id=len(self.attaches),
            arena_id=self.arena.arena_id,
            slot_bytes=self.arena.slots.slot_bytes,
            num_slots=self.arena.slots.num_slots,
            confirmed_leases=request.held_leases if self.confirms else (),
            lost_leases=() if self.confirms else request.held_leases,
            max_queue_jobs=MAX_QUEUE_JOBS,
            local_calls=self.offers_local_calls,
        )
        yield kvd_pb2.AttachEvent(attached=attached)
        await self.connection.gone.wait()

    async def PrepareLoad(self, request, context):  # noqa: N802
        """Grant slot 1 for everything; as pending if that is accepted. Say what it was to wait."""
        self.next_lease += 1
        num_tokens = len(request.token_ids) // 4
        span = kvd_pb2.LoadSpan(slot_id=1, num_tokens=num_tokens, tier=kvd_pb2.TIER_SSD)
        answer = kvd_pb2.PrepareLoadResponse(
            lookup=kvd_pb2.LOOKUP_HIT,
            lease_id=self.next_lease,
            spans=[span],
            end_token=num_tokens,
            fetch_waited_s=request.fetch_wait_s,
        )
        if request.accept_pending:
            answer.lookup = kvd_pb2.LOOKUP_PENDING
            wake = self.connection.wakeup.wake
            answer.progress_index = self.arena.progress.open(self.next_lease, wake)
        return answer

    async def CompleteLoad(self, request, context):  # noqa: N802
        """Note the completion."""
        self.completed.append((request.lease_id, True))
        return kvd_pb2.CompleteLoadResponse()

    async def PrepareStore(self, request, context):  # noqa: N802
        """Grant slot 2 for everything."""
        await self._answer("PrepareStore")
        self.next_lease += 1
        num_tokens = len(request.token_ids) // 4
        block = kvd_pb2.StoreBlock(slot_id=2, num_tokens=num_tokens)
        return kvd_pb2.PrepareStoreResponse(
            lease_id=self.next_lease, blocks=[block], end_token=num_tokens
        )

    async def CompleteStore(self, request, context):  # noqa: N802
        """Note the completion."""
        await self._answer("CompleteStore")
        self.completed.append((request.lease_id, request.success))
        return kvd_pb2.CompleteStoreResponse(stored_tokens=16)

    async def _answer(self, call):
        """Return, unless this call must stay unanswered."""
        if call in self.mute:
            self.unanswered.append(call)
            await asyncio.get_running_loop().create_future()

    async def EndSession(self, request, context):  # noqa: N802
        """Note the end."""
        await self._answer("EndSession")
        self.ended.append(request.session.session_id)
        return kvd_pb2.EndSessionResponse()

    async def PushQueue(self, requests, context):  # noqa: N802
        """Acknowledge everything but the snapshot with which the stream ends."""
        async for snapshot in requests:
            self.snapshots.append(snapshot)
            if len(self.snapshots) == MOST_SNAPSHOTS:
                return
            yield kvd_pb2.QueueAck(sequence=snapshot.sequence)


@asynccontextmanager
async def small_kvd(
    directory: Path,
    layout: KVLayout,
    *,
    confirms: bool = True,
    keep: bool = True,
    may_attach: bool = True,
):
    """Run this kvd once in `directory`; with `keep` it adopts and leaves the arena."""
    options = ArenaOptions(keep="file" if keep else "none", directory=directory)
    store = ArenaStore(options, directory, num_words=4)
    kept = store.find().get(layout.fingerprint)
    arena = store.adopt(layout, kept).arena if kept else store.create(layout, NUM_SLOTS)
    data_socket = DataSocket(EngineUsers(), max_connections=4)
    kvd = SmallKvd(arena, data_socket, confirms=confirms)
    if kvd.offers_local_calls:
        add = kvd_pb2_grpc.add_EngineServicer_to_server
        data_socket.serve_calls = LocalCalls(add, kvd, (), MAX_CALLS).serve
    if not may_attach:
        kvd.may_attach.clear()
    server = grpc.aio.server()
    kvd_pb2_grpc.add_EngineServicer_to_server(kvd, server)
    (directory / ENGINE_SOCKET).unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{directory / ENGINE_SOCKET}")
    with listen_at(directory / DATA_SOCKET, socket.SOCK_SEQPACKET) as listener:
        await server.start()
        serving = asyncio.create_task(data_socket.serve(listener, kvd.gone.append))
        try:
            yield kvd
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            await server.stop(None)
            arena.close(keep=keep)
