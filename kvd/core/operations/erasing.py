"""Erasing tenants: nothing of theirs stays in any tier, not even in memory that is free (D11).

    begin ─► step … until nothing is left ─► wipe … until all is wiped ─► end

From `begin` to `end` the tenants are shut out: their engines' calls are refused, to be tried again.
Their loads end there, and must not be trusted; what they are storing publishes nothing. `step`
drops sessions, some at a time; blocks that are being moved go when that ends. Then `wipe` has every
free slot zeroed, of any tenant: also what was evicted long ago is gone. Slots that engines are
filling just then are left alone, because they are written to. Keys are the business of
kvd/caches/erasing.py, which calls this.

Pure. Invariants: 1. a tenant is erased only if it has no sessions, no blocks and no write under
way; 2. a slot that is being wiped is nobody's: not free, in no block, lease or journal record.
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

WIPE_BYTES = 256 * MIB  # at a time: some ten milliseconds; meanwhile the slots are out of use
LOOKED_AT = 20  # sessions, for each that may be dropped in the same call
WHY = "erased"


class Eraser:
    """Erases tenants of one cache state.

    Attributes:
        has_unvisited: `step` has not come to all sessions that there were at `begin`.
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
        self._num_to_wipe = 0
        self._has_failed = False

    def begin(self, is_erased: Callable[[str], bool]) -> None:
        """Shut tenants out until `end`: what they load and store comes to nothing.

        The caller owes `step` until it drops nothing more, and waits for `is_gone`.
        """
        self._state.tenants.is_erased = is_erased
        self._unvisited, self.has_unvisited = iter(list(self._state.sessions)), True
        for lease in tuple(self._state.leases):
            if isinstance(lease, LoadLease) and is_erased(lease.key.tenant):
                self._loader.release(lease)
            elif isinstance(lease, StoreLease) and is_erased(lease.key.tenant):
                self._storer.outdate(lease)

    def step(self, max_sessions: int) -> FlushAnswer:
        """Drop up to this many sessions of the tenants, from every tier, pinned or not.

        Others are passed over, so many at most: a step may drop none though `has_unvisited`.
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
        """Whether nothing of the tenants is stored, or being moved, any more.

        Entries of the last of it may be in `drain` yet, or on their way to the index: what is to
        happen after them, as to the keys, goes behind them.
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
        """Have all slots zeroed that are free now; wait until `is_wiping` says no."""
        self._num_to_wipe = self._state.slots.num_free
        self._has_failed = False
        self._wipe_some()

    def is_wiping(self) -> bool:
        """Whether free slots are still to be wiped."""
        return bool(self._state.under_way.wipes)

    def is_wiped(self) -> bool:
        """Whether every slot could be zeroed."""
        return not self._has_failed

    def wipe_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a WipeSlots."""
        self._has_failed |= outcome is not IoOutcome.OK
        for slot_id in self._state.under_way.wipes.pop(op_id):
            self._state.slots.free(slot_id)
        self._wipe_some()
        self._state.outbox.on_space_freed()

    def forget(self, tenant: str | None) -> None:
        """Forget what happened to a tenant's sessions and blocks; None: to all."""
        self._state.history.forget(tenant)
        self._state.discarded.forget(tenant)

    def end(self) -> None:
        """Let the tenants in again."""
        self._state.tenants.is_erased = no_erasure

    def _wipe_some(self) -> None:
        """Take those out of use that have been free longest: what is wiped comes behind them."""
        state = self._state
        most = max(1, WIPE_BYTES // state.layout.block_bytes)
        slot_ids = state.slots.take_free(min(most, self._num_to_wipe))
        self._num_to_wipe -= len(slot_ids)
        if slot_ids:
            op_id = state.under_way.next_op_id()
            state.under_way.wipes[op_id] = slot_ids
            state.outbox.add(WipeSlots(op_id, tuple(slot_ids)))
