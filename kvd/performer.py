"""Runs the cache engine's actions on bounded threads and brings the completions back to the loop.

    ReadBlock              read pool, shared by all layouts
    WriteBlock             this layout's writer thread: one sync for all that waits
    Put…, Drop…            the manifest's writer thread, in order

Every action with an op_id is answered exactly once, on the event loop, whatever happens in the
thread. What may be under way is bounded by the engine: a read or write holds a slot, a drop an
extent.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeAlias

from kvd.core.actions import (
    DropBlock,
    DropSession,
    IoOutcome,
    PutBlock,
    PutSession,
    ReadBlock,
    WriteBlock,
)
from kvd.core.engine import CacheEngine
from kvd.tiers.batch_worker import BatchWorker
from kvd.tiers.manifest import Manifest
from kvd.tiers.ssd import SegmentVolume, Written
from shared.arena_map import ArenaMap
from shared.log import get_logger

MAX_WRITE_BATCH = 64  # blocks in one sync: enough to share its cost, few enough to report soon

Performable: TypeAlias = ReadBlock | WriteBlock | PutBlock | PutSession | DropSession | DropBlock
Completion: TypeAlias = Callable[[CacheEngine, int], None]  # called with the engine and now_ns

log = get_logger(__name__)


class Performer:
    """Performs the actions of one layout's engine."""

    def __init__(
        self,
        layout: str,
        slots: ArenaMap,
        volume: SegmentVolume,
        manifest: Manifest,
        read_pool: Executor,
    ) -> None:
        self._layout = layout
        self._slots = slots
        self._volume = volume
        self._manifest = manifest
        self._read_pool = read_pool
        self._writer: BatchWorker[WriteBlock] = BatchWorker(
            f"kvd-write-{layout[:6]}", self._write, MAX_WRITE_BATCH
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._complete: Callable[[Completion], None] | None = None
        self.num_pending = 0  # operations that will still be answered
        self.num_uncommitted = 0  # blocks on SSD that a restart would not find yet

    def start(
        self, loop: asyncio.AbstractEventLoop, complete: Callable[[Completion], None]
    ) -> None:
        """Open for actions; `complete` is called on the loop for each that is done."""
        self._loop = loop
        self._complete = complete
        self._writer.start()

    def perform(self, action: Performable) -> None:
        """Start one action; returns at once."""
        match action:
            case ReadBlock():
                self.num_pending += 1
                self._read_pool.submit(self._read, action)
            case WriteBlock():
                self.num_pending += 1
                self._writer.put(action)
            case PutBlock(block):
                self.num_uncommitted += 1
                self._manifest.put_block(self._layout, block, self._block_committed)
            case PutSession(session):
                self._manifest.put_session(self._layout, session)
            case DropSession(key):
                self._manifest.drop_session(self._layout, key)
            case DropBlock(op_id, key):
                self.num_pending += 1
                dropped = _drop_completion(op_id)
                self._manifest.drop_block(self._layout, key, lambda: self._report(dropped))

    def close(self) -> None:
        """Drop the writes that have not begun and wait for those that have; blocks."""
        self._writer.close(discard=True)

    # ------------------------------------------------------------------------- in other threads

    def _read(self, action: ReadBlock) -> None:
        try:
            memory = self._slots.slot(action.slot_id)
            outcome = self._volume.read(action.extent, memory, action.checksums)
        except Exception:
            # The edge: an op without an answer would hold its slot for ever.
            log.exception("read_failed_unexpectedly", extent=action.extent)
            outcome = IoOutcome.TRANSIENT
        self._report(lambda engine, now_ns: engine.read_done(action.op_id, outcome, now_ns))

    def _write(self, batch: list[WriteBlock]) -> None:
        try:
            pairs = [(action.extent, self._slots.slot(action.slot_id)) for action in batch]
            written = self._volume.write(pairs)
        except Exception:
            # The edge, as above.
            log.exception("write_failed_unexpectedly", blocks=len(batch))
            written = [Written(IoOutcome.TRANSIENT)] * len(batch)
        for action, result in zip(batch, written, strict=True):
            self._report(_write_completion(action.op_id, result))

    def _block_committed(self) -> None:
        assert self._loop is not None, "the performer is started before it performs"  # noqa: S101
        self._loop.call_soon_threadsafe(self._count_committed)

    def _report(self, completion: Completion) -> None:
        assert self._loop is not None, "the performer is started before it performs"  # noqa: S101
        self._loop.call_soon_threadsafe(self._on_loop, completion)

    # ------------------------------------------------------------------------------ on the loop

    def _count_committed(self) -> None:
        self.num_uncommitted -= 1

    def _on_loop(self, completion: Completion) -> None:
        assert self._complete is not None, "the performer is started"  # noqa: S101
        self.num_pending -= 1
        self._complete(completion)


def _write_completion(op_id: int, written: Written) -> Completion:
    def complete(engine: CacheEngine, now_ns: int) -> None:
        engine.write_done(op_id, written.outcome, written.checksums, now_ns)

    return complete


def _drop_completion(op_id: int) -> Completion:
    def complete(engine: CacheEngine, now_ns: int) -> None:
        engine.drop_done(op_id, now_ns)

    return complete
