"""ExtentShape: how one block lies on SSD, in sectors.

    extent = header | layer slice 0 | layer slice 1 | …     each padded to whole sectors

A full block's slices are the slot's, padding included, so that they move without a copy. Of a
partial block only the used rows are kept: each slice has, component after component, the rows that
hold tokens. It is *packed* into part of an extent beside other partial blocks. A part of a
state or a window has no tokens, and all bytes of the slot.

A header has room for what it takes to seal the extent, whether it is sealed or not: one volume may
hold both, and neither depends on the other's size.

Pure. `kvd/FORMATS.md` has the header's bytes.
"""

from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up

HEADER_FIXED_BYTES = 64
CHECKSUM_BYTES = 8  # per layer
TAG_BYTES = 16  # per layer, and of the header; of sealed extents
TOKEN_ID_BYTES = 4


class ExtentShape:
    """Sizes of one layout's extents."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.header_bytes = align_up(
            HEADER_FIXED_BYTES
            + (CHECKSUM_BYTES + TAG_BYTES) * len(layout.layers)
            + TOKEN_ID_BYTES * layout.block_tokens
            + TAG_BYTES,
            SECTOR_BYTES,
        )
        self.full_bytes = self.header_bytes + layout.block_bytes
        self.sectors_per_extent = self.full_bytes // SECTOR_BYTES
        self._num_sectors: dict[int, int] = {}  # by number of tokens, as they are asked for

    def slice_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Return the bytes of one layer slice on SSD, padding included."""
        if not num_tokens:
            return self.layout.slot_slices[layer_index]
        used_bytes = self.layout.token_layers[layer_index].token_bytes * num_tokens
        return align_up(used_bytes, SECTOR_BYTES)

    def num_sectors(self, num_tokens: int) -> int:
        """Return how many sectors are in a block's extent; kept, because it costs O(layers)."""
        num_sectors = self._num_sectors.get(num_tokens)
        if num_sectors is None:
            slices = (self.slice_bytes(i, num_tokens) for i in range(len(self.layout.layers)))
            num_sectors = (self.header_bytes + sum(slices)) // SECTOR_BYTES
            self._num_sectors[num_tokens] = num_sectors
        return num_sectors
