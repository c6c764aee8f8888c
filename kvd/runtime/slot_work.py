"""Work on the bytes of one layout's slots in threads of the pool: hash, verify, compact, wipe.

Every operation is reported exactly once, also if its thread fails: an operation that never ends
would hold its slot for ever.

One thread at a time hashes blocks. It hashes faster than disks write. More threads would only take
the GIL from the event loop, because xxhash holds it while it hashes a small slice.

Compactions gather rows of slots in other slots. A row of a component has a few hundred bytes to
some KiB, and a block may take its rows one by one from others. So all rows from one slot are copied
at once, component by component, by numpy, which releases the GIL meanwhile.

Invariant: a compaction never copies corrupt bytes. Every source is verified before its rows are
copied, because the new blocks get checksums of their own, which would hide the damage.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.actions import (
    CompactTokens,
    DenseBlock,
    HashSlots,
    IoOutcome,
    TokenRun,
    VerifySlot,
    WipeSlots,
)
from kvd.runtime.completions import EndedOperations, run_guarded, verification_ended
from kvd.runtime.load_tracking import LoadTracker
from kvd.tiers.arena import Arena
from kvd.tiers.direct_io import Staging
from kvd.tiers.io_threads import IoPool, Priority
from kvd.tiers.slot_rows import BlockHasher, SlotRows
from shared.types.kv_layout import KVLayout

_SLOT = attrgetter("slot_id")

Rows = NDArray[np.uint8]  # [block_tokens, token_bytes]
Indexes = NDArray[np.intp]
SlotAction: TypeAlias = HashSlots | VerifySlot | CompactTokens | WipeSlots


class RowCopier:
    """Copies rows between the slots of one layout.

    Args:
        layout: layout of the slots.
        memory_of: returns the memory of a slot.
    """

    def __init__(self, layout: KVLayout, memory_of: Callable[[int], memoryview]) -> None:
        self._memory_of = memory_of
        self._hasher = BlockHasher(layout)
        self._block_tokens = layout.block_tokens
        self._components = SlotRows(layout).components

    def compact(self, action: CompactTokens) -> list[bytes] | None:
        """Gather rows of the source slots in the target slots.

        Padding, and rows behind the last one, keep their old bytes, which are never read.

        Returns:
            The packed checksums of each target; None if a source is corrupt.
        """
        for source in action.sources:
            memory = self._memory_of(source.slot_id)
            if not self._hasher.matches(memory, source.num_tokens, source.checksums):
                return None
        return [self._fill(block) for block in action.blocks]

    def _fill(self, block: DenseBlock) -> bytes:
        memory = self._memory_of(block.slot_id)
        for first, slot_id, indexes in _group_runs(block.runs):
            source = self._memory_of(slot_id)
            rows = slice(first, first + len(indexes))
            for offset, token_bytes in self._components:
                target = self._view(memory, offset, token_bytes)[rows]
                # mode="clip": numpy then writes to `out` directly, where the default mode needs a
                # buffer. No index is out of range.
                self._view(source, offset, token_bytes).take(indexes, 0, target, mode="clip")
        return self._hasher.checksums(memory, block.num_tokens)

    def _view(self, memory: memoryview, offset: int, token_bytes: int) -> Rows:
        count = self._block_tokens * token_bytes
        flat = np.frombuffer(memory, np.uint8, count, offset)
        return flat.reshape(self._block_tokens, token_bytes)


def _group_runs(runs: Sequence[TokenRun]) -> Iterator[tuple[int, int, Indexes]]:
    """Yield (first target row, source slot, source rows [rows]) of runs that share a slot."""
    first = 0
    for slot_id, slot_runs in groupby(runs, key=_SLOT):
        indexes = np.concatenate([np.arange(r.start, r.start + r.num_tokens) for r in slot_runs])
        yield first, slot_id, indexes
        first += len(indexes)


class HashQueue:
    """A queue of blocks to hash: one job of the pool at a time calls `hash_slots`.

    Invariant: while actions wait, exactly one job is queued or running.
    """

    def __init__(self, pool: IoPool, hash_slots: Callable[[HashSlots], None]) -> None:
        self._pool = pool
        self._hash_slots = hash_slots
        self._waiting: deque[HashSlots] = deque()
        self._is_busy = False
        self._lock = threading.Lock()  # guards _waiting and _is_busy

    def put(self, action: HashSlots) -> None:
        """Queue the blocks of an action; returns at once."""
        with self._lock:
            self._waiting.append(action)
            if self._is_busy:
                return
            self._is_busy = True
        self._pool.submit(Priority.HASH, 0, self._job)

    def _job(self, _staging: Staging) -> None:
        with self._lock:
            action = self._waiting.popleft()
        self._hash_slots(action)
        with self._lock:
            self._is_busy = bool(self._waiting)
            if not self._is_busy:
                return
        self._pool.submit(Priority.HASH, 0, self._job)


class SlotWorker:
    """Hashes, verifies, compacts and wipes the slots of one layout.

    Args:
        layout: layout of the slots.
        pool: pool that runs the work.
        arena: returns the arena of the slots.
        loads: tracks the verifications that loads may wait for.
        report: called with ended operations, in any thread.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: IoPool,
        arena: Callable[[], Arena],
        loads: LoadTracker,
        report: Callable[[EndedOperations], None],
    ) -> None:
        self._num_layers = len(layout.layers)
        self._pool = pool
        self._arena = arena
        self._loads = loads
        self._report = report
        self._hasher = BlockHasher(layout)
        self._copier = RowCopier(layout, self._memory)
        self._hashes = HashQueue(pool, self._hash)
        # Operation → verification that has not begun, and that no load waits for so far.
        self._patient: dict[int, VerifySlot] = {}

    def begin(self, action: SlotAction) -> None:
        """Begin an operation; returns at once.

        Urgent verifications go before other work. Others have the lowest priority, like
        compactions.
        """
        match action:
            case HashSlots():
                self._hashes.put(action)
            case VerifySlot(op_id):
                self._loads.begin(op_id)
                if action.urgent:
                    self._pool.submit(Priority.URGENT_VERIFY, 0, lambda _: self._verify(action))
                else:
                    self._patient[op_id] = action
                    self._submit_patient(Priority.BACKGROUND, op_id)
            case CompactTokens():
                self._pool.submit(Priority.BACKGROUND, 0, lambda _: self._compact(action))
            case WipeSlots():
                self._pool.submit(Priority.WRITE, 0, lambda _: self._wipe(action))

    def hurry(self, op_ids: Iterable[int]) -> None:
        """Make verifications among these operations urgent: a load waits for them now."""
        for op_id in op_ids:
            if op_id in self._patient:
                self._submit_patient(Priority.URGENT_VERIFY, op_id)

    def _memory(self, slot_id: int) -> memoryview:
        return self._arena().slots.slot(slot_id)

    def _submit_patient(self, priority: Priority, op_id: int) -> None:
        """Queue a verification, perhaps a second time: the job that comes first does it."""

        def job(_staging: Staging) -> None:
            action = self._patient.pop(op_id, None)
            if action is not None:
                self._verify(action)

        self._pool.submit(priority, 0, job)

    # ------------------------------------------------------------------------- in other threads

    def _hash(self, action: HashSlots) -> None:
        checksums = [self._checksums(*slot) for slot in action.slots]
        self._report(
            EndedOperations(lambda engine: engine.hashes.hash_done(action.op_id, checksums))
        )

    def _checksums(self, slot_id: int, num_tokens: int) -> bytes:
        def work() -> bytes:
            return self._hasher.checksums(self._memory(slot_id), num_tokens)

        return run_guarded("hash_failed_unexpectedly", work, b"", slot_id=slot_id)

    def _verify(self, action: VerifySlot) -> None:
        def work() -> IoOutcome:
            memory = self._memory(action.slot_id)
            is_good = self._hasher.matches(memory, action.num_tokens, action.checksums)
            return IoOutcome.OK if is_good else IoOutcome.CORRUPT

        event, failed = "verify_failed_unexpectedly", IoOutcome.TRANSIENT
        outcome = run_guarded(event, work, failed, slot_id=action.slot_id)
        if outcome is IoOutcome.OK:
            self._loads.record_progress(action.op_id, self._num_layers)
        self._report(verification_ended(action.op_id, outcome))

    def _compact(self, action: CompactTokens) -> None:
        op_id = action.op_id

        def work() -> tuple[IoOutcome, list[bytes]]:
            checksums = self._copier.compact(action)
            return (IoOutcome.CORRUPT, []) if checksums is None else (IoOutcome.OK, checksums)

        failed: tuple[IoOutcome, list[bytes]] = (IoOutcome.TRANSIENT, [])
        num_blocks = len(action.blocks)
        outcome, sums = run_guarded("compact_failed_unexpectedly", work, failed, blocks=num_blocks)
        self._report(
            EndedOperations(lambda engine: engine.compactions.copy_done(op_id, outcome, sums))
        )

    def _wipe(self, action: WipeSlots) -> None:
        def work() -> IoOutcome:
            for slot_id in action.slot_ids:
                np.frombuffer(self._memory(slot_id), np.uint8).fill(0)  # releases the GIL
                self._arena().journal.wipe(slot_id)
            return IoOutcome.OK

        event, failed = "wipe_failed_unexpectedly", IoOutcome.TRANSIENT
        outcome = run_guarded(event, work, failed, slots=len(action.slot_ids))
        self._report(
            EndedOperations(lambda engine: engine.erasing.wipe_done(action.op_id, outcome))
        )
