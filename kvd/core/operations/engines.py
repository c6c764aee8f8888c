"""What inference engines report of themselves: their queues, and that they come and go (D10).

Pure. A connection may end while its process lives. What the engine was loading it must not trust
any more, so those leases end; what it was storing it may still be writing, so those leases become
orphans, whose slots nobody else gets until the engine is back, or dead.
"""

from collections.abc import Callable, Iterable, Sequence

from kvd.core.io.prefetching import Prefetcher
from kvd.core.operations.loading import Loader
from kvd.core.operations.storing import Storer
from kvd.core.records.actions import OWNER_DETACHED, OWNER_GONE, OWNER_REATTACHED
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Lease, LoadLease
from shared.types.queue_delta import QueueChange, QueuedRequest
from shared.types.session_key import SessionKey


class EngineReports:
    """Takes what engines report to one cache: their queues, and the ends of their connections.

    Args:
        state: the cache's tables.
        loader, storer: end leases of engines that are gone.
        prefetcher: plans anew when a queue has changed.
        arrived: called with the sessions of which turns have arrived, by each change.
        queued: called with the requests that wait, as each change reports them.
    """

    def __init__(
        self,
        state: CacheState,
        loader: Loader,
        storer: Storer,
        prefetcher: Prefetcher,
        arrived: Callable[[Iterable[SessionKey]], None],
        queued: Callable[[Iterable[QueuedRequest]], None],
    ) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer
        self._prefetcher = prefetcher
        self._arrived = arrived
        self._queued = queued

    def gone(self, engine_id: int) -> None:
        """Release everything an engine holds: it is dead and will not touch its slots."""
        leases = self._state.leases.of_engine(engine_id)
        for lease in leases:
            self._release(lease)
        self._forget_queue(engine_id)
        self._state.outbox.emit(OWNER_GONE, None, {"owner": engine_id, "num_leases": len(leases)})

    def detach(self, engine_id: int) -> None:
        """Record that an engine's connection is over while its process lives.

        What it loads it must not trust any more: those leases end. What it stores it may still be
        writing: the slots stay its own, until `reattach` or `gone`.
        """
        num_slots = 0
        for lease in self._state.leases.of_engine(engine_id):
            if isinstance(lease, LoadLease):
                self._loader.release(lease)
            else:
                self._state.leases.detach(lease)
                num_slots += len(lease.slots())
        self._forget_queue(engine_id)
        fields = {"owner": engine_id, "num_quarantined_slots": num_slots}
        self._state.outbox.emit(OWNER_DETACHED, None, fields)

    def reattach(
        self, old_id: int, new_id: int, held: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give an engine that came back the store leases it still holds; it knows of no others.

        Of one that an earlier kvd granted only the slots are kept: the engine may write to them,
        but its completion fails.

        Args:
            old_id: its id while it was attached before, or in an OrphanSlot.
            new_id: its id since it attached again.
            held: ids of the leases it says it holds.

        Returns:
            Those of `held` that are its own again, and those that are lost.
        """
        wanted = frozenset(held)
        for lease in self._state.leases.of_engine(old_id):
            if isinstance(lease, LoadLease) or lease.lease_id not in wanted:
                self._release(lease)
            else:
                self._storer.reattach(lease, new_id)
        granted = {lease.lease_id for lease in self._state.leases.of_engine(new_id)}
        confirmed = tuple(lease_id for lease_id in held if lease_id in granted)
        lost = tuple(lease_id for lease_id in held if lease_id not in granted)
        fields = {"owner": new_id, "num_confirmed": len(confirmed), "num_lost": len(lost)}
        self._state.outbox.emit(OWNER_REATTACHED, None, fields)
        return confirmed, lost

    def replace_queue(self, engine_id: int, queue: QueueChange) -> int:
        """Take all of an engine's waiting queue; returns its digest."""
        state = self._state
        state.turns.on_queue_replace(engine_id, queue, state.now_ns)
        self._prefetcher.queue_changed()
        digest = state.placement.replace_queue(engine_id, queue, state.now_ns)
        self._arrived(state.placement.arrived)
        self._queued(queue.waiting)
        return digest

    def change_queue(self, engine_id: int, change: QueueChange) -> int:
        """Take a change of an engine's waiting queue; returns the digest of what it is now."""
        state = self._state
        state.turns.on_queue_change(engine_id, change, state.now_ns)
        self._prefetcher.queue_changed()
        digest = state.placement.change_queue(engine_id, change, state.now_ns)
        self._arrived(state.placement.arrived)
        self._queued(change.waiting)
        return digest

    def num_requests(self, engine_id: int) -> tuple[int, int]:
        """Count an engine's requests: those that wait, and those that are being computed."""
        queue = self._state.placement.queue
        return queue.num_waiting(engine_id), queue.num_running(engine_id)

    def _forget_queue(self, engine_id: int) -> None:
        self._state.placement.forget_engine(engine_id, self._state.now_ns)
        self._state.turns.on_engine_gone(engine_id)
        self._prefetcher.queue_changed()

    def _release(self, lease: Lease) -> None:
        if isinstance(lease, LoadLease):
            self._loader.release(lease)
        else:
            self._storer.release(lease)
