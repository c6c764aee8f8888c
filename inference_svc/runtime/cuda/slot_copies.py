"""Tokens in slots are copied by a kernel of Triton's, which reads and writes the host's memory.

The device's copy engines, given as many pieces, take about a microsecond for each, and Python as
much to name it; a layer's piece of a block is a microsecond of the bus. And one launch takes the
tokens of all layers, where all of them are there.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from inference_svc.runtime.cuda.kernels.slot_copies import copy_tokens
from inference_svc.runtime.memory import copy_to_device

# Of 132 multiprocessors: enough to fill the bus, and few that do not compute meanwhile.
PROGRAMS_TO_DEVICE, PROGRAMS_TO_SLOTS = 12, 4
WARPS = 8
BLOCK_BYTES = 16 << 10  # that a program has under way
VECTOR_BYTES = 16  # of a thread, at most
ITEM_BYTES = 8  # likewise, of one element


class TokensInSlots(NamedTuple):
    """Where some tokens are in memory that the device reaches, in one component of some layers.

    Attributes:
        address: of the first layer's component in the first slot.
        offsets: [tokens] int64 on the device: bytes from there to each token.
        step: a divisor of all offsets.
        layers: bytes from the first layer's component to that of each layer.
    """

    address: int
    offsets: Tensor
    step: int
    layers: Sequence[int] = (0,)


class TokensOnDevice(NamedTuple):
    """Where the same tokens are on the device.

    Attributes:
        memory: the first layer's tensor, [slots, *shape]; the elements of a token lie side by side.
        places: [tokens] int64 on the device, the slot of each; None: the first ones.
        layers: bytes from the first layer's tensor to that of each layer.
    """

    memory: Tensor
    places: Tensor | None = None
    layers: Sequence[int] = (0,)


def copy_slots(slots: TokensInSlots, here: TokensOnDevice, *, to_slots: bool) -> None:
    """Enqueue copies of tokens to the device, or the other way; on this thread's current stream.

    Args:
        slots: at least one token.
        here: where they are on the device.
        to_slots: whether they are copied to their slots.
    """
    memory = here.memory
    if not memory[0].is_contiguous():
        raise AssertionError(f"tokens whose elements lie apart: strides {memory.stride()}")
    bytes_apart = memory.stride(0) * memory.itemsize
    token_bytes = math.prod(memory.shape[1:]) * memory.itemsize
    alignment = math.gcd(
        VECTOR_BYTES,
        token_bytes,
        bytes_apart,
        slots.address,
        slots.step,
        memory.data_ptr(),
        *slots.layers,
        *here.layers,
    )
    shape = _shape_of(token_bytes, alignment)
    num_tokens, num_layers = len(slots.offsets), len(slots.layers)
    num_parts = num_layers * triton.cdiv(num_tokens, shape.tokens) * shape.num_cuts
    programs = PROGRAMS_TO_SLOTS if to_slots else PROGRAMS_TO_DEVICE
    slot_layers = memory_layers = None
    if num_layers > 1:
        layers = copy_to_device(memory.device, torch.tensor([slots.layers, here.layers]))
        slot_layers, memory_layers = layers.unbind(0)
    with torch.cuda.device_of(memory):  # type: ignore[no-untyped-call]
        copy_tokens[(min(programs, num_parts),)](
            memory,
            slots.address,
            slots.offsets,
            here.places,
            slot_layers,
            memory_layers,
            num_tokens,
            num_parts,
            bytes_apart,
            ITEMS=shape.items,
            ITEM_BYTES=shape.item_bytes,
            BLOCK_ITEMS=shape.block_items,
            TOKENS=shape.tokens,
            TO_SLOTS=to_slots,
            HAS_PLACES=here.places is not None,
            HAS_LAYERS=num_layers > 1,
            ALIGNMENT=alignment,
            num_warps=WARPS,
        )


class _Shape(NamedTuple):
    """What a program has under way: `block_items` of each of some tokens.

    Attributes:
        item_bytes: of an element.
        items: of a token.
        num_cuts: parts that a token is cut into.
    """

    item_bytes: int
    items: int
    block_items: int
    tokens: int
    num_cuts: int


@lru_cache(maxsize=256)
def _shape_of(token_bytes: int, alignment: int) -> _Shape:
    item_bytes = min(alignment, ITEM_BYTES)
    items, block = token_bytes // item_bytes, BLOCK_BYTES // item_bytes
    block_items = min(triton.next_power_of_2(items), block)
    tokens = max(1, block // block_items)
    return _Shape(item_bytes, items, block_items, tokens, triton.cdiv(items, block_items))
