"""The layout of a block on SSD: a header, and the slices of its layers, in whole sectors."""

import math

from kvd.core.records.extent_shape import CHECKSUM_BYTES, TAG_BYTES, ExtentShape
from shared.types.kv_layout import Component, KVLayout, Layer


def test_headers_have_room_for_tags():
    """A header has room for the data of sealing, however many layers and tokens there are."""
    for num_layers in (1, 80, 126, 400):
        for block_tokens in (16, 512, 525, 1024):
            layer = Layer((Component("k", (8,), "float16"),))
            shape = ExtentShape(KVLayout("ab" * 16, (layer,) * num_layers, block_tokens))
            of_layers = (CHECKSUM_BYTES + TAG_BYTES) * num_layers
            needed = 64 + of_layers + 4 * block_tokens + TAG_BYTES
            assert shape.header_bytes == 4096 * math.ceil(needed / 4096)


def test_an_extent_is_a_header_and_the_rows_of_each_layer():
    """Slices of a full block are as in a slot; a partial block has the used rows only."""
    layers = tuple(Layer((Component("k", (width,), "float16"),)) for width in (64, 512))
    layout = KVLayout("ab" * 16, layers, block_tokens=48)  # slices of 1.5 and 12 sectors
    shape = ExtentShape(layout)
    assert shape.num_sectors(48) == shape.sectors_per_extent == 1 + 2 + 12
    assert shape.full_bytes == 4096 * 15 == 4096 + layout.block_bytes
    assert shape.num_sectors(5) == 1 + 1 + 2
    assert (shape.slice_bytes(1, 5), shape.slice_bytes(1, 4)) == (8192, 4096)
