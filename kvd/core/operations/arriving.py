"""Arrivals: complete the reads and verifications that loads wait for.

Pure. When a block has arrived, the leases that wait for it may use it. When it cannot arrive, they
are cut before it. When a copy in DRAM is corrupt, the block is read again from SSD, if it is there,
for the same leases.
"""

from collections.abc import Callable

from kvd.core.io.reading import Reader
from kvd.core.io.verifying import CORRUPT, Verifier, report_corrupt
from kvd.core.io.writing import Writer
from kvd.core.operations.loading import READ_ERROR, Loader
from kvd.core.records.actions import READ_FAILED, IoOutcome, LeaseReady
from kvd.core.records.entries import StoredBlock
from kvd.core.records.tier import Tier
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LoadLease
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import Arrival


class Arrivals:
    """Takes the completions of reads and verifications of one cache state.

    Args:
        state: the cache's tables.
        loader: cuts or ends the leases whose blocks do not arrive.
        reader: reads a block again whose copy in DRAM is corrupt.
        writer: queues verified blocks for writing again, if they were queued before.
        verifier: begins the next verifications.
        on_scrub_outcome: called with the operation and outcome of a scrub's verification.
    """

    def __init__(
        self,
        state: CacheState,
        loader: Loader,
        reader: Reader,
        writer: Writer,
        verifier: Verifier,
        on_scrub_outcome: Callable[[int, IoOutcome], None],
    ) -> None:
        self._state = state
        self._loader = loader
        self._reader = reader
        self._writer = writer
        self._verifier = verifier
        self._on_scrub_outcome = on_scrub_outcome

    def read_done(self, op_id: int, outcome: IoOutcome, stored: StoredBlock | None) -> None:
        """Take the outcome of a ReadBlock, and the extent's header if it is OK."""
        arrival = self._reader.finish(op_id, outcome)
        if outcome is IoOutcome.OK and stored is not None:
            self._finish_read(arrival, stored)
        else:
            self._fail_read(arrival, outcome)

    def _finish_read(self, arrival: Arrival, stored: StoredBlock) -> None:
        """Record that a block has arrived in its slot, and let the waiting leases use it."""
        state, block = self._state, arrival.block
        state.record_block_move(block, MoveKind.READ_AHEAD if block.is_ahead else MoveKind.READ)
        assert block.slot_id is not None, "a block keeps its slot while it is read"
        state.slots.commit(block.slot_id)
        state.blocks.set_contents(block, stored.token_ids, stored.checksums)
        state.journal.put_block(block)
        self._admit_waiting(arrival)

    def _fail_read(self, arrival: Arrival, outcome: IoOutcome) -> None:
        """Take a block out of DRAM whose read has failed; a corrupt one is lost."""
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
            self._on_scrub_outcome(op_id, outcome)
            return
        arrival = self._verifier.finish(op_id)
        block = arrival.block
        if outcome is IoOutcome.OK:
            self._verifier.record_success(block)
            self._admit_waiting(arrival)
        elif outcome is IoOutcome.CORRUPT:
            report_corrupt(state, block, Tier.DRAM)
            for lease in arrival.early.values():
                if state.leases.get(lease.lease_id) is lease:
                    self._loader.release(lease)
            self._read_again(arrival)
        else:
            self._verifier.record_failure(block)
            self._cut_waiting(arrival, READ_ERROR)
            state.settle(block)
        self._writer.admit(block, was_queued=arrival.was_queued)
        self._verifier.issue()

    def _admit_waiting(self, arrival: Arrival) -> None:
        """Let the waiting leases use a block, whose bytes are good."""
        for lease in arrival.waiting.values():
            self._count_arrival(lease)
        self._state.outbox.on_space_freed()
        self._state.settle(arrival.block)

    def _read_again(self, arrival: Arrival) -> None:
        """Read a block again from SSD, as its copy in DRAM is corrupt; if it is not there, lose it.

        Without waiting leases the corrupt copy is only dropped.
        """
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
        """Cut the leases that wait for a block that cannot arrive."""
        for lease in arrival.waiting.values():
            first = next(i for i, (block, _) in enumerate(lease.entries) if block is arrival.block)
            self._loader.cut(lease, first, failure)
            self._count_arrival(lease)

    def _count_arrival(self, lease: LoadLease) -> None:
        """Count one arrival less to wait for; after the last one the lease may be settled."""
        lease.num_waiting -= 1
        if not lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))
