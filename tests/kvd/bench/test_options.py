"""Scales and layouts of the bench."""

import pytest

from kvd.bench.options import (
    DATA_LAYOUTS,
    FULL,
    MIN_PASS_BYTES,
    QUICK,
    SMALL_LAYOUT,
    fitted,
    layout_with,
    resized,
)
from shared.kvd_client.messages import layout_message, layout_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.units import GIB


@pytest.mark.parametrize("layout", [*DATA_LAYOUTS, SMALL_LAYOUT])
def test_engines_can_attach_with_the_layouts(layout):
    """kvd decodes them from a message, as engines send them."""
    sent = kvd_pb2.KVLayout.FromString(layout_message(layout).SerializeToString())
    assert layout_of(sent) == layout


def test_a_layout_has_the_requested_slices():
    layout = layout_with(1 << 20, 3)
    assert [layout.slice_bytes(index) for index in range(3)] == [1 << 20] * 3
    assert layout.block_bytes == 3 << 20


def test_a_large_machine_is_measured_in_full():
    assert fitted(FULL, 256 * GIB, 1024 * GIB) == FULL


def test_a_small_machine_is_measured_with_smaller_passes():
    small = fitted(FULL, 4 * GIB, 1024 * GIB)
    assert small.arena_bytes == GIB // 2
    assert MIN_PASS_BYTES < small.ssd_max_bytes < GIB
    assert small.session_counts == FULL.session_counts


def test_a_small_disk_makes_small_passes_too():
    assert fitted(FULL, 256 * GIB, 8 * GIB).ssd_max_bytes == GIB // 2


def test_a_scale_never_grows():
    assert fitted(QUICK, 1024 * GIB, 1024 * GIB) == QUICK


def test_the_fullest_index_has_the_requested_size():
    """Nothing else changes, and no index is fuller."""
    assert resized(FULL, None, None) == FULL
    large = resized(FULL, 1_000_000, 4)
    assert (large.session_counts, large.blocks_per_session) == ((10, 10_000, 1_000_000), 4)
    assert resized(FULL, 5_000, None).session_counts == (10, 5_000, 5_000)
