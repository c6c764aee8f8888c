"""Slot copy kernel: copies tokens between slots in pinned host memory and device memory.

    slots          address of the first layer's component in slot 0
    offsets        [tokens], bytes from there to each token
    memory         the first layer's tensor on the device, whose tokens are
                   `memory_stride_token` bytes apart
    places         [tokens], slot of each token in `memory`; without HAS_PLACES the first slots
    slot_layers,   [layers], bytes from the first layer to each layer, in a slot and on the device;
    memory_layers  without HAS_LAYERS there is one layer

Each program copies a few tokens at a time, and every n-th part of all. Together the programs need
only as many bytes under way as the bus carries during one round trip. So a few programs are enough,
and the rest of the device can compute.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def copy_tokens(
    memory,
    slots,
    offsets,
    places,
    slot_layers,
    memory_layers,
    num_tokens,
    num_parts,
    memory_stride_token,
    ITEMS: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    TOKENS: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_LAYERS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Copy ITEMS items of each token from slots to the device, or with TO_SLOTS the other way.

    A part is BLOCK_ITEMS of each of TOKENS tokens. Addresses are multiples of ALIGNMENT bytes.
    """
    if ITEM_BYTES == 8:
        item: tl.constexpr = tl.int64
    elif ITEM_BYTES == 4:
        item: tl.constexpr = tl.int32
    elif ITEM_BYTES == 2:
        item: tl.constexpr = tl.int16
    else:
        item: tl.constexpr = tl.uint8
    slots = slots.to(tl.int64)  # Triton passes small integers as int32
    slots = tl.multiple_of(slots.to(tl.pointer_type(item)), ALIGNMENT)
    memory = tl.multiple_of(memory.to(tl.pointer_type(item)), ALIGNMENT)
    cuts: tl.constexpr = (ITEMS + BLOCK_ITEMS - 1) // BLOCK_ITEMS
    groups = (num_tokens + TOKENS - 1) // TOKENS
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        tokens = part // cuts % groups * TOKENS + tl.arange(0, TOKENS)
        items = part % cuts * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
        is_token = tokens < num_tokens
        there = tl.load(offsets + tokens, mask=is_token, other=0)
        here = tokens.to(tl.int64)
        if HAS_PLACES:
            here = tl.load(places + tokens, mask=is_token, other=0)
        here = here * memory_stride_token
        if HAS_LAYERS:
            layer = part // cuts // groups
            there += tl.load(slot_layers + layer)
            here += tl.load(memory_layers + layer)
        # All offsets are multiples of ALIGNMENT, which the compiler cannot infer.
        there = tl.multiple_of(there // ITEM_BYTES, ALIGNMENT // ITEM_BYTES)
        here = tl.multiple_of(here // ITEM_BYTES, ALIGNMENT // ITEM_BYTES)
        there = slots + there[:, None] + items[None, :]
        here = memory + here[:, None] + items[None, :]
        is_item = is_token[:, None] & (items[None, :] < ITEMS)
        if TO_SLOTS:
            tl.store(there, tl.load(here, mask=is_item), mask=is_item)
        else:
            tl.store(here, tl.load(there, mask=is_item), mask=is_item)
