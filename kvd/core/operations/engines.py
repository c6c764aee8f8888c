"""Reports of inference engines: their queues, and their connects, disconnects and ends (D10).

Pure. A connection may end while the engine's process lives. The engine must not trust the KV of its
loads any more, so those leases end. It may still be writing to the slots of its stores, so those
leases become orphans: their slots are given to no other until the engine is back, or dead.
"""

from collections.abc import Callable, Iterable, Sequence

from kvd.core.io.prefetching import Prefetcher
from kvd.core.operations.loading import Loader
from kvd.core.operations.storing import Storer
from kvd.core.records.actions import OWNER_DETACHED, OWNER_GONE, OWNER_REATTACHED
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Lease, LoadLease
from shared.types.queue_delta import QueueChange, QueuedRequests
from shared.types.session_key import SessionKey


class EngineReports:
    """Applies what engines report to one cache: their queues, and the ends of their connections.

    Args:
        state: the cache's tables.
        loader, storer: end the leases of engines that are gone.
        prefetcher: plans again when a queue has changed.
        on_arrival: called with each change's newly arrived sessions.
        on_queue: called with each change's waiting requests.
    """

    def __init__(
        self,
        state: CacheState,
        loader: Loader,
        storer: Storer,
        prefetcher: Prefetcher,
        on_arrival: Callable[[Iterable[SessionKey]], None],
        on_queue: Callable[[QueuedRequests], None],
    ) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer
        self._prefetcher = prefetcher
        self._on_arrival = on_arrival
        self._on_queue = on_queue

    def remove(self, engine_id: int) -> None:
        """Release all leases of an engine that is dead and so cannot touch its slots any more."""
        leases = self._state.leases.of_engine(engine_id)
        for lease in leases:
            self._release(lease)
        self._forget_queue(engine_id)
        self._state.outbox.emit(OWNER_GONE, None, {"owner": engine_id, "num_leases": len(leases)})

    def detach(self, engine_id: int) -> None:
        """Record that an engine's connection has ended while its process lives.

        Its load leases end: it must not trust that KV any more. Its store leases become orphans: it
        may still be writing to their slots, until `reattach` or `remove`.
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
        """Give an engine that came back its store leases; those that it does not name end.

        Of a lease that an earlier kvd granted only the slots are kept: the engine may write to
        them, but completing it fails.

        Args:
            old_id: the engine's id during its earlier attachment, or in an OrphanSlot.
            new_id: its id since it attached again.
            held: ids of the leases that it says it holds.

        Returns:
            Those of `held` that it holds again, and those that are lost.
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
        """Replace an engine's queue by another one; returns the digest of the new queue."""
        state = self._state
        state.turns.on_queue_replace(engine_id, queue, state.now_ns)
        self._prefetcher.on_queue_change()
        digest = state.placement.replace_queue(engine_id, queue, state.now_ns)
        self._on_arrival(state.placement.arrived)
        self._on_queue(queue.waiting)
        return digest

    def change_queue(self, engine_id: int, change: QueueChange) -> int:
        """Apply a change to an engine's queue; returns the digest of the new queue."""
        state = self._state
        state.turns.on_queue_change(engine_id, change, state.now_ns)
        self._prefetcher.on_queue_change()
        digest = state.placement.change_queue(engine_id, change, state.now_ns)
        self._on_arrival(state.placement.arrived)
        self._on_queue(change.waiting)
        return digest

    def num_requests(self, engine_id: int) -> tuple[int, int]:
        """Return how many requests of an engine wait, and how many are being computed."""
        queue = self._state.placement.queue
        return queue.num_waiting(engine_id), queue.num_running(engine_id)

    def _forget_queue(self, engine_id: int) -> None:
        self._state.placement.forget_engine(engine_id, self._state.now_ns)
        self._state.turns.on_engine_gone(engine_id)
        self._prefetcher.on_queue_change()

    def _release(self, lease: Lease) -> None:
        if isinstance(lease, LoadLease):
            self._loader.release(lease)
        else:
            self._storer.release(lease)
