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
    """An engine that holds the descriptor can neither shrink nor grow it, nor undo that."""
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


@pytest.mark.parametrize("hugepages", ["auto", "off"])
def test_prefault_allocates_everything_and_keeps_contents(tmp_path, hugepages):
    """All pages are there afterwards, and what was written before still is."""
    arena = store_of(tmp_path, hugepages=hugepages).create(LAYOUT, 3)
    assert arena.physical_bytes() == 0 or arena.pages == "hugetlb"
    arena.slots.slot(1)[:3] = b"abc"
    assert arena.prefault() == arena.num_bytes >= 3 * LAYOUT.block_bytes
    assert arena.physical_bytes() >= 3 * LAYOUT.block_bytes
    assert bytes(arena.slots.slot(1)[:3]) == b"abc"
    arena.close()


def test_prefault_works_on_an_older_kernel(arena, monkeypatch):
    """One that does not know MADV_POPULATE_WRITE: 99 stands for what it does not know."""
    monkeypatch.setattr(page_advice, "MADV_POPULATE_WRITE", 99)
    assert arena.prefault() == arena.num_bytes
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * LAYOUT.block_bytes


@pytest.mark.parametrize("is_older", [False, True], ids=["this kernel", "an older one"])
def test_prefault_ends_where_there_is_no_memory(tmp_path, monkeypatch, is_older):
    """It says how far it came: nowhere in a file that ends too early, and may not grow."""
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
    """As configured, or a share of what is free; fewer than two blocks are refused."""
    assert dram_bytes(4096) == 4096
    assert dram_bytes(None) > 0
    assert num_slots_for(8192 * 3 + 1, 8192) == 3
    with pytest.raises(ArenaTooSmallError, match=r"dram\.bytes"):
        num_slots_for(8192, 8192)


def test_huge_pages_that_are_not_there(tmp_path):
    """More than the machine can have free: "auto" goes without, "on" says what to do."""
    num_slots = (1 << 42) // HUGE_LAYOUT.block_bytes  # 4 TiB, of which no page is touched
    with pytest.raises(HugepagesUnavailableError, match=r"vm\.nr_hugepages"):
        store_of(tmp_path, hugepages="on").create(HUGE_LAYOUT, num_slots)
    arena = store_of(tmp_path, hugepages="auto").create(HUGE_LAYOUT, num_slots)
    assert not arena.pages  # as long as none is there
    arena.close()


@pytest.mark.parametrize("keep", ["none", "file"])
def test_pages_are_what_the_kernel_shows(tmp_path, keep):
    """Transparent huge pages were asked for: whether there are any is known when they are taken."""
    options = {"keep": keep, "directory": Path("/dev/shm"), "hugepages": "auto"}  # noqa: S108
    arena = store_of(tmp_path, **options).create(small_layout(), 1024)
    if arena.pages != "hugetlb":  # no pool of them on this machine
        assert not arena.pages
        arena.prefault()
        shown = page_advice.huge_bytes(arena.slots.memory)
        assert arena.pages == ("thp" if shown else "small")
        if workspace.shared_huge_pages() in ("never", "deny"):
            assert arena.pages == "small"
    arena.close()


@pytest.mark.skipif(workspace.private_huge_pages() == "never", reason="the kernel gives none")
def test_huge_pages_are_counted_in_their_own_mapping():
    """Private memory may have some where shared memory has none; a neighbour's do not count."""
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
    """Their pages are of their file system: "on" is refused instead of being without effect."""
    store = store_of(tmp_path, hugepages="on", keep="file", directory=tmp_path)
    with pytest.raises(HugepagesUnavailableError, match=r"dram\.keep"):
        store.create(LAYOUT, 3)


def _free_huge_pages():
    return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text("ascii"))


@pytest.mark.skipif(_free_huge_pages() < 4, reason="no huge pages are reserved on this machine")
def test_huge_pages_that_are_there(tmp_path):
    """They are reserved, sealed, and given back at the end."""
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
    """Whether there is such a node or not, the arena works."""
    arena = store_of(tmp_path, numa_node=node).create(LAYOUT, 3)
    assert arena.prefault() == arena.num_bytes
    arena.close()


def test_the_node_that_exists_is_bound(arena):
    """Every machine has node 0, and none has node 1023."""
    page_advice.bind_to_node(arena.slots.memory, 0)
    with pytest.raises(OSError, match="Invalid"):
        page_advice.bind_to_node(arena.slots.memory, 1023)


def test_where_dram_is_kept():
    """In the fd store under systemd, else as files, unless strangers could truncate them."""
    systemd, none = {"NOTIFY_SOCKET": "/run/x"}, {}
    assert resolve_keep("auto", (), systemd) == "fdstore"
    assert resolve_keep("auto", (12345,), systemd) == "fdstore"
    assert resolve_keep("auto", (os.geteuid(), 0), none) == "file"
    assert resolve_keep("auto", (12345,), none) == "none"
    assert resolve_keep("fdstore", (), none) == "none"
    assert resolve_keep("file", (12345,), systemd) == "file"


def test_a_size_that_is_not_said_is_a_part_of_the_machines():
    """Some of what is available; what is said is taken."""
    assert 0 < dram_bytes(None) <= psutil.virtual_memory().total * AUTO_FRACTION
    assert dram_bytes(12345) == 12345


def test_a_file_that_cannot_get_its_size_leaves_nothing(tmp_path):
    """Neither a descriptor nor a file: the arena is made elsewhere then."""
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
def test_a_node_is_one_bit_of_a_thousand(node):
    """In the order in which the kernel has them."""
    bits = int.from_bytes(bytes(page_advice.node_mask(node)), "little")
    assert bits == 1 << node
    assert len(bytes(page_advice.node_mask(node))) == 128


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o701])
def test_a_directory_that_others_may_use_is_refused(tmp_path, mode):
    """And no descriptor of it is kept; one of our own is made with those above it."""
    path = tmp_path / "above" / "own"
    os.close(private_directory(path))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(mode)
    num_open = psutil.Process().num_fds()
    with pytest.raises(PermissionError, match="open to others"):
        private_directory(path)
    assert psutil.Process().num_fds() == num_open


def test_a_directory_that_is_a_link_or_a_file_is_refused(tmp_path):
    """Whoever made it could point it elsewhere later."""
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "file"):
        with pytest.raises(NotADirectoryError):
            private_directory(tmp_path / name)


def test_what_the_kernel_refuses_is_raised():
    """Memory that begins amid a page cannot be allocated beforehand."""
    memory = memoryview(mmap.mmap(-1, 2 * mmap.PAGESIZE))
    page_advice.populate(memory)
    with pytest.raises(OSError, match="Invalid argument"):
        page_advice.populate(memory[1:])
