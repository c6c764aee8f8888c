"""SSD reads: issue them, for loads that wait or ahead of loads, and measure their rate.

Pure. arriving.py handles the outcomes of reads. Invariant: `ahead_bytes` is the size of the reads
under way that no load waits for.
"""

from kvd.core.records.actions import IoOutcome, ReadBlock
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.under_way import Arrival
from shared.types.units import MIB, NS_PER_S, SECTOR_BYTES

RETRY_NS = NS_PER_S  # after an I/O error nothing is read ahead for so long
MEASURED_BYTES = 256 * MIB  # the rate is that of about so many bytes, read last


class ReadRate:
    """The rate of SSD reads, over the time in which any is under way."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._since_ns = 0
        self._num_bytes = 0.0
        self._busy_ns = 0.0

    def on_begin(self, now_ns: int) -> None:
        """Record the begin of a read."""
        self._advance(now_ns)
        self._num_under_way += 1

    def on_end(self, num_bytes: int, now_ns: int) -> None:
        """Record the end of a read."""
        self._advance(now_ns)
        self._num_under_way -= 1
        self._num_bytes += num_bytes
        if self._num_bytes > MEASURED_BYTES:  # halve the weight of older reads
            self._num_bytes /= 2
            self._busy_ns /= 2

    def estimate_ns(self, num_bytes: int) -> int:
        """Return the estimated nanoseconds of reading so many bytes; 0: nothing was read yet."""
        return int(num_bytes * self._busy_ns / self._num_bytes) if self._num_bytes else 0

    def _advance(self, now_ns: int) -> None:
        if self._num_under_way:
            self._busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns


class Reader:
    """Begins and ends reads of one cache state.

    Attributes:
        rate: the rate of all reads.
        ahead_bytes: bytes of reads under way that no load waits for.
        retry_at_ns: time from which reading ahead is allowed, after an I/O error.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.rate = ReadRate()
        self.ahead_bytes = 0
        self.retry_at_ns = 0

    def num_bytes(self, block: Block) -> int:
        """Return the bytes that are read from SSD for a block, whole sectors."""
        return self._state.shape.num_sectors(block.num_tokens) * SECTOR_BYTES

    def start(self, block: Block) -> Arrival:
        """Give a block on SSD a free slot and begin its read; the caller owes `issue`."""
        slot_id, generation = self._state.slots.allocate()
        self._state.blocks.enter_dram(block, slot_id, generation)
        return self.begin(block)

    def begin(self, block: Block) -> Arrival:
        """Begin to read a block into the slot that it has; the caller owes `issue`."""
        state = self._state
        read = state.under_way.begin_read(block)
        self.rate.on_begin(state.now_ns)
        return read

    def issue(self, reads: list[Arrival]) -> None:
        """Issue the reads of a load, layer by layer if they are large."""
        num_bytes = sum(self.num_bytes(read.block) for read in reads)
        is_layered = num_bytes > self._state.limits.layered_read_bytes
        for read in reads:
            self._state.outbox.add(_action(read, is_layered=is_layered))

    def read_ahead(self, block: Block) -> None:
        """Read a block into a free slot though no load waits for it yet."""
        read = self.start(block)
        read.is_ahead = True
        self.ahead_bytes += self.num_bytes(block)
        outbox = self._state.outbox
        outbox.count("prefetch_blocks")
        outbox.count("prefetch_tokens", block.num_tokens)
        outbox.add(_action(read, is_layered=False))

    def join(self, read: Arrival) -> None:
        """Record that a load waits for a read, which may have been begun ahead."""
        if read.is_ahead:
            self._clear_ahead(read)
            self._state.outbox.count("prefetch_late")

    def finish(self, op_id: int, outcome: IoOutcome) -> Arrival:
        """Record the end of a read; returns it, with the leases that wait for it."""
        state = self._state
        read = state.under_way.end_read(op_id)
        num_bytes = self.num_bytes(read.block)
        self.rate.on_end(num_bytes, state.now_ns)
        state.outbox.count("ssd_read_bytes", num_bytes)
        if outcome is not IoOutcome.OK and outcome is not IoOutcome.CORRUPT:
            self.retry_at_ns = state.now_ns + RETRY_NS
        if read.is_ahead:
            self._clear_ahead(read)
            read.block.is_ahead = outcome is IoOutcome.OK
        return read

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        ahead = [read for read in self._state.under_way.reads.values() if read.is_ahead]
        assert self.ahead_bytes == sum(self.num_bytes(read.block) for read in ahead), (
            "bytes read ahead are counted right"
        )
        assert not any(read.waiting for read in ahead), "no load waits for what is read ahead"

    def _clear_ahead(self, read: Arrival) -> None:
        read.is_ahead = False
        self.ahead_bytes -= self.num_bytes(read.block)


def _action(read: Arrival, *, is_layered: bool) -> ReadBlock:
    """Return the action that reads a block."""
    block = read.block
    assert block.extent is not None, "what is read is on SSD"
    assert block.slot_id is not None, "what is read has a slot"
    return ReadBlock(
        read.op_id,
        block.key,
        block.extent,
        block.slot_id,
        block.num_tokens,
        layered=is_layered,
        ahead=read.is_ahead,
    )
