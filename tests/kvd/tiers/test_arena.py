"""One arena: its size, its seals, its pages."""

import mmap
import os
import resource
from pathlib import Path

import psutil
import pytest

from kvd.tiers import page_advice
from kvd.tiers.arena import AUTO_FRACTION, ArenaTooSmallError, dram_bytes, num_slots_for
from kvd.tiers.arena_backing import DirectoryBacking, private_directory
from kvd.tiers.arena_store import ArenaOptions, ArenaStore, HugepagesUnavailableError, resolve_keep
from kvd.tiers.faults import NoFaults
from shared.measuring import workspace
from shared.types.kv_layout import Component, KVLayout, Layer
from tests.synthetic_engine import MODEL, small_layout

LAYOUT = small_layout()
# Blocks of 128 MiB: an arena larger than any machine needs few of them, and a small journal.
HUGE_LAYOUT = KVLayout(MODEL, (Layer((Component("k", (256, 128), "float32"),)),) * 64, 16)


def store_of(tmp_path, **options):
    return ArenaStore(ArenaOptions(**options), tmp_path, num_words=4)


@pytest.fixture
def arena(tmp_path):
    made = store_of(tmp_path).create(LAYOUT, 3)
    yield made
    made.close()


def test_the_arena_cannot_be_resized(arena):
    """An engine with the descriptor can neither shrink nor grow it, nor remove the seals."""
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


@pytest.mark.parametrize("hugepages", ["auto", "off"])
def test_prefault_allocates_everything_and_keeps_contents(tmp_path, hugepages):
    """All pages exist afterwards, and earlier contents stay."""
    arena = store_of(tmp_path, hugepages=hugepages).create(LAYOUT, 3)
    assert arena.physical_bytes() == 0 or arena.pages == "hugetlb"
    arena.slots.slot(1)[:3] = b"abc"
    assert arena.prefault() == arena.num_bytes >= 3 * LAYOUT.block_bytes
    assert arena.physical_bytes() >= 3 * LAYOUT.block_bytes
    assert bytes(arena.slots.slot(1)[:3]) == b"abc"
    arena.close()


def test_prefault_works_on_an_older_kernel(arena, monkeypatch):
    """It does not know MADV_POPULATE_WRITE, simulated by an advice of 99."""
    monkeypatch.setattr(page_advice, "MADV_POPULATE_WRITE", 99)
    assert arena.prefault() == arena.num_bytes
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * LAYOUT.block_bytes


@pytest.mark.parametrize("is_older", [False, True], ids=["this kernel", "an older one"])
def test_prefault_stops_where_there_is_no_memory(tmp_path, monkeypatch, is_older):
    """It returns how far it came: in a file that ends too early, and may not grow."""
    if is_older:
        monkeypatch.setattr(page_advice, "MADV_POPULATE_WRITE", 99)
    arena = store_of(tmp_path, keep="file", directory=tmp_path).create(LAYOUT, 3)
    os.ftruncate(arena.fd, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert arena.prefault() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        arena.close()


def test_prefault_stops_on_close(arena):
    """A stop during the start does not wait for gigabytes of pages."""
    arena.closing.set()
    assert arena.prefault() == 0


def test_sizes():
    """As configured, or a share of the free memory; fewer than two blocks are refused."""
    assert dram_bytes(4096) == 4096
    assert dram_bytes(None) > 0
    assert num_slots_for(8192 * 3 + 1, 8192) == 3
    with pytest.raises(ArenaTooSmallError, match=r"dram\.bytes"):
        num_slots_for(8192, 8192)


def test_missing_huge_pages(tmp_path):
    """More than the machine can have free: "auto" works without, "on" names the remedy."""
    num_slots = (1 << 42) // HUGE_LAYOUT.block_bytes  # 4 TiB, of which no page is touched
    with pytest.raises(HugepagesUnavailableError, match=r"vm\.nr_hugepages"):
        store_of(tmp_path, hugepages="on").create(HUGE_LAYOUT, num_slots)
    arena = store_of(tmp_path, hugepages="auto").create(HUGE_LAYOUT, num_slots)
    assert not arena.pages  # while there is none
    arena.close()


@pytest.mark.parametrize("keep", ["none", "file"])
def test_pages_are_those_that_the_kernel_reports(tmp_path, keep):
    """Transparent huge pages were requested: whether there are any shows after the allocation."""
    options = {"keep": keep, "directory": Path("/dev/shm"), "hugepages": "auto"}  # noqa: S108
    arena = store_of(tmp_path, **options).create(small_layout(), 1024)
    if arena.pages != "hugetlb":  # this machine has no pool of them
        assert not arena.pages
        arena.prefault()
        shown = page_advice.huge_bytes(arena.slots.memory)
        assert arena.pages == ("thp" if shown else "small")
        if workspace.shared_huge_pages() in ("never", "deny"):
            assert arena.pages == "small"
    arena.close()


@pytest.mark.skipif(workspace.private_huge_pages() == "never", reason="the kernel gives none")
def test_huge_pages_are_counted_in_their_own_mapping():
    """Private memory may have some where shared memory has none; others' mappings do not count."""
    private = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, 1 << 20, mmap.MAP_SHARED)
    with private, shared, memoryview(private) as memory, memoryview(shared) as neighbour:
        page_advice.ask_huge_pages(memory)
        assert page_advice.huge_bytes(memory) == 0
        page_advice.populate(memory)
        page_advice.populate(neighbour)
        assert page_advice.huge_bytes(memory) > 0
        if workspace.shared_huge_pages() in ("never", "deny", "advise"):
            assert page_advice.huge_bytes(neighbour) == 0


def test_files_cannot_promise_huge_pages(tmp_path):
    """Their pages belong to their file system: "on" is refused instead of ignored."""
    store = store_of(tmp_path, hugepages="on", keep="file", directory=tmp_path)
    with pytest.raises(HugepagesUnavailableError, match=r"dram\.keep"):
        store.create(LAYOUT, 3)


def _free_huge_pages():
    return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text("ascii"))


@pytest.mark.skipif(_free_huge_pages() < 4, reason="no huge pages are reserved on this machine")
def test_available_huge_pages(tmp_path):
    """They are reserved, sealed, and freed at the end."""
    before = _free_huge_pages()
    arena = store_of(tmp_path, hugepages="on").create(LAYOUT, 200)
    assert arena.pages == "hugetlb"
    assert arena.prefault() == arena.num_bytes
    assert _free_huge_pages() == before - arena.num_bytes // (2 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    arena.close()
    assert _free_huge_pages() == before


@pytest.mark.parametrize("node", [0, 1023, 5000])
def test_a_numa_node_costs_a_warning_at_most(tmp_path, node):
    """Whether the node exists or not, the arena works."""
    arena = store_of(tmp_path, numa_node=node).create(LAYOUT, 3)
    assert arena.prefault() == arena.num_bytes
    arena.close()


def test_an_existing_node_is_bound(arena):
    """Every machine has node 0, and none has node 1023."""
    page_advice.bind_to_node(arena.slots.memory, 0)
    with pytest.raises(OSError, match="Invalid"):
        page_advice.bind_to_node(arena.slots.memory, 1023)


def test_where_dram_is_kept_over_restarts():
    """In the fd store under systemd, otherwise in files, unless other users could truncate them."""
    systemd, none = {"NOTIFY_SOCKET": "/run/x"}, {}
    assert resolve_keep("auto", (), systemd) == "fdstore"
    assert resolve_keep("auto", (12345,), systemd) == "fdstore"
    assert resolve_keep("auto", (os.geteuid(), 0), none) == "file"
    assert resolve_keep("auto", (12345,), none) == "none"
    assert resolve_keep("fdstore", (), none) == "none"
    assert resolve_keep("file", (12345,), systemd) == "file"


def test_auto_takes_a_share_of_the_available_memory():
    """An explicit size is used as given."""
    assert 0 < dram_bytes(None) <= psutil.virtual_memory().total * AUTO_FRACTION
    assert dram_bytes(12345) == 12345


def test_a_file_that_cannot_be_sized_leaves_nothing(tmp_path):
    """Neither a descriptor nor a file: the arena is created elsewhere then."""
    backing = DirectoryBacking(tmp_path, tmp_path / "state", NoFaults())
    assert backing.kept_bytes() == 0
    num_open = psutil.Process().num_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            backing.new_file("layout", "slots", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert psutil.Process().num_fds() == num_open
    assert list(backing.path.iterdir()) == []
    fd = backing.new_file("layout", "slots", 1)
    os.pwrite(fd, b"x", 0)
    os.fsync(fd)
    assert backing.kept_bytes() == os.fstat(fd).st_blocks * 512 > 0
    os.close(fd)


@pytest.mark.parametrize("node", [0, 1, 63, 64, 70, 128, 1023])
def test_a_node_is_one_bit_of_a_mask(node):
    """In the kernel's order."""
    bits = int.from_bytes(bytes(page_advice.node_mask(node)), "little")
    assert bits == 1 << node
    assert len(bytes(page_advice.node_mask(node))) == 128


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o701])
def test_a_directory_open_to_others_is_refused(tmp_path, mode):
    """No descriptor of it is kept; a missing directory is created with its parents."""
    path = tmp_path / "above" / "own"
    os.close(private_directory(path))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(mode)
    num_open = psutil.Process().num_fds()
    with pytest.raises(PermissionError, match="open to others"):
        private_directory(path)
    assert psutil.Process().num_fds() == num_open


def test_a_directory_that_is_a_link_or_a_file_is_refused(tmp_path):
    """Its owner could redirect it later."""
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "file"):
        with pytest.raises(NotADirectoryError):
            private_directory(tmp_path / name)


def test_errors_of_the_kernel_are_raised():
    """Memory that begins within a page cannot be allocated in advance."""
    memory = memoryview(mmap.mmap(-1, 2 * mmap.PAGESIZE))
    page_advice.populate(memory)
    with pytest.raises(OSError, match="Invalid argument"):
        page_advice.populate(memory[1:])
