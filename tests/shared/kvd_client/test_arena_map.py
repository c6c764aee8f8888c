"""Mapped arenas."""

import os

import pytest

from shared.kvd_client.arena_map import ArenaMap


@pytest.fixture
def fd():
    number = os.memfd_create("test")
    os.ftruncate(number, 4 * 4096)
    yield number
    os.close(number)


def test_two_maps_see_the_same_bytes(fd):
    """Bytes that one process writes into a slot are read by another, and only there."""
    writer, reader = ArenaMap(fd, 4096, 4), ArenaMap(fd, 4096, 4)
    writer.slot(2)[:] = b"x" * 4096
    assert bytes(reader.slot(2)) == b"x" * 4096
    assert bytes(reader.slot(1)) == bytes(reader.slot(3)) == bytes(4096)


@pytest.mark.parametrize("slot_id", [-1, 4, 1 << 40])
def test_slots_outside_the_arena_are_refused(fd, slot_id):
    """Before any memory is touched."""
    with pytest.raises(ValueError, match="no slot"):
        ArenaMap(fd, 4096, 4).slot(slot_id)


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(4096, 5), (4096, 0), (0, 4), (1 << 50, 1)])
def test_a_file_smaller_than_announced_is_refused(fd, slot_bytes, num_slots):
    """Mapping more than there is would end in SIGBUS at the first touch."""
    with pytest.raises(ValueError, match="announced"):
        ArenaMap(fd, slot_bytes, num_slots)


def test_views_outlive_the_map(fd):
    """A view handed out stays valid after close; the memory is unmapped with the last view."""
    arena = ArenaMap(fd, 4096, 4)
    view = arena.slot(0)
    arena.close()
    view[0] = 7
    assert bytes(ArenaMap(fd, 4096, 4).slot(0)[:1]) == b"\x07"
    with pytest.raises(ValueError, match="no slot"):
        arena.slot(0)
