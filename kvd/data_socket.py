"""The data socket: who may attach, who is alive, and the arena's descriptor (D2, D10, D16).

Each connection is one engine process. Its end (closed, process dead) is the end of that engine:
from then on nobody writes into its slots, and its leases are released. A broken gRPC stream alone
is not: while the process lives and keeps this connection, it may still be copying.
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.errors import AttachDeniedError, UnusableSocketError
from shared import data_socket_protocol as packets
from shared import seqpacket
from shared.log import get_logger

TOKEN_BYTES = 16
BACKLOG = 64
ATTACH_S = 30.0  # from connecting to Attach
ACCEPT_RETRY_S = 0.1
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

if TYPE_CHECKING:
    from kvd.tiers.dram import Arena

log = get_logger(__name__)


class Peer:
    """One connected process.

    Attributes:
        token: what Attach must present, once.
        pid: of the process, 0 if it lives in a foreign PID namespace.
        arena: what it may map; set by Attach.
        gone: set at the end of the connection or of the process.
    """

    def __init__(self, token: str, pid: int) -> None:
        self.token = token
        self.pid = pid
        self.arena: Arena | None = None
        self.gone = asyncio.Event()


class DataSocket:
    """Accepts and serves the connections."""

    def __init__(self, path: Path, allowed_uids: tuple[int, ...], max_peers: int) -> None:
        self._path = path
        self._allowed_uids = {0, os.geteuid(), *allowed_uids}
        self._max_peers = max_peers
        self._waiting: dict[str, Peer] = {}  # token → peer that has not attached yet
        self._num_peers = 0
        self._on_gone: Callable[[Peer], None] = lambda _: None

    def listen(self, mode: int) -> socket.socket:
        """Bind and listen; the caller hands the socket to serve().

        Raises:
            UnusableSocketError: the path cannot be bound.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        try:
            self._path.unlink(missing_ok=True)  # of a dead kvd: the runtime directory is locked
            listener.bind(str(self._path))
            self._path.chmod(mode)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise UnusableSocketError(
                f"cannot listen on {self._path} ({error.strerror or error})",
                "name another directory with --runtime-dir",
            ) from error
        return listener

    async def serve(self, listener: socket.socket, on_gone: Callable[[Peer], None]) -> None:
        """Accept until cancelled; `on_gone` is called once for each peer that is gone."""
        self._on_gone = on_gone
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of descriptors, most likely: others will be closed
                    log.warning("data_accept_failed", error=str(error))
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                sock.setblocking(False)
                connections.create_task(self._serve_peer(sock))

    def claim(self, token: str) -> Peer:
        """Return the peer that was given this token; it cannot be claimed again.

        Raises:
            AttachDeniedError: nobody waits with this token.
        """
        peer = self._waiting.pop(token, None)
        if peer is None or peer.gone.is_set():
            raise AttachDeniedError(
                "the attach token is unknown or used", "connect to the data socket for a new one"
            )
        return peer

    async def _serve_peer(self, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        with sock:
            pid, uid, _ = _UCRED.unpack(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if uid not in self._allowed_uids:
                _refuse(sock, "denied", f"uid {uid} is not in access.allowed_uids")
                return
            if self._num_peers >= self._max_peers:
                _refuse(sock, "limit_reached", f"{self._num_peers} engines, limits.max_engines")
                return
            peer = Peer(secrets.token_hex(TOKEN_BYTES), pid)
            self._waiting[peer.token] = peer
            self._num_peers += 1
            pidfd = _watch_process(peer)
            try:
                await self._converse(sock, peer)
            except (OSError, TimeoutError, packets.MalformedPacketError) as error:
                log.info("data_connection_broken", pid=pid, error=str(error))
            finally:
                peer.gone.set()
                self._num_peers -= 1
                self._waiting.pop(peer.token, None)
                _stop_watching(pidfd)
                self._on_gone(peer)

    async def _converse(self, sock: socket.socket, peer: Peer) -> None:
        """Answer packets until the peer is gone."""
        seqpacket.send(sock, packets.encode(packets.Welcome(peer.token)))
        gone = asyncio.ensure_future(peer.gone.wait())
        try:
            while True:
                receiving = asyncio.ensure_future(seqpacket.receive(sock))
                waits_s = ATTACH_S if peer.token in self._waiting else None
                done, _ = await asyncio.wait(
                    (receiving, gone), timeout=waits_s, return_when=asyncio.FIRST_COMPLETED
                )
                if receiving not in done:
                    receiving.cancel()
                    await asyncio.gather(receiving, return_exceptions=True)
                    if not done and peer.token not in self._waiting:
                        continue  # it has attached meanwhile and may be silent for ever
                    return
                packet, fds = receiving.result()
                seqpacket.close_fds(fds)
                if not packet:
                    return
                self._answer(sock, peer, packets.decode(packet))
        finally:
            gone.cancel()

    def _answer(self, sock: socket.socket, peer: Peer, message: packets.Message) -> None:
        arena = peer.arena
        if (
            not isinstance(message, packets.ArenaRequest)
            or arena is None
            or message.arena_id != arena.arena_id
        ):
            _refuse(sock, "unexpected", "ask for the arena that Attach has named")
            raise packets.MalformedPacketError("an arena that was not offered")
        mapping = packets.ArenaMapping(arena.slots.slot_bytes, arena.slots.num_slots)
        seqpacket.send(sock, packets.encode(mapping), [arena.fd])


def _refuse(sock: socket.socket, reason: str, message: str) -> None:
    log.warning("data_connection_refused", reason=reason, message=message)
    try:
        seqpacket.send(sock, packets.encode(packets.Refused(reason, message)))
    except OSError:
        return  # it has gone by itself


def _watch_process(peer: Peer) -> int:
    """Set peer.gone when the process dies; returns the pidfd, or -1 where there is none to have.

    A connection inherited by a child outlives its process; the pidfd does not.
    """
    if not peer.pid:
        return -1
    try:
        pidfd = os.pidfd_open(peer.pid)
    except OSError:
        return -1
    asyncio.get_running_loop().add_reader(pidfd, peer.gone.set)
    return pidfd


def _stop_watching(pidfd: int) -> None:
    if pidfd >= 0:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
