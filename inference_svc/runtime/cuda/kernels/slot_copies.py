"""Tokens copied between slots, in the host's memory that is locked in place, and the device's.

    slots          address of the first layer's component in the first slot
    offsets        [tokens] bytes from there to each token
    memory         the first layer's tensor on the device; tokens are
                   `memory_stride_token` bytes apart there
    places         [tokens] which token of it each is; without HAS_PLACES they are the first ones
    slot_layers,   [layers] bytes from the first layer to each, in a slot and on the device; without
    memory_layers  HAS_LAYERS there is one

The programs take turns at a few tokens each, whatever they are. What they have under way together
is what the bus carries while it answers one of them: few programs suffice, and the rest of the
device computes.
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
    slots = slots.to(tl.int64)  # an address that is small comes as an int32
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
        # All that is added to the addresses is such a multiple, which the compiler cannot know.
        there = tl.multiple_of(there // ITEM_BYTES, ALIGNMENT // ITEM_BYTES)
        here = tl.multiple_of(here // ITEM_BYTES, ALIGNMENT // ITEM_BYTES)
        there = slots + there[:, None] + items[None, :]
        here = memory + here[:, None] + items[None, :]
        is_item = is_token[:, None] & (items[None, :] < ITEMS)
        if TO_SLOTS:
            tl.store(there, tl.load(here, mask=is_item), mask=is_item)
        else:
            tl.store(here, tl.load(there, mask=is_item), mask=is_item)
