"""Pieces of slots copied between the host's memory, which is locked in place, and the device's.

    slots    address of the first slot's piece; slot s has its own `s * slot_items` behind it
    slot_ids [pieces] whose pieces they are
    rows     [pieces, PIECE_ITEMS] on the device

The programs take turns at parts of BLOCK items, whatever the pieces are. What they have under way
together is what the bus carries while it answers one of them: few programs suffice, and the rest of
the device computes.
"""

import triton
import triton.language as tl


@triton.jit
def copy_pieces(
    rows,
    slots,
    slot_ids,
    num_parts,
    slot_items,
    PIECE_ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Copy pieces of items of the type of rows: from slots, or with TO_SLOTS the other way."""
    slots = tl.multiple_of(slots.to(tl.pointer_type(rows.dtype.element_ty)), ALIGNMENT)
    parts: tl.constexpr = (PIECE_ITEMS + BLOCK - 1) // BLOCK
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        piece = part // parts
        items = part % parts * BLOCK + tl.arange(0, BLOCK)
        is_item = items < PIECE_ITEMS
        there = slots + tl.load(slot_ids + piece) * slot_items + items
        here = rows + piece.to(tl.int64) * PIECE_ITEMS + items
        if TO_SLOTS:
            tl.store(there, tl.load(here, mask=is_item), mask=is_item)
        else:
            tl.store(here, tl.load(there, mask=is_item), mask=is_item)
