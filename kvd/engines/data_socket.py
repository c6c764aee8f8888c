"""The data socket: admits engine processes, watches them, and passes descriptors (D2, D10, D16).

Each connection is one attachment of one engine process. Once the process is dead, or has reported
that it leaves, nothing writes to its slots any more. The mere end of a connection or of a gRPC
stream proves nothing: while the process lives it may still be copying (kvd/engines/attached.py).

The kernel reports the user of a process (SO_PEERCRED). kvd's own user and root may always attach.
Engines of a user in [engine_users.UID] may name only that user's tenants, also if it is one of
those two. All other engines may name any tenant: they are trusted to authenticate their clients.
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvd.engines.copiers import Copiers, NoCopierError, OpenChannel
from kvd.errors import AttachDeniedError
from kvd.host.listening import accept_connections
from kvd.host.process_identity import ProcessWatch, watch_peer
from kvd.tiers.progress import Wakeup
from shared.access.identity import ANY, Identity
from shared.kvd_client import data_socket_protocol as packets
from shared.process.log import RefusalLog, get_logger
from shared.process.packets import MalformedPacketError, close_fds, receive
from shared.types.histogram import Tally

if TYPE_CHECKING:
    from kvd.tiers.arena import Arena

TOKEN_BYTES = 16
ATTACH_S = 30.0  # longest time from connecting to Attach
MAX_CHANNELS = 4  # per engine: the channel in use, and others that are ending
ROOT_UID = 0
ROLES = frozenset(("engine",))  # roles of processes that may attach
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

log = get_logger(__name__)


class EngineUsers:
    """The users whose processes may be engines, and their tenants. A reload replaces them.

    Args:
        allowed: uids that may attach, besides kvd's own, root and those of `tenants`.
        tenants: uid → tenants that its engines may name.
    """

    def __init__(
        self, allowed: Sequence[int] = (), tenants: Mapping[int, Sequence[str]] | None = None
    ) -> None:
        self._identities: dict[int, Identity] = {}
        self.replace(allowed, tenants or {})

    def replace(self, allowed: Sequence[int], tenants: Mapping[int, Sequence[str]]) -> None:
        """Replace users and tenants, also for engines that are attached already."""
        self._identities = {
            uid: Identity(f"uid {uid}", "unix", tuple(tenants.get(uid, (ANY,))), ROLES)
            for uid in {ROOT_UID, os.geteuid(), *allowed, *tenants}
        }

    def __contains__(self, uid: int) -> bool:
        """Whether processes of a user may attach."""
        return uid in self._identities

    def check(self, uid: int, tenant: str) -> None:
        """Check that a user's engines may name a tenant.

        Raises:
            DeniedError: they may not, or the user may not have engines any more.
        """
        identity = self._identities.get(uid)
        if identity is None:
            raise AttachDeniedError(
                f"uid {uid} is no longer allowed to attach", "add it to access.allowed_uids"
            )
        identity.tenant(tenant)


class DataConnection:
    """The connection of one process, attached or not yet.

    Attributes:
        token: secret that Attach must present; valid once.
        pid: the process; 0 if it is in a foreign PID namespace.
        uid: the process's user.
        watch: watches the process; None if it is dead or cannot be watched, or if the engine has
            taken the watch over.
        wakeup: wakes the engine after its progress words have changed.
        arena: arena that the engine may map; set by Attach.
        channels: channels to copiers that are not known to be over.
        calls: serves the engine's local calls; None: it has not asked for them.
        gone: set at the end of the connection or of the process.
        has_left: whether the process has reported that it holds no slots any more.
    """

    def __init__(self, token: str, pid: int, uid: int, watch: ProcessWatch | None) -> None:
        self.token = token
        self.pid = pid
        self.uid = uid
        self.watch = watch
        self.wakeup = Wakeup()
        self.arena: Arena | None = None
        self.channels: list[OpenChannel] = []
        self.calls: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        self.has_left = False

    @property
    def may_still_write(self) -> bool:
        """Whether the process may still write to slots after the end of its connection."""
        return self.watch is not None and not self.watch.is_dead and not self.has_left

    def close(self) -> None:
        """End local calls; close the wakeup, and the watch unless it was taken over."""
        if self.calls is not None:
            self.calls.cancel()
        self.wakeup.close()
        if self.watch is not None:
            self.watch.close()


class DataSocket:
    """The server of the data socket.

    Args:
        users: users whose processes may attach.
        max_connections: most connections at once.
        refused: counts refusals by reason and user ("uid 1000").
        copiers: copiers of engines' GPUs; None: copiers are disabled.

    Attributes:
        serve_calls: serves local calls over a socket, until that ends or it is cancelled; set
            before an engine can attach.
    """

    def __init__(
        self,
        users: EngineUsers,
        max_connections: int,
        refused: Tally | None = None,
        copiers: Copiers | None = None,
    ) -> None:
        self._copiers = Copiers(is_enabled=False) if copiers is None else copiers
        self._users = users
        self._max_connections = max_connections
        self._unattached: dict[str, DataConnection] = {}  # token → connection, until Attach
        self._num_connections = 0
        self.serve_calls: Callable[[socket.socket], Coroutine[None, None, None]] | None = None
        self._on_gone: Callable[[DataConnection], None] = lambda _: None
        self._refusals = RefusalLog("data_connection_refused")
        self._refused = refused or Tally()

    def set_bound(self, max_connections: int) -> None:
        """Change the most connections; connections beyond it stay."""
        self._max_connections = max_connections

    async def serve(
        self, listener: socket.socket, on_gone: Callable[[DataConnection], None]
    ) -> None:
        """Accept and serve connections until cancelled.

        Args:
            listener: the listening socket.
            on_gone: called once for each connection that has ended.
        """
        self._on_gone = on_gone
        async with asyncio.TaskGroup() as connections:
            async for sock in accept_connections(listener):
                connections.create_task(self._serve_connection(sock))

    def claim(self, token: str) -> DataConnection:
        """Return the connection with this token, which is then used up.

        Raises:
            AttachDeniedError: no connection waits with this token.
        """
        connection = self._unattached.pop(token, None)
        if connection is None or connection.gone.is_set():
            raise AttachDeniedError(
                "the attach token is unknown, or was used before",
                "connect to the data socket again for a new token",
            )
        return connection

    async def _serve_connection(self, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        with sock:
            pid, uid, _ = _UCRED.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if uid not in self._users:
                self._refuse(sock, uid, "denied", f"uid {uid} is not in access.allowed_uids")
                return
            if self._is_full(uid):
                why = (
                    f"{self._num_connections} connections are open, too many for limits.max_engines"
                )
                self._refuse(sock, uid, "limit_reached", why)
                return
            try:
                connection = _new_connection(sock, pid, uid)
            except OSError as error:
                why = f"kvd cannot open more files ({error.strerror})"
                self._refuse(sock, uid, "limit_reached", why)
                return
            self._unattached[connection.token] = connection
            self._num_connections += 1
            if connection.watch is not None:
                # A child that inherits the socket keeps the connection open after the process is
                # dead; the watch's pidfd is not fooled by that.
                connection.watch.start(connection.gone.set)
            try:
                await self._serve_packets(sock, connection)
            except (OSError, TimeoutError, MalformedPacketError) as error:
                log.info("data_connection_broken", pid=pid, error=str(error))
            finally:
                connection.gone.set()
                self._num_connections -= 1
                self._unattached.pop(connection.token, None)
                self._on_gone(connection)
                connection.close()
                if connection.calls is not None:  # none of its calls outlives the connection
                    await asyncio.gather(connection.calls, return_exceptions=True)

    def _is_full(self, uid: int) -> bool:
        """Whether a user may not connect now.

        Unattached connections of one user may take half of all connections at most.
        """
        num_unattached = sum(connection.uid == uid for connection in self._unattached.values())
        max_unattached = max(1, self._max_connections // 2)
        return self._num_connections >= self._max_connections or num_unattached >= max_unattached

    async def _serve_packets(self, sock: socket.socket, connection: DataConnection) -> None:
        """Answer packets until the connection is gone."""
        packets.send(sock, packets.Welcome(connection.token))
        while True:
            timeout_s = ATTACH_S if connection.token in self._unattached else None
            packet, fds = await _next_packet(sock, connection.gone, timeout_s)
            try:
                has_attached = connection.token not in self._unattached
                if packet is None and has_attached and not connection.gone.is_set():
                    continue  # attached during the wait: from now on it may be silent for ever
                if not packet:
                    return
                message = packets.decode(packet)
                if isinstance(message, packets.Leaving):
                    connection.has_left = True
                    return
                await self._answer(sock, connection, message, fds)
            finally:
                close_fds(fds)

    async def _answer(
        self,
        sock: socket.socket,
        connection: DataConnection,
        message: packets.Message,
        fds: Sequence[int],
    ) -> None:
        arena = connection.arena
        if (
            not isinstance(
                message, packets.ArenaRequest | packets.CopierRequest | packets.CallsRequest
            )
            or arena is None
            or message.arena_id != arena.arena_id
        ):
            why = "only the arena that Attach named can be requested"
            self._refuse(sock, connection.uid, "unexpected", why)
            raise MalformedPacketError(
                "the packet names an arena that this connection does not have"
            )
        if isinstance(message, packets.CopierRequest):
            await self._open_channel(sock, connection, arena, message, fds)
            return
        if isinstance(message, packets.CallsRequest):
            self._open_calls(sock, connection)
            return
        slots, progress = arena.slots, arena.progress
        mapping = packets.ArenaMapping(slots.slot_bytes, slots.num_slots, progress.num_words)
        packets.send(sock, mapping, [arena.fd, progress.fd, connection.wakeup.fd])

    async def _open_channel(
        self,
        sock: socket.socket,
        connection: DataConnection,
        arena: "Arena",
        request: packets.CopierRequest,
        fds: Sequence[int],
    ) -> None:
        """Send an engine a channel to a copier, or the reason why there is none."""
        if len(fds) != 1:
            raise MalformedPacketError(f"a ring needs 1 descriptor, but {len(fds)} came")
        connection.channels = [channel for channel in connection.channels if not channel.is_over]
        if len(connection.channels) >= MAX_CHANNELS:
            remedy = "close some of the channels that you have"
            packets.send(sock, packets.NoCopier(f"{MAX_CHANNELS} channels are open", remedy))
            return
        opening = asyncio.ensure_future(
            self._copiers.open(request.device, arena, fds[0], request.ring_bytes)
        )
        if not await _finish_before_gone(opening, connection.gone):
            return
        try:
            channel, engine_end, pidfd = opening.result()
        except NoCopierError as error:
            packets.send(sock, packets.NoCopier(error.message, error.remedy))
            return
        connection.channels.append(channel)
        try:
            packets.send(sock, packets.CopierChannel(), [engine_end.fileno(), pidfd])
        finally:  # also if the engine has gone meanwhile
            engine_end.close()
            close_fds([pidfd])

    def _open_calls(self, sock: socket.socket, connection: DataConnection) -> None:
        """Send an engine a socket for its calls."""
        if self.serve_calls is None or connection.calls is not None:
            why = "one socket for calls can be requested, where Attached offers it"
            self._refuse(sock, connection.uid, "unexpected", why)
            raise MalformedPacketError(why)
        ours, engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        with engine_end:
            try:
                packets.send(sock, packets.CallSocket(), [engine_end.fileno()])
            except OSError:
                ours.close()
                raise
        connection.calls = asyncio.create_task(self.serve_calls(ours))

    def _refuse(self, sock: socket.socket, uid: int, reason: str, message: str) -> None:
        self._refusals.note(reason, f"uid {uid}", message=message)
        self._refused.add(reason, f"uid {uid}")  # few labels: the users of this machine
        try:
            packets.send(sock, packets.Refused(reason, message))
        except OSError:
            return  # the peer is gone


def _new_connection(sock: socket.socket, pid: int, uid: int) -> DataConnection:
    watch = watch_peer(sock, pid)
    try:
        return DataConnection(secrets.token_hex(TOKEN_BYTES), pid, uid, watch)
    except OSError:
        if watch is not None:
            watch.close()
        raise


async def _finish_before_gone(
    task: "asyncio.Future[Any]", gone: asyncio.Event, timeout_s: float | None = None
) -> bool:
    """Wait for a task until the connection is gone or the time is over.

    Returns:
        Whether the task has finished; else it is cancelled.
    """
    gone_task = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait(
            (task, gone_task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:  # also when this is cancelled: no task may wait on a socket that is then closed
        gone_task.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return not task.cancelled()


async def _next_packet(
    sock: socket.socket, gone: asyncio.Event, timeout_s: float | None
) -> tuple[bytes | None, list[int]]:
    """Wait for a packet and its descriptors, which the caller must close.

    Returns:
        (packet, descriptors). The packet is b"" at the end of the connection, and None if the
        connection is gone or the time is over.
    """
    receiving = asyncio.ensure_future(receive(sock))
    if not await _finish_before_gone(receiving, gone, timeout_s):
        return None, []
    return receiving.result()
