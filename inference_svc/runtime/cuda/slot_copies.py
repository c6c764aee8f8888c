"""Slot copies: a Triton kernel copies tokens between a device and slots in the host's memory.

The device's copy engines take about a microsecond per piece, and Python about as long to enqueue
it, while the bus carries a layer's piece of a block in a microsecond. One launch of the kernel
copies all tokens, and also those of several layers at once. Triton is imported by the first launch:
where a CPU computes, it may not be installed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.memory import copy_to_device
from shared.types.units import ceil_div

# Number of programs, with 132 multiprocessors: enough to fill the bus, and the rest can compute.
PROGRAMS_TO_DEVICE, PROGRAMS_TO_SLOTS = 12, 4
WARPS = 8
BLOCK_BYTES = 16 << 10  # bytes that a program has under way
VECTOR_BYTES = 16  # most bytes of a thread's memory access
ITEM_BYTES = 8  # most bytes of an element


class TokensInSlots(NamedTuple):
    """The addresses of tokens in registered host memory, in one component of some layers.

    Attributes:
        address: address of the first layer's component in slot 0.
        offsets: [tokens] int64 on the device, bytes from `address` to each token.
        step: a common divisor of all offsets.
        layers: by layer, bytes from the first layer's component to that layer's.
    """

    address: int
    offsets: Tensor
    step: int
    layers: Sequence[int] = (0,)


class TokensOnDevice(NamedTuple):
    """The addresses of the same tokens on the device.

    Attributes:
        memory: the first layer's tensor, [slots, *shape]; the elements of a token are contiguous.
        places: [tokens] int64 on the device, the slot of each token; None: the first slots.
        layers: by layer, bytes from the first layer's tensor to that layer's.
    """

    memory: Tensor
    places: Tensor | None = None
    layers: Sequence[int] = (0,)


def copy_slots(slots: TokensInSlots, here: TokensOnDevice, *, to_slots: bool) -> None:
    """Enqueue copies of tokens between slots and a device, on this thread's current stream.

    Args:
        slots: the tokens in host memory, at least one.
        here: the same tokens on the device.
        to_slots: whether to copy to the slots; False: to the device.
    """
    from inference_svc.runtime.cuda.kernels.slot_copies import copy_tokens

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
    num_parts = num_layers * ceil_div(num_tokens, shape.tokens) * shape.num_cuts
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
    """The work of a program at a time: `block_items` elements of each of `tokens` tokens.

    Attributes:
        item_bytes: bytes of an element.
        items: number of elements of a token.
        block_items: number of elements of a token's part.
        tokens: number of tokens.
        num_cuts: number of parts that a token is divided into.
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
    block_items = min(1 << (items - 1).bit_length(), block)
    tokens = max(1, block // block_items)
    return _Shape(item_bytes, items, block_items, tokens, ceil_div(items, block_items))
