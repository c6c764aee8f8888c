"""Erasure of tenants: remove their KV from every tier, and from free memory, too (D11).

    begin ─► step … until nothing is left ─► wipe … until all is wiped ─► end

From `begin` to `end` the tenants are shut out: their engines' calls are refused, and may be retried
later. Their loads end at `begin`, so their engines must not trust that KV; their stores publish
nothing. `step` drops some sessions per call; blocks that are being moved go when the move ends.
Then `wipe` zeroes every free slot, whichever tenant it was used by, so that KV that was evicted
long ago is gone, too. Slots that are being filled at that time, or are allocated before their turn,
are zeroed as soon as they are free again: an engine may fill them only in part, or with the KV of
an erased tenant. kvd/caches/erasing.py calls this, and destroys the tenants' keys.

Pure. Invariants: 1. a tenant counts as gone only if it has no sessions, no blocks and no write
under way; 2. a slot that is being wiped has no owner: it is not free, and in no block, lease or
journal record.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvd.core.operations.loading import Loader
from kvd.core.operations.sessions import Sessions
from kvd.core.operations.storing import Storer
from kvd.core.records.actions import IoOutcome, WipeSlots
from kvd.core.records.records import FlushAnswer
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LoadLease, StoreLease
from kvd.core.state.tenants import no_erasure
from shared.types.units import MIB

if TYPE_CHECKING:
    from shared.types.session_key import SessionKey

WIPE_BYTES = 256 * MIB  # per action: some ten milliseconds, in which these slots cannot be used
LOOKED_AT = 20  # sessions looked at per session that a call may drop
WHY = "erased"


class Eraser:
    """Erases tenants of one cache state.

    Attributes:
        has_unvisited: whether `step` has yet to look at some of the sessions stored at `begin`.
    """

    def __init__(
        self, state: CacheState, loader: Loader, storer: Storer, sessions: Sessions
    ) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer
        self._sessions = sessions
        self._unvisited: Iterator[SessionKey] = iter(())
        self.has_unvisited = False
        self._has_wipe_failed = False

    def begin(self, is_erased: Callable[[str], bool]) -> None:
        """Shut tenants out until `end`; end their loads, and make their stores publish nothing.

        The caller owes `step` until `has_unvisited` is false, then waits for `is_gone`.

        Args:
            is_erased: whether a tenant, given by name, is to be erased.
        """
        self._state.tenants.is_erased = is_erased
        self._unvisited, self.has_unvisited = iter(list(self._state.sessions)), True
        for lease in tuple(self._state.leases):
            if isinstance(lease, LoadLease) and is_erased(lease.key.tenant):
                self._loader.release(lease)
            elif isinstance(lease, StoreLease) and is_erased(lease.key.tenant):
                self._storer.outdate(lease)

    def step(self, max_sessions: int) -> FlushAnswer:
        """Drop up to `max_sessions` sessions of the tenants, from every tier, pinned or not.

        The number of other sessions passed over is bounded, too: a step may drop none though
        `has_unvisited`.
        """
        state = self._state
        keys: list[SessionKey] = []
        for _ in range(LOOKED_AT * max_sessions):
            if len(keys) == max_sessions:
                break
            key = next(self._unvisited, None)
            if key is None:
                self.has_unvisited = False
                break
            if state.tenants.is_erased(key.tenant) and key in state.sessions:
                keys.append(key)
        return self._sessions.drop(keys, (), WHY)

    def is_gone(self) -> bool:
        """Whether nothing of the tenants is stored or being moved any more.

        The removals of their last index entries may not be drained or committed yet. A step that
        must follow them, such as destroying the keys, has to be queued behind them.
        """
        state, is_erased = self._state, self._state.tenants.is_erased
        if any(is_erased(op.block.tenant) for op in state.under_way.writes.values()):
            return False
        stores = [lease for lease in state.leases if isinstance(lease, StoreLease)]
        num_filling = sum(len(x.slots()) for x in stores if is_erased(x.key.tenant))
        used = [usage for usage in state.tenants if is_erased(usage.tenant)]
        num_used = sum(usage.used_bytes for usage in used) // state.layout.block_bytes
        return num_used == num_filling and not any(usage.num_sessions for usage in used)

    def wipe(self) -> None:
        """Begin to zero all slots that are free now; the caller waits until not `is_wiping`.

        Slots that are in use are zeroed later, by `resume`.
        """
        self._state.slots.mark_unwiped()
        self._has_wipe_failed = False
        self._wipe_some()

    def is_wiping(self) -> bool:
        """Whether free slots are still to be wiped."""
        return bool(self._state.under_way.wipes or self._state.slots.num_unwiped)

    def is_wiped(self) -> bool:
        """Whether every wipe since the last `wipe` has succeeded."""
        return not self._has_wipe_failed

    def wipe_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a WipeSlots."""
        self._has_wipe_failed |= outcome is not IoOutcome.OK
        for slot_id in self._state.under_way.wipes.pop(op_id):
            self._state.slots.free(slot_id)
        self._wipe_some()
        self._state.outbox.on_space_freed()

    def resume(self) -> None:
        """Zero slots that were in use when they were to be zeroed, and that are free now."""
        if not self._state.under_way.wipes:
            self._wipe_some()

    def forget(self, tenant: str | None) -> None:
        """Forget the history of a tenant's sessions and blocks; None: of all tenants."""
        self._state.history.forget(tenant)
        self._state.discarded.forget(tenant)

    def end(self) -> None:
        """Let the tenants in again."""
        self._state.tenants.is_erased = no_erasure

    def _wipe_some(self) -> None:
        """Wipe a bounded number of the free slots that are not wiped yet."""
        state = self._state
        slot_ids = state.slots.take_unwiped(max(1, WIPE_BYTES // state.layout.block_bytes))
        if slot_ids:
            op_id = state.under_way.next_op_id()
            state.under_way.wipes[op_id] = slot_ids
            state.outbox.add(WipeSlots(op_id, tuple(slot_ids)))
