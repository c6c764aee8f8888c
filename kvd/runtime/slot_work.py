"""Work on the bytes of one layout's slots, in threads of the pool: hash, verify, compact, wipe.

Every operation is reported exactly once, whatever happens in the thread: one without an answer
would hold its slot for ever.

Blocks are hashed by one thread at a time, some blocks at a time. One thread hashes faster than
disks write. More of them would only take the interpreter from the event loop, because xxhash keeps
it while it hashes a small slice; and for a small block the job around it costs as much as the hash.

Compactions copy rows of slots together into other slots. A row of a component is a few hundred
bytes to some KiB, and a block may take its rows one by one from others: so the rows that one slot
gives are copied at once, component by component, in numpy, which gives the interpreter up for it.

Invariant: nothing is made of bytes that are not the ones stored: every source is compared with its
checksums before its rows are copied, because what is made gets checksums of its own.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.actions import (
    CompactTokens,
    DenseBlock,
    HashSlot,
    IoOutcome,
    TokenRun,
    VerifySlot,
    WipeSlots,
)
from kvd.runtime.completions import Ended, attempt, verified
from kvd.runtime.load_tracking import LoadTracker
from kvd.tiers.arena import Arena
from kvd.tiers.direct_io import Staging
from kvd.tiers.io_threads import IoPool, Priority
from kvd.tiers.slot_rows import BlockHasher, SlotRows
from shared.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

HASH_BATCH = 16  # blocks in one job of the pool
_SLOT = attrgetter("slot_id")

Rows = NDArray[np.uint8]  # [block_tokens, token_bytes]
Indexes = NDArray[np.intp]
SlotAction: TypeAlias = HashSlot | VerifySlot | CompactTokens | WipeSlots


class RowCopier:
    """Copies rows of one layout.

    Args:
        layout: the layout of the slots.
        memory_of: slot id → its memory.
    """

    def __init__(self, layout: KVLayout, memory_of: Callable[[int], memoryview]) -> None:
        self._memory_of = memory_of
        self._hasher = BlockHasher(layout)
        self._block_tokens = layout.block_tokens
        self._components = SlotRows(layout).components

    def compact(self, action: CompactTokens) -> list[bytes] | None:
        """Fill the slots; returns the checksums of each, None if a source is not what was stored.

        Padding, and rows behind the last one, are left as they are: nobody reads them.
        """
        for source in action.sources:
            memory = self._memory_of(source.slot_id)
            if not self._hasher.matches(memory, source.num_tokens, source.checksums):
                return None
        return [self._fill(block) for block in action.blocks]

    def _fill(self, block: DenseBlock) -> bytes:
        memory = self._memory_of(block.slot_id)
        for first, slot_id, indexes in _gathers(block.runs):
            source = self._memory_of(slot_id)
            rows = slice(first, first + len(indexes))
            for offset, token_bytes in self._components:
                copied = self._view(memory, offset, token_bytes)[rows]
                # "clip" (no index is outside) writes straight to `out`, without a buffer between
                self._view(source, offset, token_bytes).take(indexes, 0, copied, mode="clip")
        return self._hasher.checksums(memory, block.num_tokens)

    def _view(self, memory: memoryview, offset: int, token_bytes: int) -> Rows:
        count = self._block_tokens * token_bytes
        flat = np.frombuffer(memory, np.uint8, count, offset)
        return flat.reshape(self._block_tokens, token_bytes)


def _gathers(runs: Sequence[TokenRun]) -> Iterator[tuple[int, int, Indexes]]:
    """Yield what neighbouring runs take from one slot: (first row filled, slot, rows taken)."""
    first = 0
    for slot_id, of_slot in groupby(runs, key=_SLOT):
        indexes = np.concatenate([np.arange(r.start, r.start + r.num_tokens) for r in of_slot])
        yield first, slot_id, indexes
        first += len(indexes)


class HashQueue:
    """Has `hash_blocks` called in the pool with what was put, in order.

    Invariant: while something waits, exactly one job is queued or running.
    """

    def __init__(self, pool: IoPool, hash_blocks: Callable[[Sequence[HashSlot]], None]) -> None:
        self._pool = pool
        self._hash_blocks = hash_blocks
        self._waiting: deque[HashSlot] = deque()
        self._is_busy = False
        self._lock = threading.Lock()  # guards both

    def put(self, action: HashSlot) -> None:
        """Queue one; returns at once."""
        with self._lock:
            self._waiting.append(action)
            if self._is_busy:
                return
            self._is_busy = True
        self._pool.submit(Priority.HASH, 0, self._job)

    def _job(self, _staging: Staging) -> None:
        with self._lock:
            num_taken = min(len(self._waiting), HASH_BATCH)
            taken = [self._waiting.popleft() for _ in range(num_taken)]
        self._hash_blocks(taken)
        with self._lock:
            self._is_busy = bool(self._waiting)
            if not self._is_busy:
                return
        self._pool.submit(Priority.HASH, 0, self._job)


class SlotWorker:
    """See the module docstring.

    Args:
        layout: the layout of the slots.
        pool: runs the work.
        arena: returns the arena that the slots are in.
        loads: is shown the verifications that loads may wait for.
        report: takes what has ended, in some thread.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: IoPool,
        arena: Callable[[], Arena],
        loads: LoadTracker,
        report: Callable[[Ended], None],
    ) -> None:
        self._num_layers = len(layout.layers)
        self._pool = pool
        self._arena = arena
        self._loads = loads
        self._report = report
        self._hasher = BlockHasher(layout)
        self._copier = RowCopier(layout, self._memory)
        self._hashes = HashQueue(pool, self._hash)
        self._patient: dict[int, VerifySlot] = {}  # not begun; a load that comes to wait hurries it

    def begin(self, action: SlotAction) -> None:
        """Begin an operation; returns at once.

        A slot is verified at once if that is urgent, else behind everything else, like compactions.
        """
        match action:
            case HashSlot():
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
        """Verify at once what of these is not begun: a load waits for it now."""
        for op_id in op_ids:
            if op_id in self._patient:
                self._submit_patient(Priority.URGENT_VERIFY, op_id)

    def _memory(self, slot_id: int) -> memoryview:
        return self._arena().slots.slot(slot_id)

    def _submit_patient(self, priority: Priority, op_id: int) -> None:
        """Queue a verification that may be queued already: whichever job is first makes it."""

        def job(_staging: Staging) -> None:
            action = self._patient.pop(op_id, None)
            if action is not None:
                self._verify(action)

        self._pool.submit(priority, 0, job)

    # ------------------------------------------------------------------------- in other threads

    def _hash(self, actions: Sequence[HashSlot]) -> None:
        hashed = [(action.op_id, self._checksums(action)) for action in actions]

        def complete(engine: "CacheEngine") -> None:
            for op_id, checksums in hashed:
                engine.hashes.hash_done(op_id, checksums)

        self._report(Ended(complete, num_ops=len(hashed)))

    def _checksums(self, action: HashSlot) -> bytes:
        def work() -> bytes:
            return self._hasher.checksums(self._memory(action.slot_id), action.num_tokens)

        return attempt("hash_failed_unexpectedly", work, b"", slot_id=action.slot_id)

    def _verify(self, action: VerifySlot) -> None:
        def work() -> IoOutcome:
            memory = self._memory(action.slot_id)
            is_good = self._hasher.matches(memory, action.num_tokens, action.checksums)
            return IoOutcome.OK if is_good else IoOutcome.CORRUPT

        event, failed = "verify_failed_unexpectedly", IoOutcome.TRANSIENT
        outcome = attempt(event, work, failed, slot_id=action.slot_id)
        if outcome is IoOutcome.OK:
            self._loads.advanced(action.op_id, self._num_layers)
        self._report(verified(action.op_id, outcome))

    def _compact(self, action: CompactTokens) -> None:
        op_id = action.op_id

        def work() -> tuple[IoOutcome, list[bytes]]:
            made = self._copier.compact(action)
            return (IoOutcome.CORRUPT, []) if made is None else (IoOutcome.OK, made)

        failed: tuple[IoOutcome, list[bytes]] = (IoOutcome.TRANSIENT, [])
        num_blocks = len(action.blocks)
        outcome, sums = attempt("compact_failed_unexpectedly", work, failed, blocks=num_blocks)
        self._report(Ended(lambda engine: engine.compactions.copy_done(op_id, outcome, sums)))

    def _wipe(self, action: WipeSlots) -> None:
        def work() -> IoOutcome:
            for slot_id in action.slot_ids:
                np.frombuffer(self._memory(slot_id), np.uint8).fill(0)  # gives the interpreter up
                self._arena().journal.wipe(slot_id)
            return IoOutcome.OK

        event, failed = "wipe_failed_unexpectedly", IoOutcome.TRANSIENT
        outcome = attempt(event, work, failed, slots=len(action.slot_ids))
        self._report(Ended(lambda engine: engine.erasing.wipe_done(action.op_id, outcome)))
