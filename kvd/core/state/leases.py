"""Leases: the right of an engine to use slots, for as long as the engine lives (D10).

Pure. A load lease counts as a reader of its blocks. A store lease owns the slots that it fills, and
counts as a holder of the blocks that it builds on. loading.py and storing.py do this counting; this
module is the register of leases.

A store lease whose engine has lost its connection but still lives is an *orphan*. Its slots are
quarantined until the engine comes back or dies, because it may still be writing to them. For a
lease granted by an earlier kvd only the slots are known (RestoredLease): it can never be completed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvd.core.records.entries import Span
from kvd.core.records.errors import LeaseLostError, TooManyLeasesError
from kvd.core.records.records import LeaseInfo
from kvd.core.state.block import Block
from shared.types.granted_slots import LoadSpan
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.transitions import Transitions


class LeasePhase(Enum):
    """How far a lease has come."""

    HELD = "held"
    SETTLED = "settled"  # load leases only: the outcome is counted
    ORPHAN = "orphan"  # store leases only: the engine has no connection
    ENDED = "ended"


LEASE_MOVES = Transitions(
    {
        LeasePhase.HELD: {
            "settle": LeasePhase.SETTLED,
            "detach": LeasePhase.ORPHAN,
            "end": LeasePhase.ENDED,
        },
        LeasePhase.SETTLED: {"settle": LeasePhase.SETTLED, "end": LeasePhase.ENDED},
        LeasePhase.ORPHAN: {"reattach": LeasePhase.HELD, "end": LeasePhase.ENDED},
        LeasePhase.ENDED: {},
    }
)


@dataclass(slots=True, eq=False)
class LoadLease:
    """A lease on blocks that an engine loads.

    Attributes:
        from_token: position of the first token that the load asks for.
        entries: blocks with the spans granted on them, in token order. After them, without tokens,
            come the parts of the state at which the load ends, or of the windows that it needs.
        num_parts: how many of the entries are such parts: all of them, or none.
        windows: the rows needed of each window, if the parts are of windows: first token, number
            of tokens, first row.
        num_waiting: how many of the blocks are being read or verified.
        failure: why the answer was cut: "", "corrupt", "read_error" or "deadline".
        is_tracked: whether a progress word reports how far it is.
        is_export: whether it is for an export: that is no use of the session, and its outcome is
            not counted as a load's.
    """

    lease_id: int
    engine_id: int
    key: SessionKey
    from_token: int
    entries: list[tuple[Block, LoadSpan]] = field(default_factory=list)
    more: bool = False
    since_ns: int = 0
    num_parts: int = 0
    windows: tuple[tuple[int, int, int], ...] = ()
    num_waiting: int = 0
    failure: str = ""
    is_tracked: bool = False
    is_export: bool = False
    phase: LeasePhase = LeasePhase.HELD

    def info(self) -> LeaseInfo:
        """Return the lease as operators see it."""
        num_slots = len({span.slot_id for _, span in self.entries})
        is_pending = bool(self.num_waiting)
        return LeaseInfo(
            self.lease_id, "load", self.engine_id, self.key, num_slots, self.since_ns, is_pending
        )


class NewBlock(NamedTuple):
    """A block that will exist once the engine has written its slot.

    Attributes:
        token_ids: the tokens that the slot will hold; b"" for a part of a state or window.
        parent: the parent key in the block's key; b"" likewise.
    """

    slot_id: int
    generation: int
    token_ids: bytes = b""
    parent: bytes = b""


Part = tuple[Span, Block | NewBlock]


@dataclass(slots=True, eq=False)
class StoreLease:
    """A lease on slots that an engine fills.

    Attributes:
        parts: the session as it will be: each span with its block, which exists (and is held by
            this lease) or is new.
        side_parts: all parts of the states and windows that it stores.
        load_ends: after how many tokens later loads have to be able to end, as the engine said.
            The end of the tokens is not among them: loads may end there as long as it is the end.
        token_ids: tokens of the whole sequence, if there are states, which are found by them.
        num_discards: the session's number of discards when the store was prepared.
        lineage: lineage of the tokens, if the engine named it.
        is_outdated: whether the tenant is erased, or a discard that did not change the session has
            come since.
    """

    lease_id: int
    engine_id: int
    key: SessionKey
    parts: list[Part] = field(default_factory=list)
    side_parts: list[Part] = field(default_factory=list)
    load_ends: Sequence[int] = ()
    token_ids: bytes = b""
    num_discards: int = 0
    lineage: Lineage | None = None
    is_outdated: bool = False
    since_ns: int = 0
    phase: LeasePhase = LeasePhase.HELD

    def slots(self) -> list[tuple[int, int]]:
        """Return id and generation of each slot that it fills."""
        return [
            (part.slot_id, part.generation)
            for _, part in self.all_parts()
            if isinstance(part, NewBlock)
        ]

    def all_parts(self) -> list[Part]:
        """Return the parts of tokens, then those of states and windows."""
        return [*self.parts, *self.side_parts] if self.side_parts else self.parts

    def info(self) -> LeaseInfo:
        """Return the lease as operators see it."""
        return _store_info(self, self.key)


@dataclass(slots=True, eq=False)
class RestoredLease:
    """Slots that an engine may still be filling for an earlier kvd. Their use is not known."""

    lease_id: int
    engine_id: int
    held: list[tuple[int, int]] = field(default_factory=list)
    since_ns: int = 0
    phase: LeasePhase = LeasePhase.ORPHAN

    def slots(self) -> list[tuple[int, int]]:
        """Return id and generation of each slot."""
        return self.held

    def info(self) -> LeaseInfo:
        """Return the lease as operators see it."""
        return _store_info(self, None)


Lease = LoadLease | StoreLease | RestoredLease


def move(lease: Lease, event: str) -> None:
    """Change the phase of a lease; see LEASE_MOVES."""
    lease.phase = LEASE_MOVES.after(lease.phase, event)


def _store_info(lease: StoreLease | RestoredLease, key: SessionKey | None) -> LeaseInfo:
    return LeaseInfo(
        lease.lease_id,
        "store",
        lease.engine_id,
        key,
        len(lease.slots()),
        lease.since_ns,
        is_orphan=lease.phase is LeasePhase.ORPHAN,
    )


class LeaseTable:
    """All leases, by id, engine and session.

    Attributes:
        num_orphans: number of store leases whose engine has no connection.
        num_quarantined_slots: number of slots that those hold.
    """

    def __init__(self, max_leases: int) -> None:
        self._max_leases = max_leases
        self._next_id = 1
        self._leases: dict[int, Lease] = {}
        self._by_engine: dict[int, dict[int, None]] = {}
        self._by_session: dict[SessionKey, int] = {}
        self.num_orphans = 0
        self.num_quarantined_slots = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def start_at(self, first_id: int) -> None:
        """Number leases from `first_id` on, at least: an earlier kvd may have used lower ids."""
        self._next_id = max(self._next_id, first_id)

    def set_bound(self, max_leases: int) -> None:
        """Grant at most this many leases from now on. Those that are held stay."""
        self._max_leases = max_leases

    def next_id(self) -> int:
        """Return an id for a new lease.

        Raises:
            TooManyLeasesError: as many leases are held as are allowed.
        """
        if len(self._leases) >= self._max_leases:
            raise TooManyLeasesError(
                f"{len(self._leases)} leases are held, and no more are allowed",
                "complete loads and stores before preparing more",
            )
        self._next_id += 1
        return self._next_id - 1

    def add(self, lease: Lease) -> None:
        """Register a lease."""
        assert lease.phase is not LeasePhase.ENDED, "a lease ends once"
        self._leases[lease.lease_id] = lease
        self._by_engine.setdefault(lease.engine_id, {})[lease.lease_id] = None
        if not isinstance(lease, RestoredLease):
            self._by_session[lease.key] = self._by_session.get(lease.key, 0) + 1
        self._count_orphan(lease, 1)

    def quarantine(self, lease: RestoredLease, slot_id: int, generation: int) -> None:
        """Add a slot to a registered lease."""
        lease.held.append((slot_id, generation))
        self.num_quarantined_slots += 1

    def end(self, lease: Lease) -> None:
        """Remove a lease, because it is over."""
        self._remove(lease)
        move(lease, "end")

    def _remove(self, lease: Lease) -> None:
        self._count_orphan(lease, -1)
        del self._leases[lease.lease_id]
        of_engine = self._by_engine[lease.engine_id]
        del of_engine[lease.lease_id]
        if not of_engine:
            del self._by_engine[lease.engine_id]
        if isinstance(lease, RestoredLease):
            return
        self._by_session[lease.key] -= 1
        if not self._by_session[lease.key]:
            del self._by_session[lease.key]

    def detach(self, lease: StoreLease | RestoredLease) -> None:
        """Record that the engine of a store lease has lost its connection."""
        move(lease, "detach")
        self._count_orphan(lease, 1)

    def reattach(self, lease: StoreLease | RestoredLease, engine_id: int) -> None:
        """Give a store lease back to its engine, which has returned under a new id."""
        self._remove(lease)
        lease.engine_id = engine_id
        move(lease, "reattach")
        self.add(lease)

    def get(self, lease_id: int) -> Lease | None:
        """Return a lease; None if there is none of this id."""
        return self._leases.get(lease_id)

    def is_lost(self, lease_id: int, engine_id: int) -> bool:
        """Whether an engine cannot complete a lease, because it does not hold it, or no longer."""
        lease = self._leases.get(lease_id)
        return lease is None or lease.engine_id != engine_id or isinstance(lease, RestoredLease)

    def load_of(self, lease_id: int, engine_id: int | None = None) -> LoadLease:
        """Return a load lease; of this engine, if one is given.

        Raises:
            LeaseLostError: there is no such lease.
        """
        lease = self._leases.get(lease_id)
        if not isinstance(lease, LoadLease) or engine_id not in (None, lease.engine_id):
            raise lost(lease_id)
        return lease

    def store_of(self, lease_id: int, engine_id: int) -> StoreLease | RestoredLease:
        """Return a store lease of this engine.

        Raises:
            LeaseLostError: there is no such lease.
        """
        lease = self._leases.get(lease_id)
        if lease is None or isinstance(lease, LoadLease) or engine_id != lease.engine_id:
            raise lost(lease_id)
        return lease

    def of_engine(self, engine_id: int) -> tuple[Lease, ...]:
        """Return all leases of an engine, oldest first."""
        return tuple(self._leases[lease_id] for lease_id in self._by_engine.get(engine_id, ()))

    def reading(self, block: Block) -> list[LoadLease]:
        """Return the load leases on a block; O(leases)."""
        return [
            lease
            for lease in self._leases.values()
            if isinstance(lease, LoadLease) and any(entry is block for entry, _ in lease.entries)
        ]

    def num_of_session(self, key: SessionKey) -> int:
        """Return how many leases are held for a session."""
        return self._by_session.get(key, 0)

    def is_storing(self, key: SessionKey) -> bool:
        """Whether a store lease is held for a session: O(leases) if it has any lease."""
        if not self.num_of_session(key):
            return False
        return any(isinstance(lease, StoreLease) and lease.key == key for lease in self)

    def _count_orphan(self, lease: Lease, sign: int) -> None:
        if not isinstance(lease, LoadLease) and lease.phase is LeasePhase.ORPHAN:
            self.num_orphans += sign
            self.num_quarantined_slots += sign * len(lease.slots())


def lost(lease_id: int) -> LeaseLostError:
    """Return the error for a lease that its caller may not use."""
    return LeaseLostError(
        f"this engine does not hold lease {lease_id}",
        "discard what the lease covered, and prepare again",
    )
