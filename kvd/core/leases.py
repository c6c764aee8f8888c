"""Leases: rights of an engine to use slots, for as long as it lives (D10).

Pure. A load lease counts as a reader of its blocks, a store lease owns the slots it fills and
counts as a holder of the blocks it builds on. The counting itself is done by loading.py and
storing.py; this is the register.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd.core.block import Block
from kvd.core.errors import LeaseLostError, TooManyLeasesError
from kvd.core.records import LoadSpan, Span
from shared.session_key import SessionKey


@dataclass(slots=True, eq=False)
class LoadLease:
    """Blocks being loaded.

    Attributes:
        entries: blocks with the spans granted on them, in token order.
        num_waiting: entries whose SSD read has not come back.
        failure: why the answer was cut: "", "corrupt", "read_error", "deadline".
    """

    lease_id: int
    owner: int
    key: SessionKey
    from_token: int
    entries: list[tuple[Block, LoadSpan]]
    more: bool
    num_waiting: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be: what its slot will hold once the engine has written it."""

    slot_id: int
    generation: int
    token_ids: bytes


Part = tuple[Span, Block | NewBlock]


@dataclass(slots=True, eq=False)
class StoreLease:
    """Slots being filled.

    Attributes:
        parts: what the session will consist of: each span with the existing block it uses (held by
            this lease) or the new one.
    """

    lease_id: int
    owner: int
    key: SessionKey
    parts: list[Part] = field(default_factory=list)


class LeaseTable:
    """All leases, by id, owner and session."""

    def __init__(self, max_leases: int) -> None:
        self._max_leases = max_leases
        self._next_id = 1
        self._leases: dict[int, LoadLease | StoreLease] = {}
        self._by_owner: dict[int, dict[int, None]] = {}
        self._by_session: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LoadLease | StoreLease]:
        return iter(self._leases.values())

    def next_id(self) -> int:
        """Reserve an id for a new lease.

        Raises:
            TooManyLeasesError: at the bound.
        """
        if len(self._leases) >= self._max_leases:
            raise TooManyLeasesError(
                f"{len(self._leases)} leases are held",
                "complete loads and stores before preparing more",
            )
        self._next_id += 1
        return self._next_id - 1

    def add(self, lease: LoadLease | StoreLease) -> None:
        """Register a lease."""
        self._leases[lease.lease_id] = lease
        self._by_owner.setdefault(lease.owner, {})[lease.lease_id] = None
        self._by_session[lease.key] = self._by_session.get(lease.key, 0) + 1

    def remove(self, lease: LoadLease | StoreLease) -> None:
        """Forget a lease."""
        del self._leases[lease.lease_id]
        owned = self._by_owner[lease.owner]
        del owned[lease.lease_id]
        if not owned:
            del self._by_owner[lease.owner]
        self._by_session[lease.key] -= 1
        if not self._by_session[lease.key]:
            del self._by_session[lease.key]

    def get(self, lease_id: int) -> LoadLease | StoreLease | None:
        """Find a lease."""
        return self._leases.get(lease_id)

    def load_of(self, lease_id: int, owner: int | None = None) -> LoadLease:
        """Find a load lease, of this owner if one is given.

        Raises:
            LeaseLostError: if there is none such.
        """
        lease = self._leases.get(lease_id)
        if not isinstance(lease, LoadLease) or owner not in (None, lease.owner):
            raise _lost(lease_id)
        return lease

    def store_of(self, lease_id: int, owner: int) -> StoreLease:
        """Find a store lease of this owner.

        Raises:
            LeaseLostError: if there is none such.
        """
        lease = self._leases.get(lease_id)
        if not isinstance(lease, StoreLease) or owner != lease.owner:
            raise _lost(lease_id)
        return lease

    def of_owner(self, owner: int) -> tuple[LoadLease | StoreLease, ...]:
        """All leases of an engine, oldest first."""
        return tuple(self._leases[lease_id] for lease_id in self._by_owner.get(owner, ()))

    def num_of_session(self, key: SessionKey) -> int:
        """Leases taken for a session."""
        return self._by_session.get(key, 0)


def _lost(lease_id: int) -> LeaseLostError:
    return LeaseLostError(
        f"lease {lease_id} is not held by this engine", "discard what it covered and prepare again"
    )
