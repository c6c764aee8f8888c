"""Transfers are complete, however little the kernel does at a time."""

import ctypes
import errno
import mmap
import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.tiers import direct_io
from kvd.tiers.extent_format import layer_groups
from shared.types.units import SECTOR_BYTES

SIZES = (2 * SECTOR_BYTES, 3 * SECTOR_BYTES)


def _buffers(content=b""):
    views = [memoryview(mmap.mmap(-1, size)) for size in SIZES]
    for view, start in zip(views, (0, SIZES[0]), strict=True):
        piece = content[start : start + len(view)]
        view[: len(piece)] = piece
    return views


def _join(buffers):
    return b"".join(map(bytes, buffers))


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("step", [4096, 5000, 9000, 1 << 20])
def test_short_transfers_are_continued(file, monkeypatch, step):
    """A kernel that moves `step` bytes at a time moves everything in the end."""
    read, write = os.preadv, os.pwritev

    def short(transfer):
        def limited(fd, buffers, offset):
            return transfer(fd, [buffers[0][:step]], offset)

        return limited

    monkeypatch.setattr(os, "preadv", short(read))
    monkeypatch.setattr(os, "pwritev", short(write))
    content = os.urandom(sum(SIZES))
    direct_io.write_fully(file, _buffers(content), SECTOR_BYTES)
    found = _buffers()
    assert direct_io.read_fully(file, found, SECTOR_BYTES)
    assert _join(found) == content


@pytest.mark.parametrize("missing", [1, SECTOR_BYTES, 4 * SECTOR_BYTES + 1])
def test_the_end_of_a_file_is_detected(file, missing):
    """Fewer bytes than requested are not enough, wherever the file ends."""
    os.ftruncate(file, sum(SIZES) - missing)
    assert not direct_io.read_fully(file, _buffers(), 0)
    os.ftruncate(file, sum(SIZES))
    assert direct_io.read_fully(file, _buffers(), 0)


def test_a_device_that_accepts_nothing_is_full(file, monkeypatch):
    """A write of no bytes would otherwise be repeated for ever."""
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="No space") as caught:
        direct_io.write_fully(file, _buffers(), 0)
    assert caught.value.errno == errno.ENOSPC


def test_the_probe_leaves_no_file(tmp_path):
    """Its result is the same each time; a missing directory has no direct I/O."""
    before = psutil.Process().num_fds()
    first = direct_io.probe_direct(tmp_path)
    assert direct_io.probe_direct(tmp_path) is first
    assert (list(tmp_path.iterdir()), psutil.Process().num_fds()) == ([], before)
    assert not direct_io.probe_direct(tmp_path / "nowhere")


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(1, 300))
def test_groups_cover_all_layers(sizes, least):
    """In order, each of the requested size, unless all layers together are smaller."""
    groups = layer_groups(sizes, least)
    assert [layer for group in groups for layer in group] == list(range(len(sizes)))
    totals = [sum(sizes[layer] for layer in group) for group in groups]
    assert min(totals) >= least or len(groups) == 1


def test_groups_are_as_small_as_allowed():
    """They exceed the requested size by less than a layer, except for the rest at the end."""
    assert layer_groups([1, 1, 1, 1, 1], 2) == (range(2), range(2, 5))
    assert layer_groups([4, 4], float("inf")) == (range(2),)


def test_the_probe_reports_what_the_file_system_can(tmp_path):
    """One with direct I/O is not mistaken for one without."""
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        assert not direct_io.probe_direct(tmp_path)
        return
    with os.fdopen(fd, "rb+", buffering=0) as file:
        assert file.write(mmap.mmap(-1, SECTOR_BYTES)) == SECTOR_BYTES
    assert direct_io.probe_direct(tmp_path)


@pytest.mark.parametrize(("number", "is_direct"), [(errno.ENOSPC, True), (errno.EINVAL, False)])
def test_a_full_disk_says_nothing_about_direct_io(tmp_path, monkeypatch, number, is_direct):
    """It is tried with the first block that finds room; other errors mean that there is none."""

    def refuse(*_):
        raise OSError(number, "injected")

    monkeypatch.setattr(direct_io, "set_direct", lambda *_, **__: None)  # any file system
    monkeypatch.setattr(os, "pwritev", refuse)
    assert direct_io.probe_direct(tmp_path) is is_direct


def test_staging_memory_grows_and_is_left_out_of_core_dumps():
    """Staged rows may be secret; a smaller piece uses the same memory."""
    staging = direct_io.Staging()
    small = staging.take(SECTOR_BYTES)
    small[:] = b"x" * SECTOR_BYTES
    assert bytes(staging.take(3)) == b"xxx"
    large = staging.take(17 * SECTOR_BYTES)
    large[-1] = 1
    assert len(large) == 17 * SECTOR_BYTES
    assert not large[0], "it is other memory"
    large[0] = 7
    assert staging.take(32 * SECTOR_BYTES)[0] == 7, "so much was made at once"
    larger = staging.take(32 * SECTOR_BYTES + 1)
    assert larger[0] == 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(large))
    assert address % SECTOR_BYTES == 0
    assert "dd" in mapping_flags(address)


def mapping_flags(address):
    """Return the kernel's flags of the mapping at an address: "dd" is left out of dumps."""
    holds = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            holds = start <= address < end
        elif holds and first == "VmFlags:":
            return rest
    raise AssertionError("no such mapping")


def test_a_device_that_accepts_less_than_a_sector_continues(file, monkeypatch):
    """The transfer continues at that place, which is no whole sector."""
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:1000]], at))
    content = os.urandom(sum(SIZES))
    direct_io.write_fully(file, _buffers(content), SECTOR_BYTES)
    monkeypatch.undo()
    found = _buffers()
    assert direct_io.read_fully(file, found, SECTOR_BYTES)
    assert _join(found) == content
