"""Engines that come and go: what becomes of their leases (D10).

Pure. A connection may end while its process lives. What the engine was loading it must not trust
any more, so those leases end; what it was storing it may still be writing, so those leases become
orphans, whose slots nobody else gets until the engine is back, or dead.
"""

from collections.abc import Sequence

from kvd.core.operations.loading import Loader
from kvd.core.operations.storing import Storer
from kvd.core.records.actions import OWNER_DETACHED, OWNER_GONE, OWNER_REATTACHED
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Lease, LoadLease


class Peers:
    """The engines of one cache state."""

    def __init__(self, state: CacheState, loader: Loader, storer: Storer) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer

    def gone(self, owner: int) -> None:
        """See CacheEngine.owner_gone."""
        leases = self._state.leases.of_owner(owner)
        for lease in leases:
            self._release(lease)
        self._state.placement.forget_engine(owner, self._state.now_ns)
        self._state.turns.engine_gone(owner)
        self._state.outbox.emit(OWNER_GONE, None, {"owner": owner, "num_leases": len(leases)})

    def detach(self, owner: int) -> None:
        """See CacheEngine.detach."""
        num_slots = 0
        for lease in self._state.leases.of_owner(owner):
            if isinstance(lease, LoadLease):
                self._loader.release(lease)
            else:
                self._state.leases.detach(lease)
                num_slots += len(lease.slots())
        self._state.placement.forget_engine(owner, self._state.now_ns)
        self._state.turns.engine_gone(owner)
        fields = {"owner": owner, "num_quarantined_slots": num_slots}
        self._state.outbox.emit(OWNER_DETACHED, None, fields)

    def reattach(
        self, old_owner: int, new_owner: int, held: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See CacheEngine.reattach."""
        wanted = frozenset(held)
        for lease in self._state.leases.of_owner(old_owner):
            if isinstance(lease, LoadLease) or lease.lease_id not in wanted:
                self._release(lease)
            else:
                self._storer.give_to(lease, new_owner)
        confirmed, lost = self.confirm(new_owner, held)
        fields = {"owner": new_owner, "num_confirmed": len(confirmed), "num_lost": len(lost)}
        self._state.outbox.emit(OWNER_REATTACHED, None, fields)
        return confirmed, lost

    def confirm(
        self, owner: int, lease_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See CacheEngine.confirm_leases."""
        held = {lease.lease_id for lease in self._state.leases.of_owner(owner)}
        confirmed = tuple(lease_id for lease_id in lease_ids if lease_id in held)
        return confirmed, tuple(lease_id for lease_id in lease_ids if lease_id not in held)

    def _release(self, lease: Lease) -> None:
        if isinstance(lease, LoadLease):
            self._loader.release(lease)
        else:
            self._storer.release(lease)
