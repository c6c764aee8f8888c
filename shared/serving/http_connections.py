"""The open HTTP connections of a server, and which of them is closed for a new one. Pure.

A connection is in one of three phases:

    UNFINISHED   its TLS handshake, or the headers of its next request, are not complete
    ANSWERING    a request of it is being answered: it is never cut
    IDLE         its request was answered, and it may send another one

Invariants:
1. At most `max_connections` are open, and at most `max_per_address` of one address.
2. A new connection is let in even if there is no room. Then the one that has been UNFINISHED for
   the longest time is closed; if there is none, the one that has been IDLE for the longest time. If
   the new one's address has too many, one of that address is closed. The new one is refused only if
   all of them are ANSWERING.
3. A part of the places, `reserve`, is for requests of reserved paths; other requests are answered
   on the rest. So a health check is answered, however many requests are being answered.

Every operation takes constant time.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Generic, NamedTuple, TypeVar

from shared.types.histogram import Tally

RESERVED_SHARE = 16  # one in 16 places is reserved
V6_PREFIX = 64  # bits: what one household or host gets, and within which it can change addresses

Network = IPv4Network | IPv6Network
C = TypeVar("C", bound=Hashable)

LOOPBACK: tuple[Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))


class Phase(Enum):
    """The phases of a connection; see the module docstring."""

    UNFINISHED = "unfinished"
    ANSWERING = "answering"
    IDLE = "idle"


@dataclass(frozen=True)
class Bounds:
    """Limits of the connections to one server.

    Attributes:
        max_connections: most connections at once.
        max_per_address: most connections of one IPv4 address, or of one IPv6 network of 64 bits;
            0: as many as there are places.
        proxies: networks without `max_per_address`, because many clients share one address there.
        header_s: most seconds for a TLS handshake, and then for the headers of each request.
        idle_s: most seconds between two requests. Longer than proxies keep connections, so that
            the proxies close first.
        write_s: most seconds in which the client reads nothing of what was sent.
    """

    max_connections: int = 1024
    max_per_address: int = 512
    proxies: Sequence[Network] = LOOPBACK
    header_s: float = 10.0
    idle_s: float = 75.0
    write_s: float = 30.0

    @property
    def reserve(self) -> int:
        """Number of places for requests of reserved paths."""
        return max(1, self.max_connections // RESERVED_SHARE) if self.max_connections > 1 else 0


@dataclass(frozen=True)
class ConnectionMetrics:
    """Counts of the connections of all HTTP servers of a process.

    Attributes:
        open: number of open connections by server.
        cut: number of closed connections by server and reason, refused ones included.
    """

    open: Counter[str] = field(default_factory=Counter)
    cut: Tally = field(default_factory=Tally)


class Admission(NamedTuple):
    """The decision about a new connection.

    Attributes:
        is_in: whether it stays.
        cut: the connection that is closed for it; None: none is.
        why: the limit that was reached: "places" or "address"; "" if none was.
    """

    is_in: bool
    cut: Hashable | None = None
    why: str = ""


class ConnectionTable(Generic[C]):
    """The connections of a server by phase.

    Args:
        bounds: the server's limits.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._all: _Room[C] = _Room()
        self._by_address: dict[str, _Room[C]] = {}
        self._entries: dict[C, tuple[Phase, str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, connection: C, address: str) -> Admission:
        """Add a connection as UNFINISHED, if there is room or another one can be cut.

        The one to be cut is removed from the table; the caller closes it.

        Args:
            connection: a new connection.
            address: its address by `address_of`; "" if connections from there are not limited.
        """
        full, why = self._full_room(address)
        cut = None if full is None else full.longest_waiting()
        if full is not None and cut is None:
            return Admission(False, None, why)
        if cut is not None:
            self.remove(cut)
        self._entries[connection] = (Phase.UNFINISHED, address)
        for room in self._rooms(address):
            room.enter(connection, Phase.UNFINISHED)
        return Admission(True, cut, why)

    def longest_waiting(self) -> C | None:
        """Return the connection that would be cut first; None if all are being answered."""
        return self._all.longest_waiting()

    def may_answer(self) -> bool:
        """Whether one more request of a path that is not reserved may be answered."""
        return self._all.num_answering < self._bounds.max_connections - self._bounds.reserve

    def phase_of(self, connection: C) -> Phase | None:
        """Return a connection's phase; None if it is not in the table."""
        place = self._entries.get(connection)
        return place and place[0]

    def move(self, connection: C, phase: Phase) -> None:
        """Put a connection last in another phase. No effect if it is not in the table."""
        if connection not in self._entries:
            return
        before, address = self._entries[connection]
        self._entries[connection] = (phase, address)
        for room in self._rooms(address):
            room.leave(connection, before)
            room.enter(connection, phase)

    def remove(self, connection: C) -> None:
        """Remove a connection. No effect if it is not in the table."""
        phase, address = self._entries.pop(connection, (None, ""))
        if phase is None:
            return
        for room in self._rooms(address):
            room.leave(connection, phase)
        if address and not len(self._by_address[address]):
            del self._by_address[address]

    def _full_room(self, address: str) -> "tuple[_Room[C] | None, str]":
        """Return the connections whose limit a new one would exceed, and the limit; None: none."""
        most = self._bounds.max_per_address
        own = self._by_address.get(address)
        if most and own is not None and len(own) >= most:
            return own, "address"
        is_full = len(self._all) >= self._bounds.max_connections
        return (self._all, "places") if is_full else (None, "")

    def _rooms(self, address: str) -> "list[_Room[C]]":
        if not address:
            return [self._all]
        return [self._all, self._by_address.setdefault(address, _Room())]


def address_of(host: str, proxies: Sequence[Network]) -> str:
    """Return the address, or the IPv6 network, whose connections are limited together.

    Args:
        host: address of the other side; "" for a Unix socket.
        proxies: networks without a limit.

    Returns:
        "" if the connection is not limited.
    """
    if not host:
        return ""
    address = ip_address(host.partition("%")[0])  # without the scope of a link-local address
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in proxies):
        return ""
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, V6_PREFIX), strict=False))
    return str(address)


class _Room(Generic[C]):
    """Connections that share a limit, by phase, in the order in which they entered it.

    Ordered dictionaries, because in a plain dict the first key is found by skipping the deleted
    ones.
    """

    def __init__(self) -> None:
        self._by_phase: dict[Phase, OrderedDict[C, None]] = {
            phase: OrderedDict() for phase in Phase
        }

    def __len__(self) -> int:
        return sum(map(len, self._by_phase.values()))

    @property
    def num_answering(self) -> int:
        return len(self._by_phase[Phase.ANSWERING])

    def enter(self, connection: C, phase: Phase) -> None:
        self._by_phase[phase][connection] = None

    def leave(self, connection: C, phase: Phase) -> None:
        del self._by_phase[phase][connection]

    def longest_waiting(self) -> C | None:
        for phase in (Phase.UNFINISHED, Phase.IDLE):
            for connection in self._by_phase[phase]:
                return connection
        return None
