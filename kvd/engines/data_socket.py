"""The data socket: who may attach, who is alive, and the arena's descriptor (D2, D10, D16).

Each connection is one attachment of one engine process. With the process dead, or after it said
that it leaves, nobody writes into its slots any more. A connection that merely ends, or a broken
gRPC stream, proves nothing: while the process lives it may still be copying
(kvd/engines/attached.py).

The kernel says whose a process is. kvd's own user and root may always attach. A user of
[engine_users.UID] is held to its tenants, be it one of those two; every other engine may name any
tenant, for it is trusted to know its clients.
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvd.engines.copiers import Copiers, NoCopierError, OpenChannel
from kvd.errors import AttachDeniedError
from kvd.host.listening import accepted
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
ATTACH_S = 30.0  # from connecting to Attach
MOST_CHANNELS = 4  # of one engine: the one it uses, and others that end
ROOT_UID = 0
ROLES = frozenset(("engine",))  # what a process may do that may attach
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

log = get_logger(__name__)


class EngineUsers:
    """The users whose processes may be engines, and their tenants; a reload replaces them.

    Args:
        allowed: users that may attach, besides kvd's own, root and those of `tenants`.
        tenants: which tenants each user may name.
    """

    def __init__(
        self, allowed: Sequence[int] = (), tenants: Mapping[int, Sequence[str]] | None = None
    ) -> None:
        self._identities: dict[int, Identity] = {}
        self.replace(allowed, tenants or {})

    def replace(self, allowed: Sequence[int], tenants: Mapping[int, Sequence[str]]) -> None:
        """Put others into force, for engines that are attached already, too."""
        self._identities = {
            uid: Identity(f"uid {uid}", "unix", tuple(tenants.get(uid, (ANY,))), ROLES)
            for uid in {ROOT_UID, os.geteuid(), *allowed, *tenants}
        }

    def __contains__(self, uid: int) -> bool:
        """Whether the user's processes may attach."""
        return uid in self._identities

    def check(self, uid: int, tenant: str) -> None:
        """Refuse an engine a tenant that is none of its user's.

        Raises:
            DeniedError: it is not, or the user may not have engines any more.
        """
        identity = self._identities.get(uid)
        if identity is None:
            raise AttachDeniedError(
                f"uid {uid} may not attach any more", "put it into access.allowed_uids"
            )
        identity.tenant(tenant)


class DataConnection:
    """The connection of one process, attached or not yet.

    Attributes:
        token: the secret that Attach must present, once.
        pid: of the process, 0 if it lives in a foreign PID namespace.
        uid: the number of its user.
        watch: of the process; None if it is dead, cannot be watched, or was taken over.
        wakeup: notifies it of its progress words.
        arena: the arena that it may map; set by Attach.
        channels: to copiers, that are not known to be over.
        gone: set at the end of the connection or of the process.
        has_left: it said that it holds nothing any more.
    """

    def __init__(self, token: str, pid: int, uid: int, watch: ProcessWatch | None) -> None:
        self.token = token
        self.pid = pid
        self.uid = uid
        self.watch = watch
        self.wakeup = Wakeup()
        self.arena: Arena | None = None
        self.channels: list[OpenChannel] = []
        self.gone = asyncio.Event()
        self.has_left = False

    @property
    def may_still_write(self) -> bool:
        """Whether the end of its connection leaves a process that may be copying."""
        return self.watch is not None and not self.watch.is_dead and not self.has_left

    def close(self) -> None:
        """Close what belongs to the connection, and the watch unless it was taken over."""
        self.wakeup.close()
        if self.watch is not None:
            self.watch.close()


class DataSocket:
    """Accepts and serves the connections.

    Args:
        users: whose processes may attach.
        max_connections: at once.
        refused: where refusals are counted: by reason and user, "uid 1000".
        copiers: of the GPUs of engines; None: there are none.
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
        self._waiting: dict[str, DataConnection] = {}  # by token, until they attach
        self._num_connections = 0
        self._on_gone: Callable[[DataConnection], None] = lambda _: None
        self._refusals = RefusalLog("data_connection_refused")
        self._refused = refused or Tally()

    def set_bound(self, max_connections: int) -> None:
        """Accept so many from now on; those that are there stay."""
        self._max_connections = max_connections

    async def serve(
        self, listener: socket.socket, on_gone: Callable[[DataConnection], None]
    ) -> None:
        """Accept until cancelled; `on_gone` is called once for each connection that is gone."""
        self._on_gone = on_gone
        async with asyncio.TaskGroup() as connections:
            async for sock in accepted(listener):
                connections.create_task(self._serve_connection(sock))

    def claim(self, token: str) -> DataConnection:
        """Return the connection that was given this token; it cannot be claimed again.

        Raises:
            AttachDeniedError: nobody waits with this token.
        """
        connection = self._waiting.pop(token, None)
        if connection is None or connection.gone.is_set():
            raise AttachDeniedError(
                "the attach token is unknown or used", "connect to the data socket for a new one"
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
                why = f"{self._num_connections} engines, limits.max_engines"
                self._refuse(sock, uid, "limit_reached", why)
                return
            try:
                connection = _new_connection(sock, pid, uid)
            except OSError as error:
                why = f"no descriptor is left ({error.strerror})"
                self._refuse(sock, uid, "limit_reached", why)
                return
            self._waiting[connection.token] = connection
            self._num_connections += 1
            if connection.watch is not None:
                # A connection inherited by a child outlives its process; the pidfd does not.
                connection.watch.start(connection.gone.set)
            try:
                await self._converse(sock, connection)
            except (OSError, TimeoutError, MalformedPacketError) as error:
                log.info("data_connection_broken", pid=pid, error=str(error))
            finally:
                connection.gone.set()
                self._num_connections -= 1
                self._waiting.pop(connection.token, None)
                self._on_gone(connection)
                connection.close()

    def _is_full(self, uid: int) -> bool:
        """Whether there is no place; what one user leaves unattached takes half of them at most."""
        num_waiting = sum(connection.uid == uid for connection in self._waiting.values())
        most = max(1, self._max_connections // 2)
        return self._num_connections >= self._max_connections or num_waiting >= most

    async def _converse(self, sock: socket.socket, connection: DataConnection) -> None:
        """Answer packets until the connection is gone."""
        packets.send(sock, packets.Welcome(connection.token))
        while True:
            waits_s = ATTACH_S if connection.token in self._waiting else None
            packet, fds = await _next_packet(sock, connection.gone, waits_s)
            try:
                has_attached = connection.token not in self._waiting
                if packet is None and has_attached and not connection.gone.is_set():
                    continue  # meanwhile: it may be silent for ever
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
            not isinstance(message, packets.ArenaRequest | packets.CopierRequest)
            or arena is None
            or message.arena_id != arena.arena_id
        ):
            why = "ask for the arena that Attach has named"
            self._refuse(sock, connection.uid, "unexpected", why)
            raise MalformedPacketError("an arena that was not offered")
        if isinstance(message, packets.CopierRequest):
            await self._open_channel(sock, connection, arena, message, fds)
            return
        slots, progress = arena.slots, arena.progress
        mapping = packets.ArenaMapping(slots.slot_bytes, slots.num_slots, progress.num_words)
        packets.send(sock, mapping, [arena.fd, progress.fd, connection.wakeup.fd])

    async def _open_channel(
        self,
        sock: socket.socket,
        connection: DataConnection,
        arena: "Arena",
        wanted: packets.CopierRequest,
        fds: Sequence[int],
    ) -> None:
        """Give an engine a channel to a copier, or say why there is none."""
        if len(fds) != 1:
            raise MalformedPacketError(f"a ring of {len(fds)} descriptors")
        connection.channels = [one for one in connection.channels if not one.is_over]
        if len(connection.channels) >= MOST_CHANNELS:
            remedy = "close the channels that you have"
            packets.send(sock, packets.NoCopier(f"{MOST_CHANNELS} channels are open", remedy))
            return
        opening = asyncio.ensure_future(
            self._copiers.open(wanted.device, arena, fds[0], wanted.ring_bytes)
        )
        if not await _before(opening, connection.gone):
            return
        try:
            channel, theirs, pidfd = opening.result()
        except NoCopierError as error:
            packets.send(sock, packets.NoCopier(error.message, error.remedy))
            return
        connection.channels.append(channel)
        with theirs:
            packets.send(sock, packets.CopierChannel(), [theirs.fileno(), pidfd])
            close_fds([pidfd])

    def _refuse(self, sock: socket.socket, uid: int, reason: str, message: str) -> None:
        self._refusals.note(reason, f"uid {uid}", message=message)
        self._refused.add(reason, f"uid {uid}")  # users are few: those of this machine
        try:
            packets.send(sock, packets.Refused(reason, message))
        except OSError:
            return  # it has gone by itself


def _new_connection(sock: socket.socket, pid: int, uid: int) -> DataConnection:
    watch = watch_peer(sock, pid)
    try:
        return DataConnection(secrets.token_hex(TOKEN_BYTES), pid, uid, watch)
    except OSError:
        if watch is not None:
            watch.close()
        raise


async def _before(
    task: "asyncio.Future[Any]", gone: asyncio.Event, timeout_s: float | None = None
) -> bool:
    """Wait for a task; cancel it, and return False, if the connection is gone or silent before."""
    waits = asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait((task, waits), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also when kvd stops: nothing may wait on a socket that is about to be closed
        waits.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return not task.cancelled()


async def _next_packet(
    sock: socket.socket, gone: asyncio.Event, timeout_s: float | None
) -> tuple[bytes | None, list[int]]:
    """Wait for a packet; b"" at the end of the connection, None if it is gone or silent.

    The descriptors are the caller's.
    """
    receiving = asyncio.ensure_future(receive(sock))
    if not await _before(receiving, gone, timeout_s):
        return None, []
    return receiving.result()
