"""ExtentShape: how one block lies on SSD, in sectors.

    extent = header | layer slice 0 | layer slice 1 | …     each padded to whole sectors

The slices of a full block equal those of its slot, padding included, so they move without a copy.
Of a partial block only the used rows are stored: each slice has, component after component, the
rows that hold tokens. A partial block is *packed* into part of an extent beside other partial ones.
A part of a state or a window has no tokens, and all bytes of its slot.

The header has room for sealing whether the extent is sealed or not: so one volume can hold both
kinds, and sealing does not change the size of an extent.

Pure. `kvd/FORMATS.md` has the header's bytes.
"""

from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up

HEADER_FIXED_BYTES = 64
CHECKSUM_BYTES = 8  # per layer
TAG_BYTES = 16  # per layer, and one more for the header; used in sealed extents
TOKEN_ID_BYTES = 4


class ExtentShape:
    """Sizes of the extents of one layout."""

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
        self._num_sectors: dict[int, int] = {}  # by number of tokens; a cache

    def slice_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Return the size of one layer slice on SSD in bytes, padding included."""
        if not num_tokens:
            return self.layout.slot_slices[layer_index]
        used_bytes = self.layout.token_layers[layer_index].token_bytes * num_tokens
        return align_up(used_bytes, SECTOR_BYTES)

    def num_sectors(self, num_tokens: int) -> int:
        """Return the number of sectors of a block's extent. Cached, because it costs O(layers)."""
        num_sectors = self._num_sectors.get(num_tokens)
        if num_sectors is None:
            slices = (self.slice_bytes(i, num_tokens) for i in range(len(self.layout.layers)))
            num_sectors = (self.header_bytes + sum(slices)) // SECTOR_BYTES
            self._num_sectors[num_tokens] = num_sectors
        return num_sectors
