"""Power may fail at any moment: sessions reported as durable survive, no row names lost bytes.

A real cache runs over real files in this process. Its segments are synced through an argument
(`Faults`) that remembers what each sync made durable: contents by file, names by directory. At
every sync and write point the test takes an image of what a power cut would leave: of segments only
    the synced bytes, of the index everything that SQLite has written, which is the worst
    combination. (SQLite makes a commit durable; test_manifest.py checks that it is asked to.) Each
image is then recovered by the real code.
"""

import asyncio
import os
import random
import threading
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvd.caches.caches import Caches
from kvd.caches.layout_opening import VOLUMES
from kvd.caches.scrubber import Scrubber
from kvd.config import DramSettings, Settings, SsdSettings
from kvd.core.engine import CacheEngine
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.records import LeaseState
from kvd.engines.attached import Engines
from kvd.host.clock import resume_clock
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.index_database import MANIFEST_NAME
from kvd.tiers.manifest import Manifest
from kvd.tiers.volume_identity import ID_NAME
from shared.types.granted_slots import Lookup
from shared.types.units import ceil_div
from tests.synthetic_engine import encode, key_of, small_layout

LAYOUT = small_layout()
EXTENT = ExtentShape(LAYOUT).full_bytes
ENGINE_ID = 1
WAIT_S = 30.0
NUM_EXTENTS = 24  # fewer extents than stored blocks: extents of flushed sessions are used again
MOMENTS = {
    "segment_created",
    "segment_allocated",
    "extent_written",
    "segment_synced",
    "index_begun",
    "index_rows",
    "index_committed",
    "before a sync",
    "after a sync",
}


class Image(NamedTuple):
    """What a power cut at one moment would leave.

    Attributes:
        moment: its name.
        durable: the sessions that kvd had reported as durable.
        segments: durable files of volumes, by their paths in the state directory.
        index: the database's files by name.
    """

    moment: str
    durable: frozenset[str]
    segments: dict[str, bytes]
    index: dict[str, bytes]

    def write(self, directory: Path) -> None:
        """Write the image as a state directory."""
        for name, content in {**self.segments, **self.index}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Power(NoFaults):
    """Syncs for real, and keeps an image of every moment. Any thread may use it.

    Attributes:
        images: in order, each different from the one before.
        moments: of all images, with those that were equal to the one before.
        may_commit: while it is not set the index commits nothing.
        durable: see Image.
    """

    def __init__(self, directory: Path) -> None:
        self.images: list[Image] = []
        self.moments: set[str] = set()
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.durable: frozenset[str] = frozenset()
        self._directory = directory
        self._contents: dict[int, bytes] = {}  # inode → as of its last sync
        self._names: dict[int, dict[str, int]] = {}  # inode of a directory → names, inodes
        self._lock = threading.Lock()
        # Two syncs of a file, for a write and to let it grow, may run at once: the later note
        # must not be of the earlier read.
        self._syncing = threading.Lock()

    def reach(self, point: WritePoint) -> None:
        self.keep(point.value)
        if point is WritePoint.INDEX_BEGUN:
            assert self.may_commit.wait(WAIT_S)

    def fsync(self, fd: int) -> None:
        self._sync(fd, os.fsync)

    def fdatasync(self, fd: int) -> None:
        self._sync(fd, os.fdatasync)

    def learn(self) -> None:
        """Take what is on the disk as durable, and forget all images."""
        for path in (self._directory, *self._directory.rglob("*")):
            fd = os.open(path, os.O_RDONLY)
            self._sync(fd, os.fsync)
            os.close(fd)
        self.images.clear()

    def _sync(self, fd: int, sync) -> None:
        """Sync a file; later writes are not part of what is noted."""
        self.keep("before a sync")
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._syncing:
            if path.is_dir():
                with os.scandir(path) as entries:
                    synced = {entry.name: entry.inode() for entry in entries}
            else:
                synced = path.read_bytes()
            sync(fd)
            with self._lock:
                (self._names if path.is_dir() else self._contents)[os.fstat(fd).st_ino] = synced
        self.keep("after a sync")

    def keep(self, moment: str) -> None:
        """Take an image."""
        with self._lock:
            index = {
                path.name: path.read_bytes()
                for path in (self._directory / (MANIFEST_NAME + end) for end in ("", "-wal"))
                if path.exists()
            }
            segments = dict(self._segments(self._directory.stat().st_ino, ""))
            image = Image(moment, self.durable, segments, index)
            if not self.images or image[1:] != self.images[-1][1:]:
                self.images.append(image)
            self.moments.add(moment)

    def _segments(self, inode: int, path: str):
        for name, child in self._names.get(inode, {}).items():
            yield from self._segments(child, f"{path}{name}/")
            if name.endswith(".segment") or name == ID_NAME:
                yield path + name, self._contents.get(child, b"")


@asynccontextmanager
async def running_caches(directory: Path, faults: NoFaults, num_extents: int = NUM_EXTENTS):
    """Run a cache with its volume and index, without servers; it restores earlier sessions."""
    settings = Settings(
        runtime_dir=directory,
        state_dir=directory,
        dram=DramSettings(bytes=40 * LAYOUT.block_bytes, keep="none", prefault=False),
        ssd=SsdSettings(
            bytes=num_extents * EXTENT,
            reserve_bytes=0,
            segment_bytes=1 << 16,
        ),
    )
    manifest = Manifest(directory / MANIFEST_NAME, directory / VOLUMES, faults)
    manifest.open()
    broken: list[Exception] = []
    clock = resume_clock(None, "boot", 0)
    caches = Caches(settings, manifest, clock, Engines(4), faults, lambda _: None, broken.append)
    try:
        caches.restore()
        yield caches
    finally:
        await caches.close(keep_dram=False)
        manifest.close()
    assert not broken


def _tokens(name: str) -> list[int]:
    """Return one to three blocks of tokens; no two names share a prefix."""
    first = int(name) * 1000
    return list(range(first, first + 16 + int(name) * 7 % 30))


def _num_blocks(*names: str) -> int:
    return sum(ceil_div(len(_tokens(name)), LAYOUT.block_tokens) for name in names)


def _bytes_of(name: str, token: int) -> bytes:
    return random.Random(f"{name} {token}").randbytes(LAYOUT.block_bytes)  # noqa: S311  # test data


async def _store(cache, name: str) -> None:
    tokens = encode(_tokens(name))
    answer = cache.act(lambda core: core.stores.prepare(key_of(name), tokens, 0, ENGINE_ID))
    while answer.refused == "wait":  # of reads and writes that hold slots
        assert await cache.wait_for_change(WAIT_S)
        answer = cache.act(lambda core: core.stores.prepare(key_of(name), tokens, 0, ENGINE_ID))
    assert (answer.refused, answer.more) == ("", False)
    for block in answer.blocks:
        cache.arena.slots.slot(block.slot_id)[:] = _bytes_of(name, block.token_offset)
    cache.act(lambda core: core.stores.complete(answer.lease_id, ENGINE_ID, success=True))


async def _until_durable(cache) -> None:
    while cache.stats().dirty_bytes:
        await cache.wait_for_change(0.01)  # waiters are not notified of a commit


def _flush(name: str, core: CacheEngine) -> None:
    core.sessions.flush(key_of(name), dry_run=False)


async def _load(cache, name: str) -> None:
    """Load all of a session from SSD, and compare every byte of it."""
    tokens = _tokens(name)
    answer = cache.act(lambda core: core.loads.prepare(key_of(name), encode(tokens), 0, ENGINE_ID))
    assert answer.lookup is not Lookup.MISS, answer.miss_reason
    lease_id = answer.lease_id
    while cache.act(lambda core: core.loads.state_of(lease_id)) is LeaseState.PENDING:
        assert await cache.wait_for_change(WAIT_S)
    answer = cache.act(lambda core: core.loads.settle(lease_id))
    assert (answer.end_token, answer.more) == (len(tokens), False)
    for span in answer.spans:
        slot = cache.arena.slots.slot(span.slot_id)
        stored = _bytes_of(name, span.token_offset)
        for layer in range(len(LAYOUT.layers)):
            for component in range(2):
                start = LAYOUT.component_offset(layer, component)
                end = start + span.num_tokens * 64
                assert slot[start:end] == stored[start:end]
    cache.act(lambda core: core.loads.complete(lease_id, ENGINE_ID))


async def _run(directory: Path) -> Power:
    """Store one by one and at once, flush, and store into the freed extents."""
    power = Power(directory)
    async with running_caches(directory, power) as caches:
        cache, _ = await caches.open(LAYOUT, prefault=False)

        async def store(*names: str, pending: int = 0) -> None:
            for name in names:
                await _store(cache, name)
            while cache._performer.num_pending > pending:
                assert await cache.wait_for_change(WAIT_S)
            power.may_commit.set()
            await _until_durable(cache)
            power.durable |= set(names)

        def flush(*names: str) -> None:
            for name in names:
                power.durable -= {name}
                cache.act(partial(_flush, name))

        await store("1")
        await store("2")
        await store("3", "4", "5", "6", "7", "8")
        flush("1", "3", "4", "5")
        await store("9", "10")
        await caches.wait_until_committed()
        power.may_commit.clear()
        flush("6", "7", "8")
        # Everything is written and synced before the index has dropped the blocks of these.
        await store("11", "12", "13", "14", pending=_num_blocks("6", "7", "8"))
        power.keep("the end")
    return power


async def test_durable_sessions_survive_a_power_cut_at_any_moment(tmp_path: Path) -> None:
    """All rows name bytes that exist, and sessions reported as durable are complete."""
    (tmp_path / "kvd").mkdir()
    power = await _run(tmp_path / "kvd")
    images = power.images
    assert power.moments >= MOMENTS
    assert len(images[-1].segments) > 1
    assert images[-1].durable == {"2", "9", "10", "11", "12", "13", "14"}
    assert _num_blocks(*(str(number) for number in range(1, 15))) > NUM_EXTENTS
    for number, image in enumerate(images):
        directory = tmp_path / str(number)
        directory.mkdir()
        image.write(directory)
        async with running_caches(directory, NoFaults()) as caches:
            moment = f"{number}: {image.moment}"
            if not list(caches):  # before the layout's row was written
                assert not image.durable, moment
                continue
            cache, _ = await caches.open(LAYOUT, prefault=False)
            assert await _num_corrupt(caches) == 0, moment
            listed = cache.act(lambda core: core.inspection.keys())
            assert {key.session_id for key in listed} >= image.durable, moment
            for name in sorted(image.durable):
                await _load(cache, name)


async def test_a_tier_that_shrinks_survives_a_power_cut_at_any_moment(tmp_path: Path) -> None:
    """What stays is complete before, while and after it is moved, with either size."""
    made = tmp_path / "kvd"
    made.mkdir()
    async with running_caches(made, NoFaults()) as caches:
        cache, _ = await caches.open(LAYOUT, prefault=False)
        for number in range(1, 9):
            await _store(cache, str(number))
        await _until_durable(cache)
    power = Power(made)
    power.learn()
    async with running_caches(made, power, NUM_EXTENTS // 2) as caches:
        [cache] = caches
        await _until_shrunk(cache, made)
        listed = cache.act(lambda core: core.inspection.keys())
        power.keep("the end")
    stayed = {key.session_id for key in listed}
    assert "8" in stayed, "it was stored last"
    assert "1" not in stayed
    cut = str(min(map(int, stayed)))  # perhaps only a part of it fits
    assert power.moments >= {"extent_written", "segment_synced", "index_committed"}
    for number, image in enumerate(power.images):
        directory = tmp_path / str(number)
        image.write(directory)
        num_extents = (NUM_EXTENTS, NUM_EXTENTS // 2)[number % 2]
        async with running_caches(directory, NoFaults(), num_extents) as caches:
            cache, _ = await caches.open(LAYOUT, prefault=False)
            assert await _num_corrupt(caches) == 0, f"{number}: {image.moment}"
            for name in stayed - {cut}:
                await _load(cache, name)


async def _until_shrunk(cache, directory: Path) -> None:
    """Wait until the files have half their size."""
    paths = (directory / VOLUMES).rglob
    async with asyncio.timeout(WAIT_S):
        while sum(p.stat().st_size for p in paths("*.segment")) > NUM_EXTENTS // 2 * EXTENT:
            await cache.wait_for_change(0.01)
            cache.measure_space()


async def _num_corrupt(caches: Caches) -> int:
    """Return how many extents named by rows do not hold their blocks."""
    async with aclosing(Scrubber(1 << 40).run(list(caches), repair=False)) as reports:
        async for progress in reports:
            report = progress.report
    return report.ssd_corrupt
