"""Store: write buffer -> arena slots, keys as they were before RoPE.

    write buffer  per layer and component [slots, kv_heads, dim]
    arena slots   per layer and component [num_slots, block_tokens, kv_heads, dim]

Only copies: it may follow a forward layer by layer, or run long after the sequence's KV was
released.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from inference_svc.runtime.kv.arena_kv import ArenaKv, Block, part_of
from inference_svc.runtime.kv.layer_gate import WaitLayer, no_wait
from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.kv.slot_runs import SlotRun
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.granted_slots import GrantedWindow


@torch.inference_mode()
def store_blocks(
    buffer: WriteBuffer,
    arena: ArenaKv,
    blocks: Sequence[Block],
    calibration: Calibration,
    wait_layer: WaitLayer = no_wait,
    windows: Sequence[GrantedWindow] = (),
) -> None:
    """Copy the blocks' tokens to their slots; the buffer is only read.

    Args:
        buffer: the write buffer; the caller holds it.
        arena: the arena of the slots; the caller holds their lease and completes it afterwards,
            unless this raised.
        blocks: the blocks, in any order; fastest in the order of tokens.
        calibration: the layout and recipes of the buffer's model.
        wait_layer: callback before a layer is read; waits until that is in the buffer, and returns
            the end of the layers that are; may raise. With a callback of the caller's, blocks may
            have tokens that a forward under way has still to write.
        windows: the slots for layers with a window, in any order.

    Raises:
        ValueError: if a block has tokens that the buffer has not; nothing was written then.
    """
    end = buffer.end_token
    if wait_layer is not no_wait:
        end = buffer.room_end
    stored: list[Block | GrantedWindow] = [*blocks, *windows]
    for block in stored:
        block_end = block.token_offset + block.num_tokens
        is_here = buffer.first_token <= block.token_offset and block_end <= end
        if not is_here or not 0 < block.num_tokens <= calibration.layout.block_tokens:
            raise ValueError(
                f"tokens {block.token_offset} to {block_end} cannot be stored from a buffer that "
                f"holds {buffer.first_token} to {end}"
            )
    layout = calibration.layout
    parts = [blocks, *(part_of(windows, part) for part in range(layout.window_slots))]
    pieces = [list(_pieces(buffer, part)) for part in parts]
    arena.clear_unwritten(windows)
    first, num_layers = 0, len(calibration.layers)
    while first < num_layers:
        end = min(wait_layer(first), num_layers)
        for part, stored_there in enumerate(pieces):
            inside = [layer for layer in range(first, end) if layout.part_of(layer) == part]
            for component_index, tensors in enumerate(buffer.components):
                having = [
                    layer
                    for layer in inside
                    if component_index < len(calibration.layers[layer].components)
                ]
                for run, places in stored_there if having else ():
                    arena.scatter_layers(having, component_index, run, tensors.layers, places)
        first = end


def _pieces(buffer: WriteBuffer, blocks: Sequence[Block]) -> Iterator[tuple[SlotRun, Places]]:
    """Cut runs of blocks so that most pieces are contiguous in buffer and arena: one copy each.

    Blocks whose tokens are scattered in the buffer are gathered first, all at once.
    """
    for first, run in _runs(blocks):
        for begin, end in _stretches(buffer, first, run):
            piece = SlotRun(run.slot_ids[begin:end], run.start, run.tokens_per_slot)
            yield piece, buffer.places(first + begin * run.tokens_per_slot, piece.num_tokens)


def _stretches(buffer: WriteBuffer, first_token: int, run: SlotRun) -> Sequence[tuple[int, int]]:
    """Divide a run's blocks into stretches; return the first block and the end of each."""
    num_blocks, size = len(run.slot_ids), run.tokens_per_slot

    def lies(index: int) -> tuple[int, int] | None:  # equal for blocks that are contiguous
        slots = buffer.slots_of(first_token + index * size, size)
        is_whole = all(slot == slots[0] + offset for offset, slot in enumerate(slots))
        return (slots[0] - index * size, run.slot_ids[index] - index) if is_whole else None

    groups = [list(group) for _, group in groupby(range(num_blocks), lies)]
    # Many copies of one block each take longer than one of all blocks by index; on a device each
    # copy is a transfer, so that there it is always one.
    if 2 * len(groups) > num_blocks or buffer.device.type != "cpu":
        return [(0, num_blocks)]
    return [(group[0], group[-1] + 1) for group in groups]


def _runs(blocks: Sequence[Block]) -> Iterator[tuple[int, SlotRun]]:
    """Group successive blocks of one size; yield (first token, slots)."""

    def begins(numbered: tuple[int, Block]) -> tuple[int, int]:  # equal for successive blocks
        number, block = numbered
        return block.token_offset - number * block.num_tokens, block.num_tokens

    for (_, size), group in groupby(enumerate(blocks), begins):
        run = [block for _, block in group]
        yield run[0].token_offset, SlotRun([block.slot_id for block in run], 0, size)
