"""A performer over a real arena, real files and the real index.

In the engine's place there is a list of reported completions.
"""

import asyncio
import os
import threading

from kvd.core.records.actions import WriteBlock
from kvd.core.records.entries import StoredBlock
from kvd.core.records.extent_shape import ExtentShape
from kvd.host.process_identity import ProcessIdentity
from kvd.runtime.performer import LeaseHolders, Performer
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from kvd.tiers.faults import NoFaults
from kvd.tiers.io_threads import IoPool
from kvd.tiers.manifest import LayoutRow, Manifest
from kvd.tiers.segment_files import SegmentFiles
from kvd.tiers.slot_rows import BlockHasher
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume import SegmentVolume
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.session_key import SessionKey

# Slices of 512 KiB: a layered read has four groups.
LAYOUT = KVLayout(
    "ab" * 16, tuple(Layer((Component("k", (8192,), "float32"),)) for _ in range(8)), 16
)
NUM_SLOTS = 6
ENGINE_ID, LEASE = 3, 77
IDENTITY = ProcessIdentity(os.getpid(), 123, b"i" * 16)
KEY = SessionKey("tenant", LAYOUT.model, "a")
DEADLINE_S = 30


class Engine:
    """Records the completions, in order."""

    def __init__(self):
        self.done = []
        self.arrivals = self.hashes = self.writes = self.compactions = self.erasing = self

    def __getattr__(self, name):
        return lambda op_id, *rest: self.done.append((name, op_id, *rest))


class Breaking(NoFaults):
    """Raises errors that a test sets, at reads or writes, or delays them."""

    def __init__(self):
        self.read_error = self.write_error = None
        self.hold = threading.Event()
        self.hold.set()

    def before_read(self, extent):
        assert self.hold.wait(DEADLINE_S)
        if self.read_error:
            raise self.read_error

    def before_write(self, extent):
        assert self.hold.wait(DEADLINE_S)
        if self.write_error:
            raise self.write_error


class World:
    """One layout's performer and everything it works on."""

    def __init__(self, directory):
        self.faults = Breaking()
        self.engine = Engine()
        self.num_wakes = self.num_completions = 0
        budget, extent_bytes = SpaceBudget(None, 0, directory), ExtentShape(LAYOUT).full_bytes
        files = SegmentFiles(directory / "v", extent_bytes, 4, budget, "auto", self.faults)
        self.volume = SegmentVolume(LAYOUT, files)
        self.segment = directory / "v" / "00000.segment"
        self.manifest = Manifest(directory / "manifest.db", directory / "volumes", self.faults)
        self.pool = IoPool(3, 64 << 20)
        self.arena = ArenaStore(ArenaOptions(), directory, num_words=4).create(LAYOUT, NUM_SLOTS)
        lease_holders = LeaseHolders(lambda _engine_id: IDENTITY, lambda _engine_id: self._wake)
        self.performer = Performer(LAYOUT, self.volume, self.manifest, self.pool, lease_holders)
        self.changed = asyncio.Event()

    def start(self, loop=None):
        self.volume.files.open()
        self.manifest.open()
        row = LayoutRow(LAYOUT.fingerprint, b"message", 4)
        self.manifest.put_layout(row)
        self.pool.start()
        self.performer.use_arena(self.arena)
        self.performer.start(loop or asyncio.get_running_loop(), self._complete)

    def fill(self, slot_id, num_tokens=16):
        """Put a random block into a slot; return its stored description."""
        slot = self.arena.slots.slot(slot_id)
        slot[:] = os.urandom(len(slot))
        checksums = BlockHasher(LAYOUT).checksums(slot, num_tokens)
        return StoredBlock(os.urandom(4 * num_tokens), checksums)

    def write_action(self, op_id, slot_id, extent, num_tokens=16):
        stored = self.fill(slot_id, num_tokens)
        extent *= self.volume.shape.sectors_per_extent
        key = bytes([slot_id]) * 16
        return WriteBlock(op_id, key, slot_id, extent, num_tokens, *_fields(stored), "t"), stored

    async def until_idle(self):
        """Wait for the answers, and return them."""
        async with asyncio.timeout(DEADLINE_S):
            # Counters, not an event: the wait has the same condition as a drain.
            while self.performer.num_pending or self.performer.num_uncommitted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        done, self.engine.done = self.engine.done, []
        return done

    async def close(self):
        self.faults.hold.set()
        await asyncio.to_thread(self.pool.close)
        await self.performer.close()
        self.manifest.close()
        self.volume.files.close()
        self.arena.close()

    def _complete(self, completion):
        self.num_completions += 1
        completion(self.engine)

    def _wake(self):
        self.num_wakes += 1


def _fields(stored):
    return stored.token_ids, stored.checksums
