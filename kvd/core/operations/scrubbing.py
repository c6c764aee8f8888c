"""Scrubs: verify every copy of every block against its checksums, at the pace of the caller.

Pure. The caller asks for a few operations at a time (`step`); their outcomes are counted in a
ScrubReport. A scrub holds no blocks: loads, evictions and writes continue, and an outcome counts
only if its copy is still where it was when the operation was issued (`CacheState.scrubbed`).

A corrupt copy in DRAM is dropped; the block is read again from SSD, or is lost. A corrupt copy on
SSD is counted. With `repair` it is written again from a good copy in DRAM, which is verified first,
or the block is lost. A copy that cannot be checked because of an I/O error counts as an error, not
as corrupt.

Invariant: one scrub at a time; each block that exists from its beginning to its end is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvd.core.io.verifying import CORRUPT, report_corrupt
from kvd.core.io.writing import Writer
from kvd.core.operations.loading import Loader
from kvd.core.records.actions import SCRUBBED, IoOutcome, VerifyExtent, VerifySlot
from kvd.core.records.entries import BlockRecord, unpack_places
from kvd.core.records.errors import ScrubError
from kvd.core.records.records import ScrubReport, ScrubStep
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from shared.types.session_key import SessionKey
from shared.types.units import SECTOR_BYTES


class _Check(Enum):
    """Which copy an operation verifies, and why."""

    DRAM = "dram"
    SSD = "ssd"
    REPAIR = "repair"  # the copy in DRAM, before the corrupt one on SSD is replaced from it


@dataclass(frozen=True, slots=True)
class _Op:
    """A verification of one copy of a block.

    Attributes:
        check: which copy, and why.
        key: the block's key.
        place: its slot or extent.
        num_tokens: tokens of the block.
        num_bytes: bytes that are read.
    """

    check: _Check
    key: bytes
    place: int
    num_tokens: int
    num_bytes: int

    @property
    def tier(self) -> Tier:
        """The tier of the copy that is checked."""
        return Tier.SSD if self.check is _Check.SSD else Tier.DRAM


class Scrubber:
    """Scrubs one cache state."""

    def __init__(self, state: CacheState, loader: Loader, writer: Writer) -> None:
        self._state = state
        self._loader = loader
        self._writer = writer
        self._ops: dict[int, _Op] = {}
        self._last_id = 0
        self._walk: Iterator[_Op] = iter(())
        self._is_under_way = False
        self._has_walked = False
        self._may_repair = False
        self._counts = dict.fromkeys(ScrubReport.__slots__, 0)
        self._in_flight_bytes = 0

    def begin(self, *, repair: bool) -> int:
        """Begin a scrub of all copies and return its id; nothing happens before `step`.

        The caller owes steps until one is `done`, or `end`.

        Args:
            repair: replace corrupt copies on SSD by good ones from DRAM.

        Raises:
            ScrubError: a scrub is under way already.
        """
        if self._is_under_way:
            raise ScrubError("a verification is already running", "wait until it has ended")
        self._last_id += 1
        self._walk = self._all_checks()
        self._is_under_way, self._has_walked = True, False
        self._may_repair = repair
        self._counts = dict.fromkeys(ScrubReport.__slots__, 0)
        return self._last_id

    def step(self, scrub_id: int, max_bytes: int) -> ScrubStep:
        """Issue checks until `max_bytes` are under way, and return the report so far.

        Raises:
            ScrubError: the scrub is over.
        """
        if not self._is_current(scrub_id):
            raise ScrubError(f"verification {scrub_id} has ended", "start another one")
        issued_bytes = 0
        while not self._has_walked and self._in_flight_bytes < max_bytes:
            op = next(self._walk, None)
            if op is None:
                self._has_walked = True
            else:
                self._issue(op)
                issued_bytes += op.num_bytes
        is_done = self._has_walked and not self._ops
        if is_done:
            self.end(scrub_id)
        return ScrubStep(is_done, issued_bytes, ScrubReport(**self._counts))

    def end(self, scrub_id: int) -> None:
        """End a scrub; no effect if it is over already."""
        if not self._is_current(scrub_id):
            return
        self._is_under_way = False
        self._walk = iter(())
        self._state.scrubbed.clear()  # outcomes of checks under way no longer count
        self._state.outbox.emit(SCRUBBED, None, self._counts)

    def _is_current(self, scrub_id: int) -> bool:
        return self._is_under_way and scrub_id == self._last_id

    def check_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a check."""
        op = self._ops.pop(op_id)
        self._in_flight_bytes -= op.num_bytes
        is_there = self._state.scrubbed.get((op.tier, op.place)) == op_id
        if not is_there:
            return  # evicted or dropped meanwhile: the bytes read may be another block's
        del self._state.scrubbed[op.tier, op.place]
        if outcome not in (IoOutcome.OK, IoOutcome.CORRUPT):
            self._count("errors")
            return
        if op.check is not _Check.REPAIR:
            self._count(f"{op.tier.value}_blocks")
            self._count(f"{op.tier.value}_bytes", op.num_bytes)
        if outcome is IoOutcome.OK and op.check is not _Check.REPAIR:
            return
        block = self._find(op.key)
        if outcome is IoOutcome.OK:
            self._write_again(block)
        else:
            self._handle_corrupt(op, block)

    # ---------------------------------------------------------------------------------------- walk

    def _all_checks(self) -> Iterator[_Op]:
        """Yield a check for every copy, lazily: each block's copies as they are when it is reached.

        First the blocks of the index, then those of packed sessions.
        """
        state = self._state
        keys = [block.key for block in state.blocks]
        session_keys = list(state.sessions)
        seen = set()
        for key in keys:
            block = state.blocks.get(key)
            if block is not None:  # else it was dropped or packed meanwhile
                seen.add(key)
                yield from self._block_checks(block)
        for session_key in session_keys:
            yield from self._session_checks(session_key, seen)

    def _session_checks(self, session_key: SessionKey, seen: set[bytes]) -> Iterator[_Op]:
        """Yield checks of a session's unseen blocks; it may be packed or unpacked in between."""
        state = self._state
        session = state.sessions.get(session_key)
        if session is None:
            return
        packed = session.packed
        records = {record.key: record for record in unpack_places(packed)}
        for key in [*session.block_keys(), *records]:
            if session.packed is not packed:
                packed = session.packed
                records = {record.key: record for record in unpack_places(packed)}
            block = state.blocks.get(key)
            if block is None and key in records:
                yield self._extent_check(records[key])
            elif block is not None and key not in seen:
                yield from self._block_checks(block)

    def _find(self, key: bytes) -> Block:
        """Return an existing block; if it is packed, search and unpack its session: O(sessions).

        That is acceptable because it is called only for corrupt copies.
        """
        block = self._state.find_block(key)
        if block is None:
            sessions = self._state.sessions.values()
            self._state.tails.unpack(next(session for session in sessions if key in session.packed))
            block = self._state.blocks[key]
        return block

    def _block_checks(self, block: Block) -> Iterator[_Op]:
        """Yield checks of one block's copies.

        A copy in DRAM that is not hashed yet cannot be checked; one that is arriving is verified
        anyway.
        """
        if block.slot_id is not None and block.checksums and not block.io.is_arriving:
            yield self._slot_check(_Check.DRAM, block)
        if block.extent is not None:
            yield self._extent_check(BlockRecord(block.key, block.extent, block.num_tokens))

    def _extent_check(self, record: BlockRecord) -> _Op:
        num_bytes = self._state.shape.num_sectors(record.num_tokens) * SECTOR_BYTES
        return _Op(_Check.SSD, record.key, record.extent, record.num_tokens, num_bytes)

    def _slot_check(self, check: _Check, block: Block) -> _Op:
        assert block.slot_id is not None, "only a block in DRAM has a slot to check"
        num_bytes = self._state.layout.block_bytes
        return _Op(check, block.key, block.slot_id, block.num_tokens, num_bytes)

    # --------------------------------------------------------------------------------------- checks

    def _issue(self, op: _Op) -> None:
        """Issue the verification of one copy."""
        state = self._state
        op_id = state.under_way.next_op_id()
        self._ops[op_id] = op
        state.scrubbed[op.tier, op.place] = op_id
        self._in_flight_bytes += op.num_bytes
        if op.check is _Check.SSD:
            state.outbox.add(VerifyExtent(op_id, op.key, op.place, op.num_tokens))
        else:
            checksums = state.blocks[op.key].checksums
            verify = VerifySlot(op_id, op.place, op.num_tokens, checksums, urgent=False)
            state.outbox.add(verify)

    def _handle_corrupt(self, op: _Op, block: Block) -> None:
        """Count and report a corrupt copy, drop it, and repair it or lose its block."""
        if op.tier is Tier.DRAM and (block.io.is_arriving or block.io is BlockIo.COPYING):
            return  # another operation verifies the slot right now, and acts on its outcome
        report_corrupt(self._state, block, op.tier)
        self._count(f"{op.tier.value}_corrupt")
        if op.tier is Tier.DRAM:
            self._drop_slot(block)
            if op.check is _Check.REPAIR:
                self._lose(block)
        elif self._may_repair and block.slot_id is None:
            self._lose(block)
        elif self._may_repair and not block.io.is_arriving:
            self._issue(self._slot_check(_Check.REPAIR, block))

    def _drop_slot(self, block: Block) -> None:
        """Drop a corrupt copy from DRAM, and end the leases of engines that load it."""
        state = self._state
        self._loader.revoke(block)
        if not state.blocks.holds(block):
            return  # only the ended leases had kept it
        if block.extent is None:
            self._lose(block)
        else:
            state.leave_dram(block)
            state.settle(block)

    def _lose(self, block: Block) -> None:
        if self._state.blocks.holds(block):
            self._count("lost")
            self._state.lose(block, CORRUPT)

    def _write_again(self, block: Block) -> None:
        """Free the extent of a block whose copy in DRAM is good, and write it to another."""
        if block.extent is not None:
            self._count("repaired")
            self._state.leave_ssd(block)
            self._writer.rewrite(block)

    def _count(self, name: str, increment: int = 1) -> None:
        self._counts[name] += increment
