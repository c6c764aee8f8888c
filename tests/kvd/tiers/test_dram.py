"""The arena: its size, its seals, its pages."""

import os

import pytest

from kvd.tiers.dram import ArenaTooSmallError, create_arena, dram_bytes, num_slots_for


@pytest.fixture
def arena():
    made = create_arena("test", 8192, 3)
    yield made
    made.close()


def test_the_arena_cannot_be_resized(arena):
    """An engine that holds the descriptor can neither shrink nor grow it, nor undo that."""
    for size in (4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_prefault_allocates_everything_and_keeps_contents(arena):
    """All pages are there afterwards, and what was written before still is."""
    arena.slots.slot(1)[:3] = b"abc"
    assert arena.prefault() == 3 * 8192
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 * 8192
    assert bytes(arena.slots.slot(1)[:3]) == b"abc"


def test_prefault_stops_when_told(arena):
    """A stop during the start does not wait for gigabytes of pages."""
    arena.stop_prefault()
    assert arena.prefault() == 0


def test_sizes():
    """As configured, or a share of what is free; fewer than two blocks are refused."""
    assert dram_bytes(4096) == 4096
    assert dram_bytes(None) > 0
    assert num_slots_for(8192 * 3 + 1, 8192) == 3
    with pytest.raises(ArenaTooSmallError, match=r"dram\.bytes"):
        num_slots_for(8192, 8192)
