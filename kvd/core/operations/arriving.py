"""Arrivals: the ends of reads and verifications, which loads wait for, and what follows.

Pure. A block that has arrived is its leases'; one that does not come cuts them before it. A copy
in DRAM that turns out corrupt is read again from SSD, if it is there, under the same leases.
"""

from collections.abc import Callable

from kvd.core.io.reading import Reader
from kvd.core.io.verifying import CORRUPT, Verifier, report_corrupt
from kvd.core.io.writing import Writer
from kvd.core.operations.loading import READ_ERROR, Loader
from kvd.core.records.actions import READ_FAILED, IoOutcome, LeaseReady
from kvd.core.records.entries import StoredBlock
from kvd.core.records.records import Tier
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LoadLease
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import Arrival


class Arrivals:
    """Takes the completions of reads and verifications of one cache state.

    Args:
        state: the cache's tables.
        loader: cuts or ends the leases that waited in vain.
        reader: reads a block whose copy in DRAM is corrupt.
        writer: writes verified blocks that were to be written, and what room was made for.
        verifier: begins the next verifications.
        scrubbed: called with the outcome of a scrub's verification.
    """

    def __init__(
        self,
        state: CacheState,
        loader: Loader,
        reader: Reader,
        writer: Writer,
        verifier: Verifier,
        scrubbed: Callable[[int, IoOutcome], None],
    ) -> None:
        self._state = state
        self._loader = loader
        self._reader = reader
        self._writer = writer
        self._verifier = verifier
        self._scrubbed = scrubbed

    def read_done(self, op_id: int, outcome: IoOutcome, stored: StoredBlock | None) -> None:
        """Take the outcome of a ReadBlock, and what the extent's header says if it is OK."""
        arrival = self._reader.ended(op_id, outcome)
        if outcome is IoOutcome.OK and stored is not None:
            self._was_read(arrival, stored)
        else:
            self._was_not_read(arrival, outcome)

    def _was_read(self, arrival: Arrival, stored: StoredBlock) -> None:
        state, block = self._state, arrival.block
        state.record_block_move(block, MoveKind.READ_AHEAD if block.is_ahead else MoveKind.READ)
        assert block.slot_id is not None, "a block keeps its slot while it is read"
        state.slots.commit(block.slot_id)
        state.blocks.set_contents(block, stored.token_ids, stored.checksums)
        state.journal.put_block(block)
        self._arrived(arrival)

    def _was_not_read(self, arrival: Arrival, outcome: IoOutcome) -> None:
        state, block = self._state, arrival.block
        state.leave_dram(block)
        is_corrupt = outcome is IoOutcome.CORRUPT
        self._cut_waiting(arrival, CORRUPT if is_corrupt else READ_ERROR)
        if is_corrupt:
            report_corrupt(state, block, Tier.SSD)
            state.lose(block, CORRUPT)
        else:
            state.outbox.count("read_errors")
            state.outbox.emit(READ_FAILED, block.last_user, {"block": block.key.hex()})
            state.settle(block)

    def verify_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a VerifySlot or VerifyExtent."""
        state = self._state
        if op_id not in state.under_way.verifies:
            self._scrubbed(op_id, outcome)
            return
        arrival = self._verifier.ended(op_id)
        block = arrival.block
        if outcome is IoOutcome.OK:
            self._verifier.passed(block)
            self._arrived(arrival)
        elif outcome is IoOutcome.CORRUPT:
            report_corrupt(state, block, Tier.DRAM)
            for lease in arrival.early.values():
                if state.leases.get(lease.lease_id) is lease:
                    self._loader.release(lease)
            self._fall_back(arrival)
        else:
            self._verifier.failed(block)
            self._cut_waiting(arrival, READ_ERROR)
            state.settle(block)
        self._writer.admit(block, was_queued=arrival.was_queued)
        self._verifier.issue()

    def _arrived(self, arrival: Arrival) -> None:
        """Let the leases that wait use a block, whose bytes are good."""
        for lease in arrival.waiting.values():
            self._count_arrival(lease)
        self._state.outbox.on_space_freed()
        self._state.settle(arrival.block)

    def _fall_back(self, arrival: Arrival) -> None:
        """Read a block from SSD whose copy in DRAM is corrupt; without one it is lost."""
        state, block = self._state, arrival.block
        if block.extent is None:
            self._cut_waiting(arrival, CORRUPT)
            state.lose(block, CORRUPT)
        elif not arrival.waiting:
            state.leave_dram(block)
            state.settle(block)
        else:
            assert block.slot_id is not None, "a block keeps its slot while it is verified"
            state.clear_slot(block.slot_id)
            state.slots.rewrite(block.slot_id)
            state.blocks.set_unverified(block, is_unverified=False)
            state.blocks.set_contents(block, b"", b"")
            read = self._reader.begin(block)
            read.waiting = arrival.waiting
            self._reader.issue([read])
            for lease in read.waiting.values():
                self._loader.track(lease)

    def _cut_waiting(self, arrival: Arrival, failure: str) -> None:
        """Cut the leases that wait for a block that does not come."""
        for lease in arrival.waiting.values():
            first = next(i for i, (block, _) in enumerate(lease.entries) if block is arrival.block)
            self._loader.cut(lease, first, failure)
            self._count_arrival(lease)

    def _count_arrival(self, lease: LoadLease) -> None:
        lease.num_waiting -= 1
        if not lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))
