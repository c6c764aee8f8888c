"""Which HTTP connections a server has open, and which of them goes for the next one. Pure.

A connection is in one of three phases:

    UNFINISHED   its TLS handshake, or the headers of its next request, have not come whole
    ANSWERING    a request of it is being answered: it is not cut for anybody
    IDLE         it was answered, and may ask again

What holds:

1. At most `max_connections` are open, and at most `max_per_address` of one address.
2. Who comes when there is no room is let in, and the one that has been UNFINISHED longest goes; if
   none is, the one that has been IDLE longest. If its own address has too many, one of these goes.
   It is refused only if all of them are ANSWERING.
3. A part of the places, `reserve`, is for requests of reserved paths: others are answered on the
   rest. So somebody who asks for health gets in, however many are being answered.

Every operation takes constant time.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Generic, NamedTuple, TypeVar

from shared.types.histogram import Tally

RESERVED_SHARE = 16  # one in so many places
V6_PREFIX = 64  # bits: what one household or host gets, and can change addresses within

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
    """Bounds of connections to one server.

    Attributes:
        max_connections: most connections at once.
        max_per_address: most connections of one IPv4 address, or one IPv6 network of 64 bits; 0: as
            many as there are places.
        proxies: networks that `max_per_address` is not for: many clients come from there as one.
        header_s: most seconds for a TLS handshake, and then for the headers of each request.
        idle_s: most seconds between two requests; longer than proxies keep connections, so that
            they close first.
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
        """Places for requests of reserved paths."""
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
    """Whether a new connection is let in.

    Attributes:
        is_in: whether it stays.
        cut: the connection that is closed for it, now; None: none is.
        why: bound that was reached: "places" or "address"; "" if none was.
    """

    is_in: bool
    cut: Hashable | None = None
    why: str = ""


class ConnectionTable(Generic[C]):
    """See the module docstring.

    Args:
        bounds: the server's bounds.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._all: _Room[C] = _Room()
        self._by_address: dict[str, _Room[C]] = {}
        self._entries: dict[C, tuple[Phase, str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, connection: C, address: str) -> Admission:
        """Take a connection in as UNFINISHED, if there is room or somebody to cut for it.

        The one that is cut is not in the table any more.

        Args:
            connection: a new connection.
            address: its address by `address_of`; "" if their number is not bounded.
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
        """Put a connection last in another phase; nothing happens if it is not in the table."""
        if connection not in self._entries:
            return
        before, address = self._entries[connection]
        self._entries[connection] = (phase, address)
        for room in self._rooms(address):
            room.leave(connection, before)
            room.enter(connection, phase)

    def remove(self, connection: C) -> None:
        """Forget a connection; nothing happens if it is not in the table."""
        phase, address = self._entries.pop(connection, (None, ""))
        if phase is None:
            return
        for room in self._rooms(address):
            room.leave(connection, phase)
        if address and not len(self._by_address[address]):
            del self._by_address[address]

    def _full_room(self, address: str) -> "tuple[_Room[C] | None, str]":
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
    """Return the address, or the IPv6 network, whose connections are bounded together.

    Args:
        host: address of the other side; "" for a Unix socket.
        proxies: networks that have no bound.

    Returns:
        "": it is not bounded.
    """
    if not host:
        return ""
    address = ip_address(host.partition("%")[0])  # without the scope of a link-local one
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in proxies):
        return ""
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, V6_PREFIX), strict=False))
    return str(address)


class _Room(Generic[C]):
    """Connections that share a bound, those of each phase in the order in which they entered it.

    Ordered dictionaries: with plain ones the first key is found past all that were deleted.
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
