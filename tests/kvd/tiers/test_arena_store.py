"""Arenas that outlive their kvd: found again, adopted with their contents, or removed."""

import errno
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from kvd.core.records.entries import CommittedSlot, WritingSlot
from kvd.host.process_identity import ProcessIdentity
from kvd.tiers.arena_backing import FdStoreBacking, new_file
from kvd.tiers.arena_store import ArenaOptions, ArenaStore, KeptArena
from kvd.tiers.faults import NoFaults, WritePoint
from shared.process import systemd
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.units import SECTOR_BYTES
from tests.synthetic_engine import MODEL, small_layout

LAYOUT = small_layout()


# Blocks of 128 MiB: an arena larger than any disk needs few of them, and a small journal.
HUGE_LAYOUT = KVLayout(MODEL, (Layer((Component("k", (256, 128), "float32"),)),) * 64, 16)
RECORD = CommittedSlot(3, b"k" * 16, 2, bytes(8), bytes(8 * len(LAYOUT.layers)))
POINTS = [point for point in WritePoint if point.name.startswith("ARENA")]


@pytest.fixture
def options(tmp_path):
    directory = tmp_path / "shm"
    directory.mkdir()
    return ArenaOptions(keep="file", directory=directory)


@pytest.fixture
def store(options, tmp_path):
    return ArenaStore(options, tmp_path / "state", num_words=4)


@pytest.fixture
def files(options):
    """Return the paths of the present files."""

    def found():
        return sorted(path for path in options.directory.rglob("*") if path.is_file())

    return found


def make_kept_arena(store, layout=LAYOUT):
    """Make an arena with a record and some bytes, and end as a kvd does that is restarted."""
    arena = store.create(layout, 4)
    arena.slots.slot(1)[:5] = b"bytes"
    arena.journal.put(1, RECORD)
    arena.journal.put(2, WritingSlot(4, 99, engine_id=1), ProcessIdentity(77, 5, b"i" * 16))
    facts = (arena.arena_id, arena.epoch)
    arena.close(keep=True)
    return facts


def test_a_kept_arena_is_adopted(store, files):
    """Same id, same bytes, its records, a new epoch; no other user may read the files."""
    arena_id, epoch = make_kept_arena(store)
    assert [path.stat().st_mode & 0o777 for path in files()] == [0o600, 0o600]
    assert files()[0].parent.stat().st_mode & 0o777 == 0o700
    kept = store.find()[LAYOUT.fingerprint]
    assert kept.num_bytes == 4 * LAYOUT.block_bytes
    adoption = store.adopt(LAYOUT, kept)
    arena = adoption.arena
    assert (arena.arena_id, arena.epoch) == (arena_id, epoch + 1)
    assert arena.first_lease_id == (epoch + 1) << 40
    assert bytes(arena.slots.slot(1)[:5]) == b"bytes"
    assert not arena.pages, "of a file system of small pages: nobody has looked"
    assert [(slot.slot_id, slot.block) for slot in adoption.adopted] == [(1, RECORD)]
    assert [(write.slot_id, write.writer.pid) for write in adoption.writing] == [(2, 77)]
    arena.close()
    assert not files()


def test_a_new_arena_replaces_one_that_was_not_adopted(store, files):
    """It is kept as well; every page of its journal exists later."""
    arena_id, _ = make_kept_arena(store)
    before = files()
    arena = store.create(LAYOUT, 4)
    assert arena.arena_id != arena_id
    assert not _path_of(arena).startswith("/memfd:")
    assert files() == before
    (journal,) = (path.stat() for path in files() if path.suffix == ".journal")
    assert journal.st_blocks * 512 >= journal.st_size
    arena.close()


def test_an_arena_that_is_not_kept_leaves_nothing(store, files, options):
    """Neither files nor the directory."""
    store.create(LAYOUT, 4).close()
    assert not list(options.directory.iterdir())
    assert not store.find()


def test_descriptors_and_mappings_are_released(store):
    """However often an arena is created, kept, adopted, discarded."""

    def cycle():
        make_kept_arena(store)
        store.adopt(LAYOUT, store.find()[LAYOUT.fingerprint]).arena.close(keep=True)
        store.discard(store.find()[LAYOUT.fingerprint], "a test")

    def resources():
        maps = Path("/proc/self/maps").read_text("ascii").splitlines()
        mapped = [line for line in maps if "kvd-" in line]
        return len(list(Path("/proc/self/fd").iterdir())), mapped

    cycle()
    before = resources()
    for _ in range(5):
        cycle()
    assert resources() == before


def _flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _replace(path):
    path.rename(f"{path}.before")
    path.write_bytes(bytes(1 << 20))
    path.chmod(0o600)


SPOILS = {
    "another version": ("journal", lambda path: _flip(path, 8), "version"),
    "a damaged header": ("journal", lambda path: _flip(path, 20), "damaged"),
    "no header": ("journal", lambda path: path.write_bytes(bytes(1 << 16)), "no journal header"),
    "an empty journal": ("journal", lambda path: path.write_bytes(b""), "header"),
    "a cut journal": ("journal", lambda path: os.truncate(path, 4096), "bytes"),
    "cut slots": ("slots", lambda path: os.truncate(path, 8192), "it has only 8192 bytes"),
    "no slots": ("slots", lambda path: path.unlink(), "missing"),
    "no journal": ("journal", lambda path: path.unlink(), "missing"),
    "open to others": ("slots", lambda path: path.chmod(0o666), "missing"),
    "a second name": ("slots", lambda path: os.link(path, f"{path}.too"), "missing"),
    "a symlink": (
        "slots",
        lambda path: (path.rename(f"{path}.moved"), path.symlink_to(f"{path}.moved")),
        "missing",
    ),
    "other slots": (
        "slots",
        lambda path: (
            path.rename(f"{path}.x"),
            path.write_bytes(bytes(1 << 20)),
            path.chmod(0o600),
        ),
        "do not belong together",
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_an_unsuitable_arena_is_removed_with_its_reason(store, files, name):
    """One log line has the reason, and no memory stays behind."""
    make_kept_arena(store)
    part, spoil, reason = SPOILS[name]
    (path,) = [path for path in files() if path.suffix == f".{part}"]
    spoil(path)
    with capture_logs() as lines:
        kept = store.find().get(LAYOUT.fingerprint)
        assert kept is None or store.adopt(LAYOUT, kept) is None
    assert [path for path in files() if path.suffix in {".slots", ".journal"}] == []
    (reported,) = [line["reason"] for line in lines if line["event"] == "arena_discarded"]
    assert reason in reported
    store.create(LAYOUT, 4).close()


def test_arenas_of_another_layout_size_or_boot_are_refused(store, files, options, tmp_path):
    """The header must have the values that this kvd would write."""
    make_kept_arena(store)
    kept = store.find()[LAYOUT.fingerprint]
    assert store.adopt(small_layout(num_layers=3), kept) is None
    make_kept_arena(store)
    rebooted = ArenaStore(options, tmp_path / "state", num_words=4)
    rebooted._boot_id = "00000000-0000-4000-8000-000000000000"
    assert rebooted.adopt(LAYOUT, rebooted.find()[LAYOUT.fingerprint]) is None
    assert not files()


def test_files_are_removed_when_dram_is_not_kept_any_more(store, files, options, tmp_path):
    """After a change of dram.keep no memory is leaked."""
    make_kept_arena(store)
    none = ArenaStore(ArenaOptions("none", options.directory), tmp_path / "state", num_words=4)
    assert none.find() == {}
    assert not files()


def test_the_directory_of_kept_arenas_is_created_with_its_parents(options, tmp_path):
    """It is given nothing but the place."""
    options = replace(options, directory=tmp_path / "run" / "kvd" / "shm")
    make_kept_arena(ArenaStore(options, tmp_path / "state", num_words=4))
    found = ArenaStore(options, tmp_path / "state", num_words=4).find()
    assert list(found) == [LAYOUT.fingerprint]


@pytest.mark.parametrize("does_keep", [False, True])
def test_a_failing_fd_store_is_reported(tmp_path, monkeypatch, does_keep):
    """It may be full, or not allowed: a restart then begins without DRAM."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        name = "notify" if does_keep else "nobody"
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / name))
        with os.fdopen(os.memfd_create("slots"), "rb") as file, capture_logs() as logs:
            FdStoreBacking().keep("layout", {"slots": file.fileno()})
    assert [line["event"] for line in logs] == ([] if does_keep else ["dram_not_kept"])


def test_kept_memory_consists_of_whole_huge_pages():
    """Its slots may be shorter by less than one."""
    try:
        fd = os.memfd_create("slots", os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"the kernel has no huge pages ({error})")
    with os.fdopen(fd, "rb"):
        huge_bytes = os.fstat(fd).st_blksize
        os.ftruncate(fd, 2 * huge_bytes)
        kept = KeptArena("layout", "fdstore", fd, -1)
        assert kept.page_bytes == huge_bytes > SECTOR_BYTES
    assert KeptArena("layout", "fdstore", -1, -1).page_bytes == SECTOR_BYTES


def test_state_directories_do_not_share_arenas(store, options, tmp_path):
    """Two kvds on one machine each find their own."""
    make_kept_arena(store)
    other = ArenaStore(options, tmp_path / "other", num_words=4)
    assert other.find() == {}
    assert list(store.find()) == [LAYOUT.fingerprint]


def _path_of(arena):
    return str(Path(f"/proc/self/fd/{arena.fd}").readlink())


def test_a_directory_of_another_user_is_not_used(store, options, files):
    """kvd then works without keeping its DRAM, and touches nothing there."""
    make_kept_arena(store)
    directory = files()[0].parent
    directory.chmod(0o777)
    assert store.find() == {}
    arena = store.create(LAYOUT, 4)
    assert _path_of(arena).startswith("/memfd:")
    arena.close()
    assert len(files()) == 2


def test_a_directory_without_room_is_not_used(store):
    """It is too small: a memfd is used instead, of which no page is touched."""
    arena = store.create(HUGE_LAYOUT, (1 << 42) // HUGE_LAYOUT.block_bytes)
    assert _path_of(arena).startswith("/memfd:")
    arena.close()


class FailAt(NoFaults):
    """Fails at a write point."""

    def __init__(self, point):
        self.point = point

    def reach(self, point):
        if point is self.point:
            raise OSError(errno.EIO, "injected")


@pytest.mark.parametrize("keep", ["none", "file"])
@pytest.mark.parametrize(
    "point", [WritePoint.ARENA_FILES, WritePoint.ARENA_HEADER, WritePoint.ARENA_KEPT]
)
def test_an_arena_that_cannot_be_created_leaves_nothing(options, tmp_path, files, keep, point):
    """Neither files nor memory, at whichever step it fails."""
    failing = ArenaStore(replace(options, keep=keep), tmp_path / "state", 4, FailAt(point))
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="injected"):
        failing.create(LAYOUT, 4)
    assert (psutil.Process().num_fds(), files()) == (before, [])


def test_a_file_that_cannot_be_sized_is_removed(tmp_path):
    """The error has the reason, and neither a name nor a descriptor is left."""
    directory_fd = os.open(tmp_path, os.O_RDONLY)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        new_file(directory_fd, "slots", -(1 << 20))
    assert (psutil.Process().num_fds(), list(tmp_path.iterdir())) == (before, [])
    os.close(directory_fd)


def test_descriptors_in_the_store_are_identified_by_name(monkeypatch):
    """Unknown ones are closed: they would never be used."""
    ours = ["kvd-ab-slots", "kvd-ab-journal", "kvd-c-d-slots"]
    names = [*ours, "kvd-ab-words", "engine-ab-slots", "kvd--slots", "kvd-slots"]
    first = 900  # a number that no descriptor has
    monkeypatch.setattr(systemd, "FIRST_FD", first)
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", str(len(names)))
    monkeypatch.setenv("LISTEN_FDNAMES", ":".join(names))
    with Path(os.devnull).open() as file:
        for number in range(len(names)):
            os.dup2(file.fileno(), first + number)
    found = FdStoreBacking().find()
    assert found == {"ab": {"slots": first, "journal": first + 1}, "c-d": {"slots": first + 2}}
    for number in range(len(ours)):
        os.close(first + number)
    for number in range(len(ours), len(names)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first + number)


class KillAt(NoFaults):
    """Ends the process at a write point."""

    def __init__(self, point):
        self.point = point

    def reach(self, point):
        if point is self.point:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_while_arenas_are_created_leaves_none_or_a_sound_one(
    store, options, tmp_path, files, point
):
    """The next kvd adopts it or removes it, and can create its own."""
    child = os.fork()
    if child == 0:
        doomed = ArenaStore(options, tmp_path / "state", 4, KillAt(point))
        arena = doomed.create(LAYOUT, 4)
        arena.close()
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    kept = store.find().get(LAYOUT.fingerprint)
    adoption = store.adopt(LAYOUT, kept) if kept else None
    if adoption is None:
        assert not files()
    else:
        assert (adoption.adopted, adoption.writing) == ((), ())
        adoption.arena.close()
    store.create(LAYOUT, 4).close()
    assert not files()


LEAVING = """
import sys
from pathlib import Path
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from tests.synthetic_engine import small_layout
options = ArenaOptions(keep="file", directory=Path(sys.argv[1]))
arena = ArenaStore(options, Path(sys.argv[2]), 4).create(small_layout(), 4)
arena.slots.slot(3)[:4] = b"left"
print(arena.arena_id, flush=True)
input()
"""


def test_a_killed_process_leaves_its_arena(store, options, tmp_path):
    """SIGKILL of the process that created it, which never closed anything."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, str(options.directory), str(tmp_path / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    arena_id = process.stdout.readline().strip()
    process.kill()
    process.communicate()
    arena = store.adopt(LAYOUT, store.find()[LAYOUT.fingerprint]).arena
    assert arena.arena_id == arena_id
    assert bytes(arena.slots.slot(3)[:4]) == b"left"
    arena.close()
