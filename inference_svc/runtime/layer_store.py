"""Store: slab -> arena slots, keys as they were before RoPE.

Pure copying: it may run on a copy thread once the sequence does not run, or for rows that `step` is
done with.
"""

from collections.abc import Sequence
from typing import Protocol

from inference_svc.runtime.kv_slab import KVSlab
from inference_svc.runtime.layer_load import Arena, slot_rows
from inference_svc.runtime.recipes import Calibration


class Block(Protocol):
    """A reserved slot, and the run of tokens that its first rows are to hold."""

    @property
    def slot_id(self) -> int:
        """Which slot."""

    @property
    def token_offset(self) -> int:
        """Position in the sequence of row 0."""

    @property
    def num_tokens(self) -> int:
        """Number of rows."""


def store_blocks(
    slab: KVSlab, arena: Arena, blocks: Sequence[Block], calibration: Calibration
) -> None:
    """Copy the blocks' rows to their slots; the slab is only read.

    Args:
        slab: made with `save`; holds the blocks' tokens from `save_from` on.
        arena: that the slots are in; the caller holds their lease and completes it afterwards.
        blocks: in any order.
        calibration: of the model that the slab belongs to.

    Raises:
        ValueError: if a block wants tokens the slab cannot give; nothing was written then.
    """
    layout = calibration.layout
    for block in blocks:
        end = block.token_offset + block.num_tokens
        is_here = slab.save_from <= block.token_offset and end <= slab.num_tokens
        if slab.free_keys is None or not is_here or not 0 < block.num_tokens <= layout.block_tokens:
            raise ValueError(
                f"tokens {block.token_offset} to {end} cannot be stored from a slab that holds "
                f"{slab.save_from} to {slab.num_tokens}"
            )
    for block in blocks:
        _store_block(slab, arena.slot(block.slot_id), block, calibration)


def _store_block(slab: KVSlab, slot: memoryview, block: Block, calibration: Calibration) -> None:
    begin, end = block.token_offset, block.token_offset + block.num_tokens
    for layer_index, recipe in enumerate(calibration.layers):
        keys, values = (
            slot_rows(slot, calibration.layout, layer_index, component, 0, block.num_tokens)
            for component in (0, 1)
        )
        if recipe.rotary is None or slab.free_keys is None:
            keys.copy_(slab.keys[layer_index][0, :, begin:end].transpose(0, 1))
        else:
            keys.copy_(slab.free_keys[layer_index][begin:end])
        values.copy_(slab.values[layer_index][0, :, begin:end].transpose(0, 1))
